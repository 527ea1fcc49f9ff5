package nodes

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// incomingReport is a report with the connection that it came on.
type incomingReport struct {
	from      origin
	sessionNo uint64
	report    *protocol.Report
	now       time.Time
	// budgets has the one of the node.
	budgets *budgets
}

// reportResult is the result of a report.
type reportResult struct {
	// quarantined: nothing of the report counts. newlyQuarantined: the quarantine begins with it.
	quarantined, newlyQuarantined bool
	// split: the report was applied in parts; they are committed even where some failed.
	split bool

	report    Report
	memberIDs []string
	// changes are those of instances that were committed.
	changes []instance.Change
}

// applyReport applies a report in one transaction. When that fails permanently, the volumes and the members are applied
// in smaller and smaller groups, until only those that fail are left: they get a finding, and the next report retries
// them.
func (svc *Service) applyReport(ctx context.Context, a incomingReport) (reportResult, error) {
	out, err := runTx(ctx, svc, func(tx db.Tx) (reportResult, error) { return a.apply(ctx, tx, true) })
	if !isUnpostable(ctx, err) {
		return out, err
	}
	out, err = runTx(ctx, svc, func(tx db.Tx) (reportResult, error) { return a.apply(ctx, tx, false) })
	if outdated := out.report.NodeID == ""; err != nil || out.quarantined || outdated {
		return out, err // outdated by a newer connection, which came between the transactions
	}
	out.split = true
	failed, err := svc.applyParts(ctx, &out, a.now)
	if err != nil {
		return out, err
	}
	if err := writeTx(ctx, svc, func(tx db.Tx) error {
		return change.ResolveOtherFindings(ctx, tx, a.from.nodeID, finding.Report, failed, a.now)
	}); err != nil {
		return out, err
	}
	if len(failed) > 0 {
		return out, fmt.Errorf("%d members and volumes of the report are set aside", len(failed))
	}
	return out, nil
}

// apply applies a report in the caller's transaction, whole or without its volumes and members.
func (a incomingReport) apply(ctx context.Context, tx db.Tx, whole bool) (out reportResult, err error) {
	o, err := fleet.ApplyReport(ctx, tx, fleetReport(a.from.nodeID, a.sessionNo, a.report), a.now)
	if err != nil || !o.Fresh {
		return reportResult{}, err
	}
	if out.quarantined = o.Quarantined || o.CloneDetected; out.quarantined {
		if o.CloneDetected {
			out.newlyQuarantined, err = quarantine(ctx, tx, a.from, a.now)
		}
		return out, err
	}
	if o.WasUnreachable && whole {
		err = setReachable(ctx, tx, a.from, true, a.now)
	} else if o.WasUnreachable {
		// Each member becomes reachable with its own part of the report.
		err = nodeEvent(ctx, tx, a.from, "fleet.node.online", actionContact, nil, a.now)
	}
	if err != nil {
		return reportResult{}, err
	}
	owes, err := owesUsage(ctx, tx, a.from.nodeID, o.Resync)
	if err != nil {
		return reportResult{}, err
	}
	r := a.report
	out.report = Report{
		Report: instance.Report{
			NodeID:      a.from.nodeID,
			SessionNo:   a.sessionNo,
			Counter:     r.GetCounter(),
			Epoch:       r.GetEpoch(),
			Generation:  r.GetGeneration(),
			Incarnation: o.Incarnation,
			Statuses:    r.GetWorkloads(),
			UsageOwed:   owes,
		},
		Address:      a.from.address,
		Accelerators: r.GetAccelerators(),
		Environments: r.GetEnvironments(),
		Volumes:      r.GetVolumes(),
	}
	if whole {
		out.changes, err = applyWhole(ctx, tx, a.budgets, out.report, a.now)
	} else {
		out.memberIDs, err = beginReport(ctx, tx, a.budgets, out.report, a.now)
	}
	failpoint.Hit("hub/report/written")
	return out, err
}

// applyParts applies a report that was begun to its volumes and its members. It returns the ids of those that failed
// and were set aside; an error ends it early.
func (svc *Service) applyParts(ctx context.Context, out *reportResult, now time.Time) (failed []string, err error) {
	failed, err = applyEach(ctx, svc, out, out.report.Volumes, now, func(v *protocol.VolumeStatus) (kind, id string) {
		return change.Volume, v.GetId()
	}, applyReportVolumes)
	if err != nil {
		return failed, err
	}
	members, err := applyEach(ctx, svc, out, out.memberIDs, now, func(id string) (kind, _ string) {
		return change.Member, id
	}, applyReportMembers)
	return append(failed, members...), err
}

// applyEach applies parts of a report that was begun, as apply does in a transaction; resource names a part.
func applyEach[T any](ctx context.Context, svc *Service, out *reportResult, parts []T, now time.Time,
	resource func(T) (kind, id string),
	apply func(context.Context, db.Tx, Report, []T, time.Time) ([]instance.Change, error),
) (failed []string, err error) {
	var temporary error
	commitOrSplit(ctx, parts, func(ctx context.Context, some []T) error {
		if temporary != nil {
			return temporary
		}
		changes, err := runTx(ctx, svc, func(tx db.Tx) ([]instance.Change, error) {
			return apply(ctx, tx, out.report, some, now)
		})
		switch {
		case err == nil:
			out.changes = append(out.changes, changes...)
		case !isUnpostable(ctx, err):
			temporary = err
		case len(some) == 1:
			kind, id := resource(some[0])
			failed = append(failed, id)
			_ = change.SetAside(ctx, svc.DB, svc.Log, err, now, func(context.Context, db.Tx) (finding.Finding, error) {
				return finding.Finding{
					NodeID:       out.report.NodeID,
					Kind:         finding.Report,
					ResourceType: kind,
					ResourceID:   id,
				}, nil
			})
		}
		return err
	})
	return failed, temporary
}

// owesUsage reports whether usage of the node is still missing after a restore; it ends the resync when all is posted.
func owesUsage(ctx context.Context, tx db.Tx, nodeID string, resync fleet.Resync) (bool, error) {
	if resync.Status == fleet.InSync {
		return false, nil
	}
	owed := billing.Store{NodeID: nodeID, Incarnation: resync.OwedIncarnation}
	posted, err := ledger.Watermarks(ctx, tx, owed)
	if err != nil || resync.Status == fleet.AwaitingResync || posted[owed].Number < resync.OwedSegment {
		return true, err
	}
	return false, fleet.UsageComplete(ctx, tx, nodeID)
}
