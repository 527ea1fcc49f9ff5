package instance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"math"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// Report is the observed state of a whole node.
type Report struct {
	NodeID    string
	SessionNo uint64
	Counter   uint64
	// Epoch and Generation name the signed state that the node had accepted.
	Epoch      uint64
	Generation uint64
	// Incarnation is the one of the node's hello.
	Incarnation string
	Statuses    []*protocol.WorkloadStatus
	// UsageOwed: a restored hub still needs usage of the node. A member that is absent from the report does not count as
	// gone: its bill would be closed before that usage is posted.
	UsageOwed bool
}

func (r Report) no() lifecycle.ReportNo {
	return lifecycle.ReportNo{Session: r.SessionNo, Counter: r.Counter}
}

// ApplyReport updates the members that a node reports and advances their instances. An outdated report changes nothing.
//
// A member ends only with the node's complete proof, or by its absence from the report where that proves as much
// (lifecycle.Absence): the node never had the member, or a new incarnation of the node has nothing left of it.
func ApplyReport(ctx context.Context, tx db.Tx, r Report, now time.Time) ([]Change, error) {
	newer, err := advanceReport(ctx, tx, r, now)
	if err != nil || !newer {
		return nil, err
	}
	members, err := selectMembersOf(ctx, tx, r.NodeID, nil)
	if err != nil {
		return nil, err
	}
	return r.apply(ctx, tx, members, now)
}

// BeginReport records a report as the newest of its node and changes no member; ContinueReport follows for the returned
// members.
func BeginReport(ctx context.Context, tx db.Tx, r Report, now time.Time) (memberIDs []string, err error) {
	newer, err := advanceReport(ctx, tx, r, now)
	if err != nil || !newer {
		return nil, err
	}
	return db.CollectColumn[string](tx.Query(ctx,
		`SELECT id FROM instance_members WHERE node_id = $1 AND removed_at IS NULL ORDER BY id`, r.NodeID))
}

// IsNewest reports whether no newer report of the node has come than this one, which was begun.
func IsNewest(ctx context.Context, tx db.Tx, r Report) (bool, error) {
	newest, err := newestReport(ctx, tx, r.NodeID)
	return newest == r.no(), err
}

// ContinueReport is ApplyReport for some members of a report that was begun. After a newer report it changes nothing.
func ContinueReport(ctx context.Context, tx db.Tx, r Report, memberIDs []string, now time.Time) ([]Change, error) {
	newest, err := IsNewest(ctx, tx, r)
	if err != nil || !newest || len(memberIDs) == 0 {
		return nil, err
	}
	members, err := selectMembersOf(ctx, tx, r.NodeID, memberIDs)
	if err != nil {
		return nil, err
	}
	return r.apply(ctx, tx, members, now)
}

// apply updates these members by their statuses, or by their absence.
func (r Report) apply(ctx context.Context, tx db.Tx, members []placedMember, now time.Time) ([]Change, error) {
	statuses := map[string]*protocol.WorkloadStatus{}
	for _, s := range r.Statuses {
		statuses[s.GetMemberId()] = s
	}
	var (
		changed []string
		removed = map[string][]Removal{}
	)
	for _, m := range members {
		if m.External {
			continue
		}
		next, removal := m.applyStatus(statuses[m.ID], r, now)
		if !m.differsFrom(next) {
			if m.stopping && next.Status == protocol.WorkloadStatus_STOPPED {
				changed = append(changed, m.InstanceID) // its node had stopped it before, when its lease ended
			}
			continue
		}
		if err := updateMember(ctx, tx, next, removal, now); err != nil {
			return nil, err
		}
		changed = append(changed, m.InstanceID)
		if removal != nil {
			removed[m.InstanceID] = append(removed[m.InstanceID], *removal)
		}
	}
	return recomputeAll(ctx, tx, changed, removed, now)
}

// SetReachable records whether the hub has contact with a node. Lost contact ends nothing; it is shown.
func SetReachable(ctx context.Context, tx db.Tx, nodeID string, reachable bool, now time.Time) ([]Change, error) {
	changed, err := updateReachable(ctx, tx, nodeID, reachable, now)
	if err != nil {
		return nil, err
	}
	return recomputeAll(ctx, tx, changed, nil, now)
}

// NodeRenamed records that a node's hostname, which the endpoints of its instances are shown with, is another: what was
// read of them before is outdated.
func NodeRenamed(ctx context.Context, tx db.Tx, nodeID string, now time.Time) error {
	_, err := tx.Exec(ctx, `UPDATE app_instances SET updated_at = $2
		WHERE id IN (SELECT instance_id FROM instance_members WHERE node_id = $1)`, nodeID, now)
	return err
}

