package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// AdoptLease takes over a lease that a node uploaded to a restored hub, when it is higher than what the rows know. What
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
	if s.currency == "" {
		s.currency = in.GetCurrency()
	}
	h, _, err := holdOf(ctx, tx, s)
	if err != nil {
		return false, false, err
	}
	last, err := newestLease(ctx, tx, s)
	if err != nil {
		return false, false, err
	}
	l, lack := billing.RecoverLease(s.member(), last, h.Hold, in)
	if err := hostShares(ctx, tx, l.Prices); err != nil {
		return false, false, err
	}
	wallet, err := walletBalance(ctx, tx, s.OrgID, s.currency)
	if err != nil {
		return false, false, err
	}
	if h, err = place(ctx, tx, s, h, min(lack, wallet), fmt.Sprintf("lease:%s:%d", s.ID, l.No), now); err != nil {
		return false, false, err
	}
	l.HoldID = h.id
	if err := insertLease(ctx, tx, l); err != nil {
		return false, false, err
	}
	if l.IssuedAt.Before(s.OpenedAt) {
		if _, err := tx.Exec(ctx, `UPDATE subjects SET opened_at = $2 WHERE id = $1`, s.ID, l.IssuedAt); err != nil {
			return false, false, err
		}
	}
	s.leaseNo = l.No
	return true, lack > wallet, setLeased(ctx, tx, s, l.RenewAt())
}

// newestLease is the newest lease that is stored of a subject; the zero lease where there is none.
func newestLease(ctx context.Context, tx db.Tx, s subject) (billing.Lease, error) {
	if s.leaseNo == 0 {
		return billing.Lease{}, nil
	}
	leases, err := leasesOf(ctx, tx, []*subject{&s}, []time.Time{{}})
	if err != nil {
		return billing.Lease{}, err
	}
	return billing.NewLeases(leases).Newest(), nil
}

// hostShares adds the host's shares, which the message of a lease does not carry. A price that was made after the
// backup is lost with it.
func hostShares(ctx context.Context, tx db.Tx, prices []billing.FrozenPrice) error {
	for i := range prices {
		err := tx.QueryRow(ctx, `SELECT host_basis_points FROM prices WHERE id = $1`, prices[i].PriceID).
			Scan(&prices[i].HostBasisPoints)
		if err != nil && !db.IsNoRows(err) {
			return err
		}
	}
	return nil
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
