package instance

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// RoleNode is the role of the one member of an app without a control plane of its own.
const RoleNode = "node"

// What a node may say about one member; what is over it is cut off.
const (
	maxDetailBytes   = 2 << 10
	maxEndpoints     = 64
	maxEndpointBytes = 255
)

// Actor is who asked for something.
type Actor struct {
	Type string `json:"type"`
	ID   string `json:"id,omitempty"`
}

// HintResult says what became of a hint in the request.
type HintResult struct {
	Field     string `json:"field"`
	Requested string `json:"requested"`
	Effective string `json:"effective"`
	Reason    string `json:"reason"`
}

// Endpoint is where a member can be reached, as its node published it.
type Endpoint struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Host     string `json:"host"`
	Port     uint32 `json:"port"`
}

// URL is the endpoint's address: on the node's own loopback, for a private one.
func (e Endpoint) URL() string { return fmt.Sprintf("%s://%s:%d", e.Protocol, e.Host, e.Port) }

// Modes are the effective ones, decided by the server.
type Modes struct {
	OperatingMode      string
	ControlPlaneScope  string
	RuntimeBackend     string
	TenantBoundaryMode string
}

// Instance is a project's running app.
type Instance struct {
	ID          string
	OrgID       string
	OrgSlug     string
	ProjectID   string
	AppSlug     string
	DisplayName string
	Lifecycle   Lifecycle
	Modes       Modes
	// Revision is the wanted one; Version is its app version, PreviousVersion that of the revision before.
	Revision        int64
	Version         string
	PreviousVersion string
	ParametersJSON  string
	ConfigJSON      string
	// PlacementAllocationIDs are those that the request named.
	PlacementAllocationIDs []string
	HintResults            []HintResult
	Members                []Member
	// RequestedBy and CorrelationID are of the request that made the instance; those of the latest are in Operation.
	RequestedBy     Actor
	CorrelationID   string
	Operation       Operation
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
	ActivatedAt     time.Time
}

// Member is an instance's part on one allocation.
type Member struct {
	ID           string
	InstanceID   string
	AllocationID string
	NodeID       string
	Role         string
	// Status is pending while the node has said nothing.
	Status           protocol.WorkloadStatus_Status
	Reason           protocol.WorkloadStatus_Reason
	Detail           string
	ObservedRevision int64
	// OwnerRefusal is the signed word of the node's owner (protocol.OwnerRefusal in its envelope), where that is the
	// reason.
	OwnerRefusal []byte
	// ObservedIncarnation is the incarnation of the node that spoke of the member last; empty where none did.
	ObservedIncarnation string
	// FallbackFrom is the revision that the node left by itself for the observed one; 0 where it did not.
	FallbackFrom int64
	// FailingSince is when the node first reported this failure of the observed revision; zero while the member has not
	// failed.
	FailingSince time.Time
	// FailureConfirmed says that a later report repeated it.
	FailureConfirmed bool
	Unreachable      bool
	Endpoints        []Endpoint
	Restarts         int64
	ExitCode         int64
	StartedAt        time.Time
	ReadyAt          time.Time
	ExitedAt         time.Time
	// Gone is set with RemovedAt: the node's proof was complete, or its silence proved as much, or the node is lost.
	Gone      bool
	RemovedAt time.Time
}

// lifecycleState is what the lifecycle looks at: what is said about an older revision says nothing about the wanted
// one.
func (m Member) lifecycleState(wanted int64) MemberState {
	s := MemberState{Unreachable: m.Unreachable, Gone: m.Gone}
	switch {
	case m.lost():
		s.Lost, s.Status, s.Reason = true, protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_NODE_LOST
	case m.FallbackFrom != 0 && m.FallbackFrom == wanted:
		s.RolledBackByNode, s.Reason = true, m.Reason
	case m.ObservedRevision == wanted:
		s.Status, s.Reason = m.Status, m.Reason
		s.GaveUp = m.Status == protocol.WorkloadStatus_FAILED && m.FailureConfirmed && !isTemporary(m.Reason)
		if m.FallbackFrom != 0 && m.Status != protocol.WorkloadStatus_FAILED {
			// The reason is why the other revision was left.
			s.Reason = 0
		}
	}
	return s
}

