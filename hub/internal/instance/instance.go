// Package instance owns app instances with their revisions, members and operations: the status of each, what a node is
// to run for them, and what nodes report about them. It does not place, price, sign or send anything, and writes no
// events: its functions return the steps, and the command that opened the transaction records them.
package instance

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// RoleNode is the role of the only member of an app without its own control plane.
const RoleNode = "node"

// Bounds of what a node may report about a member; longer values are truncated.
const (
	maxDetailBytes   = 2 << 10
	maxEndpoints     = 64
	maxEndpointBytes = 255
	maxServices      = 32
	// maxServiceDetailBytes is less than a member's: there are many of them in a row.
	maxServiceDetailBytes = 512
)

// HintResult is how a hint of the request was applied.
type HintResult struct {
	Field     string `json:"field"`
	Requested string `json:"requested"`
	Effective string `json:"effective"`
	Reason    string `json:"reason"`
}

// Endpoint is an address at which a member serves, as its node published it.
type Endpoint struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Host     string `json:"host"`
	Port     uint32 `json:"port"`
}

// URL is the endpoint's address, on the node's loopback interface.
func (e Endpoint) URL() string { return fmt.Sprintf("%s://%s:%d", e.Protocol, e.Host, e.Port) }

// Modes are the effective modes, which the hub decides.
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
	Lifecycle   lifecycle.Lifecycle
	Modes       Modes
	// Revision is the desired one; Version is its app version, PreviousVersion that of the revision before.
	Revision        int64
	Version         string
	PreviousVersion string
	ParametersJSON  string
	ConfigJSON      string
	// Resources is what was chosen, with the version's defaults for CPU, memory and accelerators.
	Resources manifest.Choice
	// PlacementAllocationIDs are the allocations that the request named.
	PlacementAllocationIDs []string
	HintResults            []HintResult
	Members                []Member
	// RequestedBy and CorrelationID are those of the creating request; Operation has those of the latest.
	RequestedBy     principal.Actor
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
	// External: an external worker operates the member, and not the agent of its node.
	External bool
	lifecycle.Member
	// OwnerRefusal is the signed word of the node's owner (protocol.OwnerRefusal in its envelope), where that is the
	// reason.
	OwnerRefusal []byte
	// ConfigSHA256 is the digest of the config that all its containers have.
	ConfigSHA256 []byte
	Endpoints    []Endpoint
	// Services is empty for a member of one service.
	Services  []ServiceStatus
	Restarts  int64
	ExitCode  int64
	StartedAt time.Time
	ReadyAt   time.Time
	ExitedAt  time.Time
	// HeartbeatAt is when an external worker last reported the member.
	HeartbeatAt time.Time
	// RemovedAt is set with Gone.
	RemovedAt time.Time
}

// HasConfig reports whether the containers of a member have the config of now.
func (i Instance) HasConfig(m Member) bool {
	sum := sha256.Sum256([]byte(i.ConfigJSON))
	return bytes.Equal(m.ConfigSHA256, sum[:])
}

// history is what the actions on the instance depend on; base is the revision to go back to, 0 where there is none.
func (i Instance) history(base int64) lifecycle.History {
	p := lifecycle.History{Worked: base != 0, Lost: len(i.Members) > 0}
	for _, m := range i.Members {
		p.Lost = p.Lost && m.Lost()
	}
	return p
}

// History is the history of an action that returns to no revision.
func (i Instance) History() lifecycle.History { return i.history(0) }

func (i Instance) memberStates() []lifecycle.MemberState {
	states := make([]lifecycle.MemberState, 0, len(i.Members))
	for _, m := range i.Members {
		if m.External {
			states = append(states, lifecycle.MemberState{
				Role: m.Role, Status: m.Status, Reason: m.Reason, Gone: m.Gone, Lost: m.Lost(),
			})
		} else {
			states = append(states, m.State(i.Revision))
		}
	}
	return states
}

// External reports whether an external worker operates the instance.
func (i Instance) External() bool { return manifest.IsExternal(i.Modes.RuntimeBackend) }

// advance applies the lifecycle to the instance's members.
func (i Instance) advance(l lifecycle.Lifecycle) (lifecycle.Lifecycle, []lifecycle.Step) {
	if i.External() {
		return lifecycle.AdvanceExternal(l, i.memberStates())
	}
	return lifecycle.Advance(l, i.memberStates())
}

