package command

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

const resourceMember = "member"

// accrual is an allocation with what came of billing it.
type accrual struct {
	ledger.Row
	ledger.Accrued
}

func (a *accrual) finding(kind string, now time.Time) finding.Finding {
	return finding.Finding{NodeID: a.NodeID, Kind: kind, ResourceType: resourceAllocation, ResourceID: a.ID, At: now}
}

// AccrueAllocations bills the time of all open allocations, and releases those whose wallet does not cover them any
// more. It is a periodic pass.
func (s *Service) AccrueAllocations(ctx context.Context, now time.Time) error {
	accrue := pass[*accrual]{
		db: s.DB, log: s.Log, now: now,
		list: func(ctx context.Context, tx db.Tx, after **accrual) ([]*accrual, error) {
			last := ""
			if after != nil {
				last = (*after).ID
			}
			rows, err := ledger.DueAllocations(ctx, tx, last, now, passPageRows)
			out := make([]*accrual, len(rows))
			for i, r := range rows {
				out[i] = &accrual{Row: r}
			}
			return out, err
		},
		org: func(a *accrual) string { return a.OrgID },
		process: func(ctx context.Context, tx db.Tx, a *accrual) (err error) {
			if a.Accrued, err = ledger.AccrueAllocation(ctx, tx, a.ID, now); err != nil || !a.WasAside {
				return err
			}
			return Resolve(ctx, tx, a.finding(finding.Accrual, now))
		},
		aside: func(ctx context.Context, tx db.Tx, a *accrual) (finding.Finding, error) {
			return a.finding(finding.Accrual, now), ledger.SetAside(ctx, tx, a.ID, now)
		},
	}
	done, err := accrue.run(ctx)
	for _, a := range done {
		if !a.Exhausted {
			continue
		}
		s.Log.WarnContext(ctx, "the wallet no longer covers the allocation", slog.String("allocation_id", a.ID))
		if releaseErr := s.releaseExhausted(ctx, a, now); passing(ctx, releaseErr) {
			return errors.Join(err, releaseErr)
		}
	}
	return err
}

// releaseExhausted ends an exhausted allocation; where that fails, the next pass, which finds it exhausted again, tries
// again.
func (s *Service) releaseExhausted(ctx context.Context, a *accrual, now time.Time) error {
	cause := s.ReleaseUnpaid(ctx, a.ID, db.NewID(), now)
	if cause == nil || passing(ctx, cause) {
		return cause
	}
	return SetAside(ctx, s.DB, s.Log, cause, now, func(context.Context, db.Tx) (finding.Finding, error) {
		return a.finding(finding.Release, now), nil
	})
}