// MarkLost ends the members of a node that is gone for good, without proof: they fail with node_lost, and so does an
// instance without other members. An instance that was being decommissioned becomes decommissioned, with that reason.
func MarkLost(ctx context.Context, tx db.Tx, nodeID string, now time.Time) ([]Change, error) {
	members, err := selectMembersOf(ctx, tx, nodeID, nil)
	if err != nil {
		return nil, err
	}
	var changed []string
	removed := map[string][]Removal{}
	for _, m := range members {
		end := m.Member
		end.Status, end.Reason, end.Detail, end.Unreachable, end.Endpoints = protocol.WorkloadStatus_FAILED,
			protocol.WorkloadStatus_NODE_LOST, "", false, nil
		end.Services = nil
		end.Gone, end.RemovedAt = true, now
		r := Removal{Member: end, Lost: true}
		if err := updateMember(ctx, tx, end, &r, now); err != nil {
			return nil, err
		}
		changed = append(changed, m.InstanceID)
		removed[m.InstanceID] = append(removed[m.InstanceID], r)
	}
	return recomputeAll(ctx, tx, changed, removed, now)
}

// RecordAbsentFrom is called in the transaction that saves a new signed state of a node, with the members in it. For
// each member whose removal was requested it records the first state without it.
func RecordAbsentFrom(ctx context.Context, tx db.Tx, nodeID string, epoch, generation uint64, memberIDs []string,
	now time.Time,
) error {
	return tx.Queue(ctx, `UPDATE instance_members SET absent_epoch = $3, absent_generation = $4, updated_at = $5
		WHERE node_id = $1 AND removed_at IS NULL AND absent_generation IS NULL AND NOT (id = ANY($2::UUID[]))
			AND instance_id IN (SELECT id FROM app_instances WHERE status = 'decommissioning')`,
		nodeID, memberIDs, int64(epoch), int64(generation), now)
}

// recomputeAll applies the lifecycle to instances whose members changed, in the order of their ids.
func recomputeAll(ctx context.Context, tx db.Tx, instanceIDs []string, removed map[string][]Removal,
	now time.Time,
) ([]Change, error) {
	slices.Sort(instanceIDs)
	instanceIDs = slices.Compact(instanceIDs)
	if len(instanceIDs) == 0 {
		return nil, nil
	}
	instances, err := selectInstances(ctx, tx, `WHERE i.id = ANY($1::UUID[])`, instanceIDs)
	if err != nil {
		return nil, err
	}
	var changes []Change
	for _, i := range instances {
		c, err := recompute(ctx, tx, i, now)
		if err != nil {
			return nil, err
		}
		c.Removed = removed[i.ID]
		changes = append(changes, c)
	}
	return changes, nil
}

// recompute applies the lifecycle to one instance. After a rollback by the node, the fallback is the desired revision,
// and the lifecycle is applied again under that.
func recompute(ctx context.Context, tx db.Tx, i Instance, now time.Time) (Change, error) {
	next, steps := i.advance(i.Lifecycle)
	c, err := saveSteps(ctx, tx, i, next, steps, now)
	if err == nil && c.Instance.ResourceVersion == i.ResourceVersion {
		// A client that watches the instance sees its members, too.
		c.Instance.ResourceVersion, c.Instance.UpdatedAt = i.ResourceVersion+1, now
		err = updateInstance(ctx, tx, c.Instance)
	}
	if err != nil || len(steps) == 0 || !steps[len(steps)-1].IsRollbackByNode() {
		return c, err
	}
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	c.Instance.Revision = revisions.Find(i.Revision).Fallback
	if err := updateInstance(ctx, tx, c.Instance); err != nil {
		return Change{}, err
	}
	if err := supersede(ctx, tx, i.ID, c.Instance.Revision, now); err != nil {
		return Change{}, err
	}
	if c.Instance, err = Get(ctx, tx, i.ProjectID, i.ID); err != nil {
		return Change{}, err
	}
	after, more := lifecycle.Advance(c.Instance.Lifecycle, c.Instance.memberStates())
	last, err := saveSteps(ctx, tx, c.Instance, after, more, now)
	c.Instance, c.Steps, c.DesiredChanged = last.Instance, append(c.Steps, more...), true
	return c, err
}

// placedMember is a member with what decides about its end.
type placedMember struct {
	Member
	// desired is false once its instance is being decommissioned.
	desired bool
	// stopping says that its instance waits for its end.
	stopping         bool
	absentEpoch      uint64
	absentGeneration uint64
}