// Change is the result of a transaction on an instance. The caller records one event for each step, numbered from
// FirstVersion.
type Change struct {
	Instance Instance
	// Before is the instance before a request changed it; zero where a node's report or the hub's own rule does.
	Before Instance
	Steps  []lifecycle.Step
	// FirstVersion is the resource version of the first step.
	FirstVersion int64
	// DesiredChanged: the desired state of the instance's nodes changed.
	DesiredChanged bool
	// Strategy is how nodes replace the version of before, where the manifest asks for start_first; StrategyReason says
	// why it is another one.
	Strategy, StrategyReason string
	// Removed are the members that the change proved gone, or lost.
	Removed []Removal
}

// Resumed reports whether the change makes members run that were not to run before.
func (c Change) Resumed() bool {
	if len(c.Steps) == 0 || c.Steps[0].From == "" {
		return false
	}
	present, stopped := c.Instance.Lifecycle.Status.Desired()
	_, stoppedBefore := c.Steps[0].From.Desired()
	return present && !stopped && stoppedBefore
}

// Removal is one member that ended.
type Removal struct {
	Member Member
	// Proof is nil where no node ever ran the member, and where the node is lost.
	Proof *protocol.RemovalProof
	Lost  bool
}

// NewRevision is what the members run at a revision.
type NewRevision struct {
	AppVersion         string
	ParametersJSON     string
	ConfigJSON         string
	Resources          manifest.Choice
	ManifestEnvelope   []byte
	DelegationEnvelope []byte
	Features           []string
	ReadinessTimeout   time.Duration
	// Services are those that each member's share of its allocation gives it, by member id.
	Services map[string][]*protocol.Service
}

// Create inserts an instance with status requested, its first revision and its members. Of each member, i names the id
// and the place, and whether its node is unreachable now.
func Create(ctx context.Context, tx db.Tx, i Instance, first NewRevision, operationID string,
	now time.Time,
) (Change, error) {
	i.Lifecycle = lifecycle.Lifecycle{Status: lifecycle.Requested, Health: lifecycle.HealthUnknown}
	i.Revision, i.Version, i.ResourceVersion = 1, first.AppVersion, 1
	i.ParametersJSON, i.ConfigJSON, i.Resources = first.ParametersJSON, first.ConfigJSON, first.Resources
	req := Request{OperationID: operationID, By: i.RequestedBy, CorrelationID: i.CorrelationID}
	i.Operation = operationOf(ctx, operationDeploy, req)
	i.CreatedAt, i.UpdatedAt, i.Members = now, now, slices.Clone(i.Members)
	for n := range i.Members {
		m := &i.Members[n]
		m.InstanceID, m.Role, m.Status = i.ID, cmp.Or(m.Role, RoleNode), protocol.WorkloadStatus_PENDING
		if err := insertMember(ctx, tx, *m, now); err != nil {
			return Change{}, err
		}
		if m.External {
			continue
		}
		if err := saveMemberRevision(ctx, tx, m.ID, i.Revision, first.Services[m.ID]); err != nil {
			return Change{}, err
		}
	}
	// Before any report, this can only add the reason for a delay.
	i.Lifecycle, _ = i.advance(i.Lifecycle)
	if err := insertInstance(ctx, tx, i); err != nil {
		return Change{}, err
	}
	if err := insertRevision(ctx, tx, i.ID, Revision{No: i.Revision}, first, i.CorrelationID, now); err != nil {
		return Change{}, err
	}
	if err := insertOperation(ctx, tx, i, operationDeploy, req, now); err != nil {
		return Change{}, err
	}
	telemetry.SetFields(ctx, i.LogFields())
	return Change{Instance: i, Steps: []lifecycle.Step{{To: lifecycle.Requested}}, FirstVersion: 1, DesiredChanged: true},
		nil
}

// Get returns an instance of the project; one of another project is not found.
func Get(ctx context.Context, tx db.Tx, projectID, id string) (Instance, error) {
	return selectOne(ctx, tx, `WHERE i.project_id = $1 AND i.id = $2`, projectID, id)
}

// Version tells whether an instance has changed.
type Version struct {
	No        int64
	UpdatedAt time.Time
}