// failureConfirmedAfter is how much later a report must repeat a failure until it counts: a file that is being replaced
// or an agent that is being upgraded is refused once and admitted in the next look. It is twice the longest time
// between two reports of a node.
const failureConfirmedAfter = 20 * time.Second

// updateFailure keeps since when a member fails, and whether a later report has repeated it. before is the member as it
// was.
func (m *Member) updateFailure(before Member, now time.Time) {
	switch {
	case m.Status != protocol.WorkloadStatus_FAILED:
		m.FailingSince, m.FailureConfirmed = time.Time{}, false
	case before.Status != protocol.WorkloadStatus_FAILED || before.Reason != m.Reason ||
		before.ObservedRevision != m.ObservedRevision ||
		before.FailingSince.IsZero():
		m.FailingSince, m.FailureConfirmed = now, false
	case now.Sub(before.FailingSince) >= failureConfirmedAfter:
		m.FailureConfirmed = true
	}
}

// lost reports whether the member ended with its node, unproved; one that was proved gone is removed.
func (m Member) lost() bool { return m.Gone && m.Status == protocol.WorkloadStatus_FAILED }

// history is what the actions on the instance depend on; base is the revision to go back to, 0 where there is none.
func (i Instance) history(base int64) History {
	p := History{Worked: base != 0, Lost: len(i.Members) > 0}
	for _, m := range i.Members {
		p.Lost = p.Lost && m.lost()
	}
	return p
}

// History is past of an action that goes back to no revision.
func (i Instance) History() History { return i.history(0) }

func (i Instance) memberStates() []MemberState {
	states := make([]MemberState, 0, len(i.Members))
	for _, m := range i.Members {
		states = append(states, m.lifecycleState(i.Revision))
	}
	return states
}

// Change is what one look at an instance changed; the caller records one event for each step, numbered from
// FirstVersion.
type Change struct {
	Instance Instance
	Steps    []Step
	// FirstVersion is the resource version of the first step.
	FirstVersion int64
	// DesiredChanged is true when the nodes have to be told: what they are to hold is another.
	DesiredChanged bool
	// Removed are the members that were proved gone, or lost, by this look.
	Removed []Removal
}

// Resumed reports whether the members are to run after the change and were not to before.
func (c Change) Resumed() bool {
	if len(c.Steps) == 0 || c.Steps[0].From == "" {
		return false
	}
	held, stopped := c.Instance.Lifecycle.Status.Desired()
	_, before := c.Steps[0].From.Desired()
	return held && !stopped && before
}

// Removal is one member that ended.
type Removal struct {
	Member Member
	// Proof is nil where no node ever held the member, and where the node is lost.
	Proof *protocol.RemovalProof
	Lost  bool
}

// NewInstance is an app instance that is to be, with its first revision and its members placed.
type NewInstance struct {
	ID                     string
	OrgID                  string
	OrgSlug                string
	ProjectID              string
	AppSlug                string
	DisplayName            string
	Modes                  Modes
	ConfigJSON             string
	PlacementAllocationIDs []string
	HintResults            []HintResult
	RequestedBy            Actor
	CorrelationID          string
	OperationID            string
	Revision               NewRevision
	Members                []NewMember
}

// NewRevision is what every member runs at one revision.
type NewRevision struct {
	AppVersion         string
	ParametersJSON     string
	ManifestEnvelope   []byte
	DelegationEnvelope []byte
	Features           []string
	ReadinessTimeout   time.Duration
}

// NewMember is one member with the services that its share of the allocation gives it.
type NewMember struct {
	ID           string
	AllocationID string
	NodeID       string
	// Unreachable is true where the node is out of reach right now.
	Unreachable bool
	Services    []*protocol.Service
}

