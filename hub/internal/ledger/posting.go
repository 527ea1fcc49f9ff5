package ledger

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
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

// Leg is one entry of a posting.
type Leg = billing.Leg

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
	if key == "" {
		return Posting{}, errors.New("a posting needs a key")
	}
	if err := billing.Balanced(legs); err != nil {
		return Posting{}, fmt.Errorf("posting %q: %w", key, err)
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
