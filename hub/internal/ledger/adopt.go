package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// AdoptLease takes over a lease that a node brought to a restored hub, when it is higher than what the rows know. What
// it may cost is held again, as far as the wallet goes: uncovered is true where it does not, and what is used beyond
// the hold is written off, as ever. The prices are those that the lease froze.
func AdoptLease(ctx context.Context, tx db.Tx, nodeID string, in *protocol.Lease,
	now time.Time,
) (adopted, uncovered bool, err error) {
	s, err := lockSubject(ctx, tx, in.GetMemberId())
	if fault.Is(err, fault.NotFound) {
		return false, false, nil // a member that has ended before the node's accepted state
	}
	if err != nil {
		return false, false, err
	}
	if s.Kind != Member || s.NodeID != nodeID || !s.closedAt.IsZero() || int64(in.GetLeaseNo()) <= s.leaseNo ||
		!in.GetExpiresAt().IsValid() {
		return false, false, nil
	}
	l, err := adoptedLease(ctx, tx, s, in)
	if err != nil {
		return false, false, err
	}
	if s.currency == "" {
		s.currency = in.GetCurrency()
	}
	h, _, err := holdOf(ctx, tx, s.ID)
	if err != nil {
		return false, false, err
	}
	wallet, err := walletBalance(ctx, tx, s.OrgID, s.currency)
	if err != nil {
		return false, false, err
	}
	lack := max(in.GetCapNanos()-(h.placed-h.released), 0)
	if h, err = place(ctx, tx, s, h, min(lack, wallet), fmt.Sprintf("lease:%s:%d", s.ID, l.no), now); err != nil {
		return false, false, err
	}
	l.holdID = h.id
	if err := insertLease(ctx, tx, l); err != nil {
		return false, false, err
	}
	if l.issuedAt.Before(s.OpenedAt) {
		if _, err := tx.Exec(ctx, `UPDATE subjects SET opened_at = $2 WHERE id = $1`, s.ID, l.issuedAt); err != nil {
			return false, false, err
		}
	}
	s.leaseNo = l.no
	return true, lack > wallet, setLeased(ctx, tx, s, renewAt(l))
}

func adoptedLease(ctx context.Context, tx db.Tx, s subject, in *protocol.Lease) (lease, error) {
	expires := in.GetExpiresAt().AsTime().Truncate(time.Microsecond)
	l := lease{
		subjectID: s.ID, no: int64(in.GetLeaseNo()), nodeID: s.NodeID, currency: in.GetCurrency(), cap: in.GetCapNanos(),
		issuedAt: expires.Add(-time.Duration(in.GetDurationSeconds()) * time.Second), expiresAt: expires,
		endPolicy: in.GetEndPolicy(),
	}
	if l.no > s.leaseNo+1 && s.leaseNo > 0 {
		// The leases in between are lost; each began before the one before it had ended.
		before, err := leasesOf(ctx, tx, []string{s.ID}, []time.Time{{}})
		if err != nil {
			return lease{}, err
		}
		if len(before) > 0 {
			l.issuedAt = earliest(l.issuedAt, before[len(before)-1].expiresAt)
		}
	}
	for _, p := range in.GetPrices() {
		f := frozen{Meter: p.GetMeter(), PriceID: p.GetPriceId(), Nanos: p.GetPriceNanos(), PerQuantity: p.GetPerQuantity()}
		// The host's share is not in the lease. A price that was made after the backup is lost with it.
		err := tx.QueryRow(ctx, `SELECT host_basis_points FROM prices WHERE id = $1`, f.PriceID).Scan(&f.HostBasisPoints)
		if err != nil && !db.IsNoRows(err) {
			return lease{}, err
		}
		l.prices = append(l.prices, f)
	}
	return l, nil
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
