package billing

import (
	"fmt"
	"math"

	"github.com/gpuaas/gpuaas/hub/rating"
)

// Accounts. An amount on an account is positive when the account has it.
const (
	// AccountRevenue has what the platform earned, AccountWriteOff what of it was never paid (negative).
	AccountRevenue  = "platform:revenue"
	AccountWriteOff = "platform:write_off"
	// AccountCredit is where granted money comes from (negative).
	AccountCredit = "platform:credit"
)

// WalletAccount is an org's, HoldAccount a hold's, HostAccount that of a node's owner.
func WalletAccount(orgID string) string { return "wallet:" + orgID }

// HoldAccount is the account of a hold.
func HoldAccount(holdID string) string { return "hold:" + holdID }

// HostAccount is the account of a node's owner.
func HostAccount(nodeID string) string { return "host:" + nodeID }

// Leg is one entry of a posting: an amount, in billionths of the currency, that an account gains or loses.
type Leg struct {
	Account  string
	Currency string
	Nanos    int64
}

// Balanced returns an error unless the legs are a posting: in each currency they must sum to zero, and none may be
// nothing.
func Balanced(legs []Leg) error {
	if len(legs) < 2 {
		return fmt.Errorf("at least two legs are required")
	}
	// Summed as two halves, which cannot overflow together unless one leg alone is out of any sensible range.
	sums := map[string]int64{}
	for _, l := range legs {
		if l.Account == "" || l.Currency == "" || l.Nanos == 0 || l.Nanos == math.MinInt64 {
			return fmt.Errorf("leg %+v is incomplete", l)
		}
		sum := sums[l.Currency]
		if l.Nanos > 0 && sum > math.MaxInt64-l.Nanos || l.Nanos < 0 && sum < math.MinInt64-l.Nanos {
			return fmt.Errorf("the legs are out of range")
		}
		sums[l.Currency] = sum + l.Nanos
	}
	for currency, sum := range sums {
		if sum != 0 {
			return fmt.Errorf("the legs in %s sum to %d, not to zero", currency, sum)
		}
	}
	return nil
}

// Transfer moves money from one account to another.
func Transfer(from, to, currency string, nanos int64) []Leg {
	return []Leg{{from, currency, -nanos}, {to, currency, nanos}}
}

// UsageLegs are the postings of a charge: what the hold paid, shared with the host, and what was written off. Each is
// empty where it would post nothing.
func UsageLegs(holdID, nodeID, currency string, d rating.Delta) (paid, writtenOff []Leg) {
	if d.CollectedNanos > 0 {
		paid = []Leg{{HoldAccount(holdID), currency, -d.CollectedNanos}}
		for _, l := range []Leg{
			{AccountRevenue, currency, d.CollectedNanos - d.HostNanos},
			{HostAccount(nodeID), currency, d.HostNanos},
		} {
			if l.Nanos != 0 {
				paid = append(paid, l)
			}
		}
	}
	if d.WrittenOffNanos > 0 {
		writtenOff = []Leg{{AccountRevenue, currency, d.WrittenOffNanos}, {AccountWriteOff, currency, -d.WrittenOffNanos}}
	}
	return paid, writtenOff
}
