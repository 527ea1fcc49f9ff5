package instance

import (
	"bytes"
	"context"
	"math"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// Report is the whole observed state of one node. Of two reports the one with the lower (SessionNo, Counter) loses.
type Report struct {
	NodeID    string
	SessionNo uint64
	Counter   uint64
	// Epoch and Generation name the signed state that the node had accepted when it looked.
	Epoch      uint64
	Generation uint64
	// Incarnation is of the store that the node reports with.
	Incarnation string
	Statuses    []*protocol.WorkloadStatus
	// UsageOwed: the hub was restored and still misses usage of the node. Were a member taken for gone now, its
	// bill would be closed before that usage is in.
	UsageOwed bool
}

// ApplyReport takes over what a node says about its members and moves their instances on. An old report changes
// nothing.
//
// A member leaves only on the node's complete proof, or on its silence where that proves as much (lifecycle.Absence):
// the node never had the member, or a new incarnation of it has nothing of the member any more.
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

// BeginReport records a report as the newest of its node and changes no member; ContinueReport follows for the members
// that it returns.
func BeginReport(ctx context.Context, tx db.Tx, r Report, now time.Time) (memberIDs []string, err error) {
	newer, err := advanceReport(ctx, tx, r, now)
	if err != nil || !newer {
		return nil, err
	}
	return selectMemberIDs(ctx, tx, r.NodeID)
}

// ContinueReport is ApplyReport for some members of a report that was begun. Once a newer one has come, it changes
// nothing.
func ContinueReport(ctx context.Context, tx db.Tx, r Report, memberIDs []string, now time.Time) ([]Change, error) {
	newest, err := isNewestReport(ctx, tx, r)
	if err != nil || !newest || len(memberIDs) == 0 {
		return nil, err
	}
	members, err := selectMembersOf(ctx, tx, r.NodeID, memberIDs)
	if err != nil {
		return nil, err
	}
	return r.apply(ctx, tx, members, now)
}

// apply takes over what the report says about these members, or by its silence.
func (r Report) apply(ctx context.Context, tx db.Tx, members []placedMember, now time.Time) ([]Change, error) {
	said := map[string]*protocol.WorkloadStatus{}
	for _, s := range r.Statuses {
		said[s.GetMemberId()] = s
	}
	var (
		touched []string
		removed = map[string][]Removal{}
	)
	for _, m := range members {
		next, removal := m.applyStatus(said[m.ID], r, now)
		if !m.differsFrom(next) {
			continue
		}
		if err := updateMember(ctx, tx, next, removal, now); err != nil {
			return nil, err
		}
		touched = append(touched, m.InstanceID)
		if removal != nil {
			removed[m.InstanceID] = append(removed[m.InstanceID], *removal)
		}
	}
	return recomputeAll(ctx, tx, touched, removed, now)
}

// SetReachable records whether the hub has contact with a node. Losing it ends nothing; it only shows.
func SetReachable(ctx context.Context, tx db.Tx, nodeID string, reachable bool, now time.Time) ([]Change, error) {
	touched, err := updateReachable(ctx, tx, nodeID, reachable, now)
	if err != nil {
		return nil, err
	}
	return recomputeAll(ctx, tx, touched, nil, now)
}

// MarkLost ends the members of a node that is gone for good. Nobody proved anything: they failed as node_lost, and
// where none is left so has their instance; one that was being decommissioned is decommissioned, with that as its
// reason.
func MarkLost(ctx context.Context, tx db.Tx, nodeID string, now time.Time) ([]Change, error) {
	members, err := selectMembersOf(ctx, tx, nodeID, nil)
	if err != nil {
		return nil, err
	}
	var touched []string
	removed := map[string][]Removal{}
	for _, m := range members {
		end := m.Member
		end.Status, end.Reason, end.Detail, end.Unreachable, end.Endpoints = protocol.WorkloadStatus_FAILED,
			protocol.WorkloadStatus_NODE_LOST, "", false, nil
		end.Gone, end.RemovedAt = true, now
		r := Removal{Member: end, Lost: true}
		if err := updateMember(ctx, tx, end, &r, now); err != nil {
			return nil, err
		}
		touched = append(touched, m.InstanceID)
		removed[m.InstanceID] = append(removed[m.InstanceID], r)
	}
	return recomputeAll(ctx, tx, touched, removed, now)
}

// RecordAbsentFrom is called in the transaction that saves a new signed state of a node, with the members that are in
// it. For each unwanted member it remembers the first state that is without it.
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

// recompute applies the lifecycle to one instance. Where a node has left an upgrade by itself, the revision that it
// went back to is the wanted one from then on, and the members are looked at under that.
func recompute(ctx context.Context, tx db.Tx, i Instance, now time.Time) (Change, error) {
	next, steps := Advance(i.Lifecycle, i.memberStates())
	c, err := saveSteps(ctx, tx, i, next, steps, now)
	if err == nil && c.Instance.ResourceVersion == i.ResourceVersion {
		// Only a member changed: whoever watches the instance sees its members too.
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
	c.Instance.Revision = findRevision(revisions, i.Revision).Fallback
	if err := updateInstance(ctx, tx, c.Instance); err != nil {
		return Change{}, err
	}
	if err := supersede(ctx, tx, i.ID, c.Instance.Revision, now); err != nil {
		return Change{}, err
	}
	if c.Instance, err = Get(ctx, tx, i.ProjectID, i.ID); err != nil {
		return Change{}, err
	}
	after, more := Advance(c.Instance.Lifecycle, c.Instance.memberStates())
	last, err := saveSteps(ctx, tx, c.Instance, after, more, now)
	c.Instance, c.Steps, c.DesiredChanged = last.Instance, append(c.Steps, more...), true
	return c, err
}

// placedMember is a member with what decides about its end.
type placedMember struct {
	Member
	// desired is false once its instance is being decommissioned.
	desired          bool
	absentEpoch      uint64
	absentGeneration uint64
}

// applyStatus gives the member as it is after the node's word, or its silence.
func (m placedMember) applyStatus(s *protocol.WorkloadStatus, r Report, now time.Time) (Member, *Removal) {
	next := m.Member
	// A report is contact.
	next.Unreachable = false
	if s == nil {
		if !m.desired && !r.UsageOwed && m.absence().Proven(r.Epoch, r.Generation, r.Incarnation) {
			return removedMember(next, nil, now)
		}
		return next, nil
	}
	if !m.desired && s.GetStatus() == protocol.WorkloadStatus_REMOVED && s.GetRemoval().Complete() {
		return removedMember(next, s.GetRemoval(), now)
	}
	// A member that has left the state has no revision any more; what is left of it is still worth showing. Of a wanted
	// one a node without its document says nothing that counts.
	if m.desired && s.GetRevision() == 0 && m.ObservedRevision > 0 {
		return next, nil
	}
	// A node that went back to its fallback has a lower revision than before. Older reports have lost already.
	next.ObservedRevision, next.FallbackFrom = revisionOf(s.GetRevision()), revisionOf(s.GetFallbackFromRevision())
	if s.GetRevision() == 0 {
		next.ObservedRevision = m.ObservedRevision
	}
	next.Status, next.ObservedIncarnation = knownMemberStatus(s.GetStatus()), r.Incarnation
	// What was stopped because it failed says nothing more of the failure; the tenant still wants to read it.
	if next.Status != protocol.WorkloadStatus_STOPPED || s.GetReason() != 0 {
		next.Reason, next.Detail = knownReason(s.GetReason()), truncate(s.GetDetail(), maxDetailBytes)
	}
	switch {
	case next.Reason != protocol.WorkloadStatus_OWNER_REFUSED:
		next.OwnerRefusal = nil
	case s.GetOwnerRefusal() != nil:
		// Encoding what was decoded cannot fail, and is the same each time.
		next.OwnerRefusal, _ = proto.MarshalOptions{Deterministic: true}.Marshal(s.GetOwnerRefusal())
	}
	next.Restarts, next.ExitCode = int64(s.GetRestarts()), int64(s.GetExitCode())
	next.StartedAt, next.ReadyAt, next.ExitedAt = dbTime(s.GetStartedAt()), dbTime(s.GetReadyAt()),
		dbTime(s.GetExitedAt())
	next.Endpoints = publishedEndpoints(s.GetEndpoints())
	next.updateFailure(m.Member, now)
	return next, nil
}

// ReportsIdle reports whether a node says that no container of a member runs.
func ReportsIdle(s *protocol.WorkloadStatus) bool {
	switch s.GetStatus() {
	case protocol.WorkloadStatus_PENDING, protocol.WorkloadStatus_STARTING, protocol.WorkloadStatus_FAILED,
		protocol.WorkloadStatus_STOPPED:
		return s.GetStartedAt() == nil
	default:
		return false
	}
}

// revisionOf keeps a number that a node names within the column.
func revisionOf(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// publishedEndpoints keeps what a node may publish: a port of its own loopback address. People open these URLs, and the
// node writes them.
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

func (m placedMember) absence() lifecycle.Absence {
	return lifecycle.Absence{
		Epoch: m.absentEpoch, Generation: m.absentGeneration, Observed: m.ObservedRevision != 0 ||
			m.Status != protocol.WorkloadStatus_PENDING,
		ObservedIncarnation: m.ObservedIncarnation,
	}
}

func removedMember(m Member, proof *protocol.RemovalProof, now time.Time) (Member, *Removal) {
	m.Status, m.Gone, m.RemovedAt, m.Endpoints = protocol.WorkloadStatus_REMOVED, true, now, nil
	return m, &Removal{Member: m, Proof: proof}
}

// knownMemberStatus keeps the API's list closed: a status of a newer node counts as pending.
func knownMemberStatus(s protocol.WorkloadStatus_Status) protocol.WorkloadStatus_Status {
	if _, known := protocol.WorkloadStatus_Status_name[int32(s)]; !known || s == 0 {
		return protocol.WorkloadStatus_PENDING
	}
	return s
}

func (m Member) differsFrom(n Member) bool {
	return m.Status != n.Status || m.Reason != n.Reason || m.Detail != n.Detail ||
		m.ObservedRevision != n.ObservedRevision || m.FallbackFrom != n.FallbackFrom ||
		m.Unreachable != n.Unreachable || m.Restarts != n.Restarts || m.ExitCode != n.ExitCode || m.Gone != n.Gone ||
		m.ObservedIncarnation != n.ObservedIncarnation ||
		m.FailureConfirmed != n.FailureConfirmed || !m.FailingSince.Equal(n.FailingSince) ||
		!m.StartedAt.Equal(n.StartedAt) || !m.ReadyAt.Equal(n.ReadyAt) || !m.ExitedAt.Equal(n.ExitedAt) ||
		!slices.Equal(m.Endpoints, n.Endpoints) || !bytes.Equal(m.OwnerRefusal, n.OwnerRefusal)
}