// Create writes an instance in status requested.
func Create(ctx context.Context, tx db.Tx, n NewInstance, now time.Time) (Change, error) {
	i := Instance{
		ID: n.ID, OrgID: n.OrgID, OrgSlug: n.OrgSlug, ProjectID: n.ProjectID, AppSlug: n.AppSlug, DisplayName: n.DisplayName,
		Lifecycle: Lifecycle{Status: Requested, Health: HealthUnknown}, Modes: n.Modes,
		Revision: 1, Version: n.Revision.AppVersion, ParametersJSON: n.Revision.ParametersJSON, ConfigJSON: n.ConfigJSON,
		PlacementAllocationIDs: n.PlacementAllocationIDs, HintResults: n.HintResults,
		RequestedBy: n.RequestedBy, CorrelationID: n.CorrelationID, ResourceVersion: 1,
		Operation: Operation{Kind: operationDeploy, By: n.RequestedBy, CorrelationID: n.CorrelationID}, CreatedAt: now,
		UpdatedAt: now,
	}
	for _, m := range n.Members {
		member := Member{
			ID: m.ID, InstanceID: i.ID, AllocationID: m.AllocationID, NodeID: m.NodeID, Role: RoleNode,
			Status:      protocol.WorkloadStatus_PENDING,
			Unreachable: m.Unreachable,
		}
		if err := insertMember(ctx, tx, member, i.Revision, m.Services, now); err != nil {
			return Change{}, err
		}
		i.Members = append(i.Members, member)
	}
	// No node has said anything yet, so this can only add why that may take a while.
	i.Lifecycle, _ = Advance(i.Lifecycle, i.memberStates())
	if err := insertInstance(ctx, tx, i); err != nil {
		return Change{}, err
	}
	first := Revision{No: i.Revision, AppVersion: n.Revision.AppVersion}
	if err := insertRevision(ctx, tx, i.ID, first, n.Revision, i.CorrelationID, now); err != nil {
		return Change{}, err
	}
	op := operation{
		ID: n.OperationID, InstanceID: i.ID, Kind: operationDeploy, Revision: i.Revision, By: n.RequestedBy,
		CorrelationID: n.CorrelationID,
	}
	if err := insertOperation(ctx, tx, op, now); err != nil {
		return Change{}, err
	}
	return Change{Instance: i, Steps: []Step{{To: Requested}}, FirstVersion: 1, DesiredChanged: true}, nil
}

// Get gives an instance of the project; another project's answers like none.
func Get(ctx context.Context, tx db.Tx, projectID, id string) (Instance, error) {
	if !db.IsID(id) || !db.IsID(projectID) {
		return Instance{}, errNotFound()
	}
	list, err := selectInstances(ctx, tx, `WHERE i.project_id = $1 AND i.id = $2`, projectID, id)
	if err != nil {
		return Instance{}, err
	}
	if len(list) == 0 {
		return Instance{}, errNotFound()
	}
	return list[0], nil
}

// Filter narrows a list; After is the id that the page before ended with.
type Filter struct {
	ProjectID string
	Status    Status
	AppSlug   string
	After     string
	Limit     int
}

// EachManifest gives the signed envelopes of all revisions of instances that are not decommissioned, each once. The
// bytes are valid during the call.
func EachManifest(ctx context.Context, tx db.Tx, each func(envelope []byte)) error {
	return eachManifest(ctx, tx, each)
}

// CountLive is how many instances of the org are not decommissioned.
func CountLive(ctx context.Context, tx db.Tx, orgID string) (int64, error) {
	return countLive(ctx, tx, orgID)
}

// List gives a page of a project's instances, the newest first.
func List(ctx context.Context, tx db.Tx, f Filter) ([]Instance, error) {
	where, args := `WHERE l.project_id = $1`, []any{f.ProjectID}
	and := func(condition string, value any) {
		args = append(args, value)
		where += fmt.Sprintf(` AND %s $%d`, condition, len(args))
	}
	if f.Status != "" {
		and(`l.status =`, string(f.Status))
	}
	if f.AppSlug != "" {
		and(`l.app_slug =`, f.AppSlug)
	}
	if f.After != "" {
		and(`l.id <`, f.After)
	}
	args = append(args, f.Limit)
	list, err := selectInstances(ctx, tx, `WHERE i.id IN (SELECT l.id FROM app_instances l `+where+
		` ORDER BY l.id DESC LIMIT `+fmt.Sprintf("$%d", len(args))+`)`, args...)
	slices.Reverse(list)
	return list, err
}

