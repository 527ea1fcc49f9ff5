package agent

import (
	"math/big"

	"github.com/gpuaas/gpuaas/protocol"
)

// NewLease is a signed lease as Diff needs it; used is what its member has used, in base units by meter.
func NewLease(l *protocol.Lease, used map[string]int64) Lease {
	spent := Spent(l, used)
	return Lease{
		MemberID:  l.GetMemberId(),
		No:        l.GetLeaseNo(),
		ExpiresAt: l.GetExpiresAt().AsTime(),
		Exhausted: spent.Sign() > 0 && spent.Cmp(big.NewInt(l.GetCapNanos())) >= 0,
	}
}

// Spent is what a member's usage costs at the lease's frozen prices, in billionths, rounded up.
func Spent(l *protocol.Lease, used map[string]int64) *big.Int {
	total := new(big.Int)
	for _, p := range l.GetPrices() {
		if p.GetPerQuantity() <= 0 {
			continue
		}
		cost := new(big.Int).Mul(big.NewInt(used[p.GetMeter()]), big.NewInt(p.GetPriceNanos()))
		quotient, rest := new(big.Int).QuoRem(cost, big.NewInt(p.GetPerQuantity()), new(big.Int))
		if rest.Sign() > 0 {
			quotient.Add(quotient, big.NewInt(1))
		}
		total.Add(total, quotient)
	}
	return total
}
