package command

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// The audit actions of what happens without anyone asking.
const (
	actionReport  = "fleet.node.report"
	actionContact = "fleet.node.contact"
)

// Report is the whole observed state of one node.
type Report struct {
	NodeID     string
	SessionNo  uint64
	Counter    uint64
	Epoch      uint64
	Generation uint64
	// Incarnation is of the store that the node reports with.
	Incarnation  string
	Statuses     []*protocol.WorkloadStatus
	Accelerators []*protocol.Accelerator
	// UsageOwed: what the node does not speak of proves nothing yet.
	UsageOwed bool
}

// Observed is what a report led to.
type Observed struct {
	// TouchedNodes are to hold something else now; wake their dispatchers after the commit.
	TouchedNodes []string
	// Instances may be other than they were; wake those who watch them after the commit.
	Instances []string
}

// Observe takes over a node's report, in the caller's transaction: inventory, members, the steps of their instances,
// and for what was proved gone the room and the bill. No member of the node is set aside any more.
func Observe(ctx context.Context, tx db.Tx, r Report, now time.Time) (Observed, error) {
	if err := capacity.ApplyInventory(ctx, tx, r.NodeID, r.Accelerators, now); err != nil {
		return Observed{}, err
	}
	if err := ledger.NoteIdle(ctx, tx, r.NodeID, r.idle(nil), now); err != nil {
		return Observed{}, err
	}
	changes, err := instance.ApplyReport(ctx, tx, r.ofInstances(), now)
	if err != nil {
		return Observed{}, err
	}
	if err := finding.ResolveOthers(ctx, tx, r.NodeID, finding.Report, nil); err != nil {
		return Observed{}, err
	}
	return follow(ctx, tx, r.NodeID, actionReport, changes, now)
}

// BeginObserve takes over what a report says of the node itself. It returns the members, for ObserveMembers.
func BeginObserve(ctx context.Context, tx db.Tx, r Report, now time.Time) (memberIDs []string, err error) {
	if err := capacity.ApplyInventory(ctx, tx, r.NodeID, r.Accelerators, now); err != nil {
		return nil, err
	}
	return instance.BeginReport(ctx, tx, r.ofInstances(), now)
}

// ObserveMembers is Observe for some members of a report that was begun, and nothing once a newer report has come.
func ObserveMembers(ctx context.Context, tx db.Tx, r Report, memberIDs []string, now time.Time) (Observed, error) {
	if err := ledger.NoteIdle(ctx, tx, r.NodeID, r.idle(memberIDs), now); err != nil {
		return Observed{}, err
	}
	changes, err := instance.ContinueReport(ctx, tx, r.ofInstances(), memberIDs, now)
	if err != nil {
		return Observed{}, err
	}
	return follow(ctx, tx, r.NodeID, actionReport, changes, now)
}

// ReportFailed names the finding about a member whose part of a report could not be taken over.
func ReportFailed(r Report, memberID string) finding.Finding {
	return finding.Finding{
		NodeID: r.NodeID, Kind: finding.Report, ResourceType: resourceMember,
		ResourceID: memberID,
	}
}

// idle says of the members that the report names, or of those among only, whether nothing of them runs.
func (r Report) idle(only []string) map[string]bool {
	named := make(map[string]bool, len(only))
	for _, id := range only {
		named[id] = true
	}
	idle := make(map[string]bool, len(r.Statuses))
	for _, status := range r.Statuses {
		if id := status.GetMemberId(); only == nil || named[id] {
			idle[id] = instance.ReportsIdle(status)
		}
	}
	return idle
}

func (r Report) ofInstances() instance.Report {
	return instance.Report{
		NodeID:      r.NodeID,
		SessionNo:   r.SessionNo,
		Counter:     r.Counter,
		Epoch:       r.Epoch,
		Generation:  r.Generation,
		Incarnation: r.Incarnation,
		Statuses:    r.Statuses,
		UsageOwed:   r.UsageOwed,
	}
}

// Add merges what another part of the same report led to.
func (o *Observed) Add(part Observed) {
	o.TouchedNodes = append(o.TouchedNodes, part.TouchedNodes...)
	o.Instances = append(o.Instances, part.Instances...)
}

// NodeReachable records, in the caller's transaction, that contact with a node was lost or is back. Nothing ends by it.
func NodeReachable(ctx context.Context, tx db.Tx, nodeID string, reachable bool, now time.Time) error {
	changes, err := instance.SetReachable(ctx, tx, nodeID, reachable, now)
	if err != nil {
		return err
	}
	_, err = follow(ctx, tx, nodeID, actionContact, changes, now)
	return err
}

// follow does for each change what the other slices have to do with it.
func follow(ctx context.Context, tx db.Tx, nodeID, action string, changes []instance.Change,
	now time.Time,
) (Observed, error) {
	var out Observed
	for _, c := range changes {
		out.Instances = append(out.Instances, c.Instance.ID)
		// A report has no request of its own: it goes on under the id of what was asked of the instance last.
		m := Meta{
			Principal: iam.Principal{Type: principal.Node, ID: nodeID}, CorrelationID: c.Instance.Operation.CorrelationID,
			Now: now,
		}
		nodes, err := m.followChange(ctx, tx, action, c)
		if err != nil {
			return Observed{}, err
		}
		out.TouchedNodes = append(out.TouchedNodes, nodes...)
	}
	slices.Sort(out.TouchedNodes)
	out.TouchedNodes = slices.Compact(out.TouchedNodes)
	return out, nil
}

// followChange does it for one change, and returns the nodes that are to hold something else.
func (m Meta) followChange(ctx context.Context, tx db.Tx, action string, c instance.Change) ([]string, error) {
	for _, removal := range c.Removed {
		if err := m.settleRemoval(ctx, tx, action, removal); err != nil {
			return nil, err
		}
	}
	nodes, err := bumpIntents(ctx, tx, c, m.Now)
	if err != nil {
		return nil, err
	}
	return nodes, m.RecordInstance(ctx, tx, action, c)
}

// settleRemoval frees the room of a member of which nothing is left, and closes its bill; the allocation follows when
// it was only waiting for that.
func (m Meta) settleRemoval(ctx context.Context, tx db.Tx, action string, r instance.Removal) error {
	released, err := capacity.Free(ctx, tx, r.Member.ID, m.Now)
	if err != nil {
		return err
	}
	if released != nil {
		if err := ledger.CloseSubject(ctx, tx, released.ID, m.Now, m.Now); err != nil {
			return err
		}
		if err := m.RecordAllocation(ctx, tx, action, capacity.Releasing, *released); err != nil {
			return err
		}
	}
	failpoint.Hit("hub/report/freed")
	if r.Proof != nil {
		return ledger.CloseSubject(ctx, tx, r.Member.ID, r.Proof.GetAt().AsTime(), m.Now)
	}
	if r.Lost {
		// What the node measured until now is still its tenant's to pay: the hold waits for the final record, or 30 days.
		return ledger.CloseSubject(ctx, tx, r.Member.ID, m.Now, m.Now)
	}
	// No node has it, or will ever speak of it again, so no final record will come.
	if err := ledger.CloseSubject(ctx, tx, r.Member.ID, m.Now, m.Now); err != nil {
		return err
	}
	return ledger.SettleSubject(ctx, tx, r.Member.ID, m.Now)
}