// Versions reads the versions of instances, by id; those that are not there are left out. While the version of an
// instance is the same, so is all of it, but for the heartbeats of external workers.
func Versions(ctx context.Context, tx db.Tx, ids []string) (map[string]Version, error) {
	var (
		id  string
		v   Version
		all = make(map[string]Version, len(ids))
	)
	err := db.ForEach(ctx, tx, []any{&id, &v.No, &v.UpdatedAt}, func() { all[id] = v },
		`SELECT id, resource_version, updated_at FROM app_instances WHERE id = ANY($1::UUID[])`, ids)
	return all, err
}

// NextVersion gives an instance the version of an event that changes nothing else of it.
func NextVersion(ctx context.Context, tx db.Tx, id string, now time.Time) (int64, error) {
	tx.Changed(id)
	return db.Value[int64](ctx, tx, `UPDATE app_instances SET resource_version = resource_version + 1, updated_at = $2
		WHERE id = $1 RETURNING resource_version`, id, now)
}

// selectOne also gives the log lines of the caller's work the instance's fields.
func selectOne(ctx context.Context, tx db.Tx, where, scopeID, id string) (Instance, error) {
	if !db.IsID(scopeID) || !db.IsID(id) {
		return Instance{}, errNotFound()
	}
	list, err := selectInstances(ctx, tx, where, scopeID, id)
	if err == nil && len(list) == 0 {
		err = errNotFound()
	}
	if err != nil {
		return Instance{}, err
	}
	telemetry.SetFields(ctx, list[0].LogFields())
	return list[0], nil
}

// LogFields are what log lines of work on the instance have.
func (i Instance) LogFields() telemetry.Fields {
	return telemetry.Fields{
		OrgID:             i.OrgID,
		ProjectID:         i.ProjectID,
		AppInstanceID:     i.ID,
		OperatingMode:     i.Modes.OperatingMode,
		ControlPlaneScope: i.Modes.ControlPlaneScope,
		RuntimeBackend:    i.Modes.RuntimeBackend,
	}
}

// Filter selects a page of a list; After is the last id of the previous page.
type Filter struct {
	ProjectID string
	Status    lifecycle.Status
	AppSlug   string
	After     string
	Limit     int
}

// EachManifest calls each for the signed manifest envelopes of all instances that are not decommissioned, each once.
// The bytes are valid during the call.
func EachManifest(ctx context.Context, tx db.Tx, each func(envelope []byte)) error {
	var envelope []byte
	return db.ForEach(ctx, tx, []any{&envelope}, func() { each(envelope) },
		`SELECT DISTINCT r.manifest_envelope FROM instance_revisions r JOIN app_instances i ON i.id = r.instance_id
		WHERE i.status <> 'decommissioned'`)
}

// inUse joins app instances (i) with the revisions (r) that they run, start with or, during an upgrade, may return to.
const inUse = `FROM app_instances i
	JOIN instance_revisions latest ON latest.instance_id = i.id AND latest.revision = i.revision
	JOIN instance_revisions r ON r.instance_id = i.id AND (r.revision = i.revision
		OR r.revision = latest.fallback_revision AND i.status IN ('upgrading', 'rolling_back'))
	WHERE i.status <> 'decommissioned' AND r.app_version = $1`

