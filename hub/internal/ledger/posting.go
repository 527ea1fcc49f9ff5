package ledger

import (
	"fmt"
	"math"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// Kinds of postings.
const (
	Credit       = "credit"
	HoldOpened   = "hold_opened"
	HoldExtended = "hold_extended"
	HoldReduced  = "hold_reduced"
	HoldClosed   = "hold_closed"
	Usage        = "usage"
	WriteOff     = "write_off"
	Adjustment   = "adjustment"
)

// Accounts. An amount on an account is positive when the account has it.
const (
	// accountRevenue has what the platform earned, accountWriteOff what of it was never paid (negative).
	accountRevenue  = "platform:revenue"
	accountWriteOff = "platform:write_off"
	// accountCredit is where granted money comes from (negative).
	accountCredit = "platform:credit"
)

func walletAccount(orgID string) string { return "wallet:" + orgID }
func holdAccount(holdID string) string  { return "hold:" + holdID }
func hostAccount(nodeID string) string  { return "host:" + nodeID }

// Leg is one entry of a posting: an amount, in billionths of the currency, that an account gains or loses.
type Leg struct {
	Account  string
	Currency string
	Nanos    int64
}

// Posting is one balanced change of the accounts. Only NewPosting makes one.
type Posting struct {
	ID   string
	Key  string
	Kind string
	// SubjectKind is org, member or allocation.
	SubjectKind   string
	SubjectID     string
	OrgID         string
	ProjectID     string
	AppInstanceID string
	// Meter, PriceID and the period name what usage was charged; empty for other kinds.
	Meter                string
	PriceID              string
	PeriodFrom, PeriodTo time.Time
	// Corrects is the posting that an adjustment corrects.
	Corrects      string
	Description   string
	CorrelationID string
	CreatedAt     time.Time
	Legs          []Leg
}

// NewPosting balances its legs, or fails: in each currency they must sum to zero, and none may be nothing. The key is
// the caller's name for what happened; posting under a key that exists is an error of the database.
func NewPosting(key string, legs ...Leg) (Posting, error) {
	if key == "" || len(legs) < 2 {
		return Posting{}, fmt.Errorf("posting %q: a key and at least two legs are required", key)
	}
	// Summed as two halves, which cannot overflow together unless one leg alone is out of any sensible range.
	sums := map[string]int64{}
	for _, l := range legs {
		if l.Account == "" || l.Currency == "" || l.Nanos == 0 || l.Nanos == math.MinInt64 {
			return Posting{}, fmt.Errorf("posting %q: leg %+v is incomplete", key, l)
		}
		sum := sums[l.Currency]
		if l.Nanos > 0 && sum > math.MaxInt64-l.Nanos || l.Nanos < 0 && sum < math.MinInt64-l.Nanos {
			return Posting{}, fmt.Errorf("posting %q: the legs are out of range", key)
		}
		sums[l.Currency] = sum + l.Nanos
	}
	for currency, sum := range sums {
		if sum != 0 {
			return Posting{}, fmt.Errorf("posting %q: the legs in %s sum to %d, not to zero", key, currency, sum)
		}
	}
	return Posting{ID: db.NewID(), Key: key, Legs: legs}, nil
}

// of says for which subject the posting is.
func (p Posting) of(kind string, s subject, now time.Time) Posting {
	p.Kind, p.SubjectKind, p.SubjectID = kind, s.Kind, s.ID
	p.OrgID, p.ProjectID, p.AppInstanceID, p.CorrelationID = s.OrgID, s.ProjectID, s.AppInstanceID, s.CorrelationID
	p.CreatedAt = now
	return p
}

// For what part of a bill the posting is.
func (p Posting) over(meter, priceID string, hours rating.Interval) Posting {
	p.Meter, p.PriceID, p.PeriodFrom, p.PeriodTo = meter, priceID, hours.From, hours.To
	return p
}
