package ledger

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Rate is what a meter costs at most in an hour of running.
type Rate struct {
	Meter        string
	PriceID      string
	PerHourNanos int64
}

// Estimate is what something that is not there yet would cost.
type Estimate struct {
	Currency string
	// PerHourNanos is the most that an hour of running costs; Rates are its parts.
	PerHourNanos int64
	Rates        []Rate
}

// EstimateMember gives the price of a member before it is made: what a lease would freeze now. Time of the allocation,
// where that is what is charged, is not in it.
func EstimateMember(ctx context.Context, tx db.Tx, member Subject, now time.Time) (Estimate, error) {
	s := subject{Subject: member}
	prices, err := freeze(ctx, tx, &s, now.UTC())
	if err != nil {
		return Estimate{}, err
	}
	out := Estimate{Currency: s.currency}
	out.Rates, out.PerHourNanos = rates(member, prices)
	return out, nil
}

// rates prices an hour at the member's limits; what is out of range is left out, as no lease covers it either.
func rates(s Subject, prices []billing.FrozenPrice) (list []Rate, total int64) {
	for _, p := range prices {
		nanos, ok := subject{Subject: s}.member().MaxCost([]billing.FrozenPrice{p}, time.Hour.Microseconds())
		if !ok || nanos == 0 {
			continue
		}
		list = append(list, Rate{Meter: p.Meter, PriceID: p.PriceID, PerHourNanos: nanos})
		total += nanos
	}
	return list, total
}

// Cost is what an instance has cost and costs while it runs.
type Cost struct {
	Currency string
	// SpentNanos is posted: usage that a node has yet to report is not in it.
	SpentNanos int64
	// HeldNanos are kept in the wallet for what may still come.
	HeldNanos int64
	// PerHourNanos is the most that an hour of running costs under the current leases.
	PerHourNanos int64
}

// Accounts are the holds and the current prices of instances' members, by instance id.
type Accounts map[string][]account

// Cost sums the cost of an instance's members; it is zero where there is no such instance.
func (a Accounts) Cost(instanceID string) (out Cost, err error) {
	for _, m := range a[instanceID] {
		var prices []billing.FrozenPrice
		if m.prices != nil {
			if err := json.Unmarshal(m.prices, &prices); err != nil {
				return Cost{}, fmt.Errorf("ledger: prices of member %s: %w", m.subject.ID, err)
			}
		}
		out.SpentNanos += m.hold.Posted
		out.HeldNanos += m.hold.Balance()
		_, nanos := rates(m.subject, prices)
		out.PerHourNanos += nanos
		out.Currency = cmp.Or(m.currency, m.hold.currency, out.Currency)
	}
	return out, nil
}

// CostOf reads the accounts of one instance and sums its cost.
func CostOf(ctx context.Context, tx db.Tx, instanceID string) (Cost, error) {
	if !db.IsID(instanceID) {
		return Cost{}, nil
	}
	accounts, err := ReadAccounts(ctx, tx, []string{instanceID})
	if err != nil {
		return Cost{}, err
	}
	return accounts.Cost(instanceID)
}
