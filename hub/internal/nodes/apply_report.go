package nodes

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

const actionReport = "fleet.node.report"

// Report is the whole observed state of one node.
type Report struct {
	instance.Report
	// Address is where the report came from.
	Address      string
	Accelerators []*protocol.Accelerator
	Environments []*protocol.InstalledEnvironment
	Volumes      []*protocol.VolumeStatus
}

func (r Report) origin() origin { return origin{r.NodeID, r.Address} }

// ApplyReport applies a node's report in the caller's transaction: inventory, members, the steps of their instances,
// and for members proved gone their capacity and bills. No member of the node is set aside any more.
func ApplyReport(ctx context.Context, tx db.Tx, r Report, now time.Time) error {
	_, err := applyWhole(ctx, tx, &budgets{}, r, now)
	return err
}

func applyWhole(ctx context.Context, tx db.Tx, b *budgets, r Report, now time.Time) ([]instance.Change, error) {
	if err := r.applyInventory(ctx, tx, b, now); err != nil {
		return nil, err
	}
	if err := applyVolumes(ctx, tx, r, now); err != nil {
		return nil, err
	}
	changes, err := instance.ApplyReport(ctx, tx, r.Report, now)
	if err != nil {
		return nil, err
	}
	if err := ledger.NoteIdle(ctx, tx, r.NodeID, r.idle(nil, changes), now); err != nil {
		return nil, err
	}
	if err := change.ResolveOtherFindings(ctx, tx, r.NodeID, finding.Report, nil, now); err != nil {
		return nil, err
	}
	return changes, completeAll(ctx, tx, r.origin(), actionReport, changes, now)
}

// applyInventory applies what the report says that the node has.
func (r Report) applyInventory(ctx context.Context, tx db.Tx, b *budgets, now time.Time) error {
	inventories := map[origin][]*protocol.Accelerator{r.origin(): r.Accelerators}
	if err := applyInventories(ctx, tx, b, inventories, now); err != nil {
		return err
	}
	return capacity.ApplyEnvironments(ctx, tx, map[string][]*protocol.InstalledEnvironment{r.NodeID: r.Environments})
}

// beginReport applies what a report says of the node itself. It returns the members, for applyReportMembers.
func beginReport(ctx context.Context, tx db.Tx, b *budgets, r Report, now time.Time) (memberIDs []string, err error) {
	if err := r.applyInventory(ctx, tx, b, now); err != nil {
		return nil, err
	}
	return instance.BeginReport(ctx, tx, r.Report, now)
}

// applyReportVolumes is ApplyReport for some volumes of a report that was begun, and nothing once a newer report has
// come.
func applyReportVolumes(ctx context.Context, tx db.Tx, r Report, volumes []*protocol.VolumeStatus, now time.Time,
) ([]instance.Change, error) {
	newest, err := instance.IsNewest(ctx, tx, r.Report)
	if err != nil || !newest {
		return nil, err
	}
	r.Volumes = volumes
	return nil, applyVolumes(ctx, tx, r, now)
}

// applyReportMembers is ApplyReport for some members of a report that was begun, and nothing once a newer report has
// come.
func applyReportMembers(ctx context.Context, tx db.Tx, r Report, memberIDs []string, now time.Time,
) ([]instance.Change, error) {
	changes, err := instance.ContinueReport(ctx, tx, r.Report, memberIDs, now)
	if err != nil {
		return nil, err
	}
	if err := ledger.NoteIdle(ctx, tx, r.NodeID, r.idle(memberIDs, changes), now); err != nil {
		return nil, err
	}
	return changes, completeAll(ctx, tx, r.origin(), actionReport, changes, now)
}

// applyVolumes stores where the node's volumes are. Each change goes on under the id of what was asked of it.
func applyVolumes(ctx context.Context, tx db.Tx, r Report, now time.Time) error {
	if len(r.Volumes) == 0 {
		return nil
	}
	restored, err := restoredAt(ctx, tx)
	if err != nil {
		return err
	}
	changes, err := capacity.ApplyVolumes(ctx, tx, r.NodeID, r.Volumes, restored, now)
	if err != nil {
		return err
	}
	for _, c := range changes {
		by := r.origin().by(c.Volume.CorrelationID, now)
		if c.Snapshot != nil {
			by.CorrelationID = c.Snapshot.CorrelationID
		}
		if c.Snapshot != nil && c.Before == "" {
			if err := change.AddFinding(ctx, tx, finding.Finding{
				NodeID: r.NodeID, Kind: finding.Snapshot, ResourceType: change.Snapshot, ResourceID: c.Snapshot.ID,
				Detail: "The node keeps a snapshot of volume " + c.Volume.ID + " that the hub did not know. It is listed again; " +
					"its description is lost.", At: now,
			}); err != nil {
				return err
			}
		}
		if err := change.CompleteVolume(ctx, tx, by, actionReport, c); err != nil {
			return err
		}
	}
	return nil
}

// SetReachable records, in the caller's transaction, that contact with a node's members was lost or is back. Nothing
// ends by it.
func SetReachable(ctx context.Context, tx db.Tx, nodeID string, reachable bool, now time.Time) error {
	return setMembersReachable(ctx, tx, origin{nodeID: nodeID}, reachable, now)
}

func setMembersReachable(ctx context.Context, tx db.Tx, from origin, reachable bool, now time.Time) error {
	changes, err := instance.SetReachable(ctx, tx, from.nodeID, reachable, now)
	if err != nil {
		return err
	}
	return completeAll(ctx, tx, from, actionContact, changes, now)
}

// completeAll completes changes that a node caused.
func completeAll(ctx context.Context, tx db.Tx, from origin, action string, changes []instance.Change,
	now time.Time,
) error {
	for _, c := range changes {
		if err := change.CompleteInstance(ctx, tx, from.following(c.Instance.Operation, now), action, c); err != nil {
			return err
		}
	}
	return nil
}

// idle says whether nothing runs of each member that the report names; only, where it is not nil, restricts them. A
// member that runs as it did at the report before is left out: its bill says so, and to find that out would conflict
// with transactions that open other bills.
func (r Report) idle(only []string, changes []instance.Change) map[string]bool {
	named, changed := make(map[string]bool, len(only)), map[string]bool{}
	for _, id := range only {
		named[id] = true
	}
	for _, c := range changes {
		for _, m := range c.Instance.Members {
			changed[m.ID] = true
		}
	}
	idle := make(map[string]bool, len(changed))
	for _, status := range r.Statuses {
		id, isIdle := status.GetMemberId(), instance.ReportsIdle(status)
		if (only == nil || named[id]) && (isIdle || changed[id]) {
			idle[id] = isIdle
		}
	}
	return idle
}