// VersionInUse reports whether instances run the version of an app, start with it or may return to it.
func VersionInUse(ctx context.Context, tx db.Tx, appSlug, version string) (bool, error) {
	return db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 `+inUse+` AND i.app_slug = $2)`, version, appSlug)
}

// EachManifestInUse calls each with the signed manifest envelopes of a version's name that instances run, start with
// or, during an upgrade, may return to, each once. The bytes are valid during the call.
func EachManifestInUse(ctx context.Context, tx db.Tx, version string, each func(envelope []byte)) error {
	var envelope []byte
	return db.ForEach(ctx, tx, []any{&envelope}, func() { each(envelope) }, `SELECT DISTINCT r.manifest_envelope `+
		inUse, version)
}

// CountLive returns how many instances of the org are not decommissioned.
func CountLive(ctx context.Context, tx db.Tx, orgID string) (int64, error) {
	return db.Value[int64](ctx, tx,
		`SELECT count(*) FROM live_instances WHERE org_id = $1`, orgID)
}

// List returns a page of a project's instances, newest first.
func List(ctx context.Context, tx db.Tx, f Filter) ([]Instance, error) {
	var w db.Where
	w.And("l.project_id = " + w.Arg(f.ProjectID))
	w.Compare("l.status =", string(f.Status))
	w.Compare("l.app_slug =", f.AppSlug)
	w.Compare("l.id <", f.After)
	limit := w.Arg(f.Limit)
	list, err := selectInstances(ctx, tx,
		`WHERE i.id IN (SELECT l.id FROM app_instances l`+w.SQL()+` ORDER BY l.id DESC LIMIT `+limit+`)`, w.Args...)
	slices.Reverse(list)
	return list, err
}

// Request identifies who requests an action, and the operation that records it.
type Request struct {
	OperationID   string
	By            principal.Actor
	CorrelationID string
	// Reason is unspecified for a request of a person or program.
	Reason protocol.WorkloadStatus_Reason
}

// RequestDecommission begins the end of an instance. It is decommissioned when its nodes have proved that nothing of it
// is left.
func RequestDecommission(ctx context.Context, tx db.Tx, i Instance, req Request, now time.Time) (Change, error) {
	next, step, err := lifecycle.Decommission(i.Lifecycle)
	if err != nil {
		return Change{}, err
	}
	step.Reason = req.Reason
	if err := endOperations(ctx, tx, i.ID, operationAbandoned, 0, now); err != nil {
		return Change{}, err
	}
	if err := insertOperation(ctx, tx, i, operationDecommission, req, now); err != nil {
		return Change{}, err
	}
	i.Operation = operationOf(ctx, operationDecommission, req)
	// An unreachable node shows at once.
	after, more := i.advance(next)
	return saveSteps(ctx, tx, i, after, append([]lifecycle.Step{step}, more...), now)
}

// saveSteps saves a lifecycle with the steps that led to it.
func saveSteps(ctx context.Context, tx db.Tx, i Instance, next lifecycle.Lifecycle, steps []lifecycle.Step,
	now time.Time,
) (Change, error) {
	presentBefore, stoppedBefore := i.Lifecycle.Status.Desired()
	present, stopped := next.Status.Desired()
	// Only meanwhile, the node's state has the fallback.
	replaces := func(s lifecycle.Status) bool { return s == lifecycle.Upgrading || s == lifecycle.RollingBack }
	upgrade := replaces(next.Status) != replaces(i.Lifecycle.Status)
	c := Change{Steps: steps, FirstVersion: i.ResourceVersion + 1, DesiredChanged: present != presentBefore ||
		stopped != stoppedBefore || upgrade}
	if next == i.Lifecycle && len(steps) == 0 {
		c.Instance = i
		return c, nil
	}
	i.Lifecycle, i.UpdatedAt = next, now
	i.ResourceVersion += int64(max(1, len(steps)))
	for _, s := range steps {
		if s.To == lifecycle.Running && i.ActivatedAt.IsZero() {
			i.ActivatedAt = now
		}
		if s.To == lifecycle.Running {
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

// LiveInAllocation returns the instances in an allocation whose end was not requested.
func LiveInAllocation(ctx context.Context, tx db.Tx, allocationID string) ([]Instance, error) {
	return selectInstances(ctx, tx, `WHERE i.status NOT IN ('decommissioning', 'decommissioned') AND i.id IN (
		SELECT m.instance_id FROM instance_members m WHERE m.allocation_id = $1 AND m.removed_at IS NULL)`, allocationID)
}

// OfMembers returns the instances of those of the named members that are placed on a node.
func OfMembers(ctx context.Context, tx db.Tx, nodeID string, memberIDs []string) ([]Instance, error) {
	return selectInstances(ctx, tx, `WHERE i.id IN (SELECT w.instance_id FROM instance_members w
		WHERE w.node_id = $1 AND w.id = ANY($2::UUID[]) AND w.removed_at IS NULL)`, nodeID, memberIDs)
}

// SnapshotFor returns what a node is to run, for the compiler.
func SnapshotFor(ctx context.Context, tx db.Tx, nodeID string) ([]plan.Member, error) {
	return selectDesired(ctx, tx, `m.node_id = $1`, nodeID)
}

// SnapshotOf returns what the nodes of an instance are to run of it, for the compiler.
func SnapshotOf(ctx context.Context, tx db.Tx, instanceID string) ([]plan.Member, error) {
	return selectDesired(ctx, tx, `m.instance_id = $1`, instanceID)
}

func errNotFound() error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such app instance in this project.", nil)
}