// applyStatus returns the member after a report; s is nil where the report does not name it.
func (m placedMember) applyStatus(s *protocol.WorkloadStatus, r Report, now time.Time) (Member, *Removal) {
	next := m.Member
	var outcome lifecycle.Outcome
	next.Member, outcome = lifecycle.Placed{
		Member:           m.Member.Member,
		Desired:          m.desired,
		AbsentEpoch:      m.absentEpoch,
		AbsentGeneration: m.absentGeneration,
	}.Apply(s, lifecycle.Report{
		Epoch:       r.Epoch,
		Generation:  r.Generation,
		Incarnation: r.Incarnation,
		UsageOwed:   r.UsageOwed,
	}, now)
	switch outcome {
	case lifecycle.Unchanged:
		return next, nil
	case lifecycle.Removed:
		next.RemovedAt, next.Endpoints, next.Services = now, nil, nil
		return next, &Removal{Member: next, Proof: s.GetRemoval()}
	case lifecycle.Reported:
	}
	next.Detail = truncate(next.Detail, maxDetailBytes)
	switch {
	case next.Reason != protocol.WorkloadStatus_OWNER_REFUSED:
		next.OwnerRefusal = nil
	case s.GetOwnerRefusal() != nil:
		// Encoding a decoded message does not fail.
		next.OwnerRefusal, _ = proto.MarshalOptions{Deterministic: true}.Marshal(s.GetOwnerRefusal())
	}
	next.Restarts, next.ExitCode = int64(s.GetRestarts()), int64(s.GetExitCode())
	next.StartedAt, next.ReadyAt, next.ExitedAt = dbTime(s.GetStartedAt()), dbTime(s.GetReadyAt()),
		dbTime(s.GetExitedAt())
	next.Services = serviceStatuses(s.GetServices())
	next.Endpoints, next.ConfigSHA256 = publishedEndpoints(s.GetEndpoints()), digestOrNil(s.GetConfigSha256())
	return next, nil
}

func digestOrNil(sum []byte) []byte {
	if len(sum) != sha256.Size {
		return nil
	}
	return sum
}

// ReportsIdle reports whether the status says that no container of the member runs.
func ReportsIdle(s *protocol.WorkloadStatus) bool {
	switch s.GetStatus() {
	case protocol.WorkloadStatus_PENDING, protocol.WorkloadStatus_STARTING, protocol.WorkloadStatus_FAILED,
		protocol.WorkloadStatus_STOPPED:
		return s.GetStartedAt() == nil
	default:
		return false
	}
}

// publishedEndpoints keeps the endpoints that a node may publish: ports of its own loopback addresses. People open
// these URLs, and the node writes them.
func publishedEndpoints(reported []*protocol.PublishedEndpoint) []Endpoint {
	var out []Endpoint
	for _, e := range reported[:min(len(reported), maxEndpoints)] {
		if !mayPublish(e) {
			continue
		}
		out = append(out, Endpoint{
			Name: truncate(e.GetName(), maxEndpointBytes), Protocol: truncate(e.GetProtocol(), maxEndpointBytes),
			Host: truncate(e.GetHost(), maxEndpointBytes), Port: e.GetPort(),
		})
	}
	return out
}

func mayPublish(e *protocol.PublishedEndpoint) bool {
	host, err := netip.ParseAddr(e.GetHost())
	return err == nil && host.IsLoopback() && host.Zone() == "" && e.GetPort() > 0 && e.GetPort() <= math.MaxUint16 &&
		slices.Contains([]string{"http", "https", "tcp"}, e.GetProtocol())
}

func (m Member) differsFrom(n Member) bool {
	return m.Status != n.Status || m.Reason != n.Reason || m.Detail != n.Detail ||
		m.ObservedRevision != n.ObservedRevision || m.FallbackFrom != n.FallbackFrom ||
		m.Unreachable != n.Unreachable || m.Restarts != n.Restarts || m.ExitCode != n.ExitCode || m.Gone != n.Gone ||
		m.ObservedIncarnation != n.ObservedIncarnation ||
		m.FailureConfirmed != n.FailureConfirmed || !m.FailingSince.Equal(n.FailingSince) ||
		!m.StartedAt.Equal(n.StartedAt) || !m.ReadyAt.Equal(n.ReadyAt) || !m.ExitedAt.Equal(n.ExitedAt) ||
		!slices.Equal(m.Endpoints, n.Endpoints) || !slices.EqualFunc(m.Services, n.Services, ServiceStatus.equal) ||
		!bytes.Equal(m.OwnerRefusal, n.OwnerRefusal) ||
		!bytes.Equal(m.ConfigSHA256, n.ConfigSHA256)
}