// Request is who asks for an action, and under which operation it is kept.
type Request struct {
	OperationID   string
	By            Actor
	CorrelationID string
	// Reason is unspecified for what a person or program asked for.
	Reason protocol.WorkloadStatus_Reason
}

// RequestDecommission begins the end of an instance: its nodes are to hold it no more. It is over when they have proved
// that.
func RequestDecommission(ctx context.Context, tx db.Tx, i Instance, ask Request, now time.Time) (Change, error) {
	next, step, err := Decommission(i.Lifecycle)
	if err != nil {
		return Change{}, err
	}
	step.Reason = ask.Reason
	if err := endOperations(ctx, tx, i.ID, operationAbandoned, 0, now); err != nil {
		return Change{}, err
	}
	op := operation{
		ID: ask.OperationID, InstanceID: i.ID, Kind: operationDecommission, Revision: i.Revision, By: ask.By,
		CorrelationID: ask.CorrelationID,
	}
	if err := insertOperation(ctx, tx, op, now); err != nil {
		return Change{}, err
	}
	i.Operation = Operation{Kind: op.Kind, By: ask.By, CorrelationID: ask.CorrelationID}
	// A node that is out of reach already is said so at once, not only when it is lost again.
	after, more := Advance(next, i.memberStates())
	return saveSteps(ctx, tx, i, after, append([]Step{step}, more...), now)
}

// saveSteps stores a lifecycle with the steps that led there.
func saveSteps(ctx context.Context, tx db.Tx, i Instance, next Lifecycle, steps []Step, now time.Time) (Change, error) {
	heldBefore, stoppedBefore := i.Lifecycle.Status.Desired()
	held, stopped := next.Status.Desired()
	// While an upgrade is under way, the node's state holds what to go back to, and only then.
	upgrade := (next.Status == Upgrading) != (i.Lifecycle.Status == Upgrading)
	c := Change{Steps: steps, FirstVersion: i.ResourceVersion + 1, DesiredChanged: held != heldBefore ||
		stopped != stoppedBefore || upgrade}
	if next == i.Lifecycle && len(steps) == 0 {
		c.Instance = i
		return c, nil
	}
	i.Lifecycle, i.UpdatedAt = next, now
	i.ResourceVersion += int64(max(1, len(steps)))
	for _, s := range steps {
		if s.To == Running && i.ActivatedAt.IsZero() {
			i.ActivatedAt = now
		}
		if s.To == Running {
			if err := markReady(ctx, tx, i.ID, i.Revision, now); err != nil {
				return Change{}, err
			}
		}
		if outcome, over := operationOutcome(s); over {
			if err := endOperations(ctx, tx, i.ID, outcome, s.Reason, now); err != nil {
				return Change{}, err
			}
		}
	}
	c.Instance = i
	return c, updateInstance(ctx, tx, i)
}

// LiveInAllocation gives the instances in an allocation that nobody has asked to end.
func LiveInAllocation(ctx context.Context, tx db.Tx, allocationID string) ([]Instance, error) {
	return selectInstances(ctx, tx, `WHERE i.status NOT IN ('decommissioning', 'decommissioned') AND i.id IN (
		SELECT m.instance_id FROM instance_members m WHERE m.allocation_id = $1 AND m.removed_at IS NULL)`, allocationID)
}

// SnapshotFor gives what a node is to hold, for the compiler.
func SnapshotFor(ctx context.Context, tx db.Tx, nodeID string) ([]plan.Member, error) {
	return selectDesired(ctx, tx, `m.node_id = $1`, nodeID)
}

// SnapshotOf gives what the nodes of one instance are to hold of it, for the compiler.
func SnapshotOf(ctx context.Context, tx db.Tx, instanceID string) ([]plan.Member, error) {
	return selectDesired(ctx, tx, `m.instance_id = $1`, instanceID)
}

func errNotFound() error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such app instance in this project.", nil)
}
