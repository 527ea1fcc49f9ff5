package periodic

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// accrual is an allocation with the result of billing it.
type accrual struct {
	ledger.Row
	ledger.Accrued
}

// restoreGrace is how long after a restore of the hub no allocation and no attachment ends for want of credit: what was
// granted after the backup is lost until an admin grants it again.
const restoreGrace = 24 * time.Hour

// AccrueAllocations bills the time of all open allocations, and releases those whose wallet no longer covers them.
// Within a day after the hub was restored they go on, and are findings; restored is zero where it never was.
func (p Passes) AccrueAllocations(ctx context.Context, restored, now time.Time) error {
	rowOf := func(a *accrual) ledger.Row { return a.Row }
	accrue := pass[*accrual]{
		Passes:       p,
		now:          now,
		kind:         finding.Accrual,
		resourceType: change.Allocation,
		row:          rowOf,
		list: afterID(rowOf, func(ctx context.Context, tx db.Tx, after string) ([]*accrual, error) {
			rows, err := ledger.DueAllocations(ctx, tx, after, now, passPageRows)
			out := make([]*accrual, len(rows))
			for i, r := range rows {
				out[i] = &accrual{Row: r}
			}
			return out, err
		}),
		process: func(ctx context.Context, tx db.Tx, a *accrual) (wasAside bool, err error) {
			a.Accrued, err = ledger.AccrueAllocation(ctx, tx, a.ID, now)
			return a.WasAside, err
		},
	}
	done, err := accrue.run(ctx)
	end := p.releaseExhausted
	if now.Before(restored.Add(restoreGrace)) {
		end = p.spareExhausted
	}
	for _, a := range done {
		if !a.Exhausted {
			continue
		}
		p.Log.WarnContext(ctx, "the wallet no longer covers what is billed", slog.String("kind", a.Kind),
			slog.String("id", a.ID))
		if endErr := end(ctx, a, now); isTemporary(ctx, endErr) {
			return errors.Join(err, endErr)
		}
	}
	return errors.Join(err, p.resolveCovered(ctx, done, now))
}

// resolveCovered resolves the findings about what was spared and is covered again.
func (p Passes) resolveCovered(ctx context.Context, done []*accrual, now time.Time) error {
	spared, err := db.Query(ctx, p.DB, func(tx db.Tx) ([]finding.Finding, error) {
		return finding.ListAbout(ctx, tx, finding.Lease, change.Allocation, change.Attachment)
	})
	for _, f := range spared {
		if !slices.ContainsFunc(done, func(a *accrual) bool { return a.ID == f.ResourceID && !a.Exhausted }) {
			continue
		}
		f.At = now
		err = errors.Join(err, db.WriteTx(ctx, p.DB, func(tx db.Tx) error { return change.ResolveFinding(ctx, tx, f) }))
	}
	return err
}

// releaseExhausted ends an exhausted allocation or attachment, unless credit has come since it was billed. Where that
// fails, the next pass, which finds it exhausted again, tries again.
func (p Passes) releaseExhausted(ctx context.Context, a *accrual, now time.Time) error {
	end, correlationID := ReleaseUnpaid, db.NewID()
	if a.Kind == ledger.Attachment {
		end = DetachUnpaid
	}
	cause := db.WriteTx(ctx, p.DB, func(tx db.Tx) error {
		still, err := ledger.AccrueAllocation(ctx, tx, a.ID, now)
		if err != nil || !still.Exhausted {
			return err
		}
		return end(ctx, tx, a.ID, correlationID, now)
	})
	if cause == nil || isTemporary(ctx, cause) {
		return cause
	}
	return change.SetAside(ctx, p.DB, p.Log, cause, now, func(context.Context, db.Tx) (finding.Finding, error) {
		return finding.Finding{
			NodeID:       a.NodeID,
			Kind:         finding.Release,
			ResourceType: resourceOf(a),
			ResourceID:   a.ID,
			At:           now,
		}, nil
	})
}

// spareExhausted lets an exhausted allocation or attachment go on, and adds a finding about it.
func (p Passes) spareExhausted(ctx context.Context, a *accrual, now time.Time) error {
	return db.WriteTx(ctx, p.DB, func(tx db.Tx) error {
		return change.AddFinding(ctx, tx, finding.Finding{
			NodeID:       a.NodeID,
			Kind:         finding.Lease,
			ResourceType: resourceOf(a),
			ResourceID:   a.ID,
			Detail: "The wallet, as it was at the backup, does not cover it any more; grant credit, or it ends 24 hours " +
				"after the restore.",
			At: now,
		})
	})
}

func resourceOf(a *accrual) string {
	if a.Kind == ledger.Attachment {
		return change.Attachment
	}
	return change.Allocation
}

// ReleaseUnpaid ends an allocation whose wallet no longer covers it: its instances are decommissioned, and it is
// released when the node has proved that. What it used beyond its hold would be written off. One that is ending already
// stays as it is.
func ReleaseUnpaid(ctx context.Context, tx db.Tx, allocationID, correlationID string, now time.Time) error {
	by := change.BySystem(correlationID, now)
	a, err := capacity.GetAny(ctx, tx, allocationID)
	if err != nil || a.Status != capacity.Active {
		return err
	}
	live, err := instance.LiveInAllocation(ctx, tx, a.ID)
	if err != nil {
		return err
	}
	for _, i := range live {
		ended, err := instance.RequestDecommission(ctx, tx, i, instance.Request{
			OperationID:   db.NewID(),
			By:            principal.Actor{Type: principal.System},
			CorrelationID: correlationID,
			Reason:        protocol.WorkloadStatus_LEASE_ENDED,
		}, now)
		if err != nil {
			return err
		}
		if _, err := change.CompleteEnd(ctx, tx, by, ended); err != nil {
			return err
		}
	}
	_, err = change.ReleaseAllocation(ctx, tx, by, a, 0)
	return err
}

// DetachUnpaid ends an attachment whose wallet no longer covers it. One that has ended meanwhile stays ended.
func DetachUnpaid(ctx context.Context, tx db.Tx, attachmentID, correlationID string, now time.Time) error {
	a, err := instance.GetAnyAttachment(ctx, tx, attachmentID)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if a, err = instance.Detach(ctx, tx, a, now); err != nil {
		return err
	}
	return change.CompleteDetachment(ctx, tx, change.BySystem(correlationID, now), a)
}
