package ledger

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Grant is money that the platform puts into an org's wallet.
type Grant struct {
	OrgID         string
	Currency      string
	Nanos         int64
	Description   string
	CorrelationID string
	// Key makes the grant repeatable: the same key grants once.
	Key string
}

// GrantCredit posts the grant. The org's first grant opens its wallet. Members whose lease the wallet did not cover are
// due again.
func GrantCredit(ctx context.Context, tx db.Tx, g Grant, now time.Time) (Posting, error) {
	if g.Nanos <= 0 {
		return Posting{}, fault.New(fault.Unprocessable, CodeAmountInvalid, "A credit must be above zero.", nil).WithField(
			"/amount",
			"is not above zero")
	}
	p, err := NewPosting("credit:"+g.Key,
		Leg{Account: billing.WalletAccount(g.OrgID), Currency: g.Currency, Nanos: g.Nanos},
		Leg{Account: billing.AccountCredit, Currency: g.Currency, Nanos: -g.Nanos})
	if err != nil {
		return Posting{}, err
	}
	p.Kind, p.SubjectKind, p.SubjectID, p.OrgID = Credit, "org", g.OrgID, g.OrgID
	p.Description, p.CorrelationID, p.CreatedAt = g.Description, g.CorrelationID, now.UTC().Truncate(time.Microsecond)
	if err := moveWallet(ctx, tx, g.OrgID, g.Currency, g.Nanos, p.CreatedAt); err != nil {
		return Posting{}, err
	}
	if err := retryRenewals(ctx, tx, g.OrgID, p.CreatedAt); err != nil {
		return Posting{}, err
	}
	return p, insertPostings(ctx, tx, p)
}

// Balance is one currency of an org's wallet.
type Balance struct {
	Currency       string
	AvailableNanos int64
	HeldNanos      int64
}

// Wallet says what the org can still spend, and what its open holds keep. Currencies come in order.
func Wallet(ctx context.Context, tx db.Tx, orgID string) ([]Balance, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Balance],
		`SELECT w.currency, w.balance_nanos, coalesce((SELECT sum(h.placed_nanos - h.posted_nanos - h.released_nanos)
			FROM holds h WHERE h.org_id = w.org_id AND h.currency = w.currency), 0)::int8
		FROM wallets w WHERE w.org_id = $1 ORDER BY w.currency`, orgID)
}

// hold keeps money of a wallet for one subject.
type hold struct {
	id        string
	nodeID    string
	subjectID string
	orgID     string
	currency  string
	billing.Hold
}

// moveWallet adds nanos, which may be negative, to a wallet. It fails rather than go below zero.
func moveWallet(ctx context.Context, tx db.Tx, orgID, currency string, nanos int64, now time.Time) error {
	if nanos < 0 {
		if covered, err := drawWallet(ctx, tx, orgID, currency, nanos); err != nil || covered {
			return err
		}
		return insufficientFunds()
	}
	have, err := walletBalance(ctx, tx, orgID, currency)
	if err != nil {
		return err
	}
	if have > math.MaxInt64-nanos {
		return fault.New(fault.Unprocessable, CodeAmountInvalid, "The wallet cannot hold that much.", nil).WithField(
			"/amount",
			"is too large")
	}
	return tx.Queue(ctx, `INSERT INTO wallets (org_id, currency, balance_nanos, created_at) VALUES ($1, $2, $3, $4)
		ON CONFLICT (org_id, currency) DO UPDATE SET balance_nanos = excluded.balance_nanos`, orgID, currency, have+nanos,
		now)
}

func insufficientFunds() *fault.Error {
	return fault.New(fault.Conflict, codeInsufficientFunds, "The org's wallet does not cover this; ask for credit, or "+
		"release what is no longer needed.", nil)
}

// place moves nanos from the wallet into the subject's hold, making the hold where there is none. The key names the
// reason.
func place(ctx context.Context, tx db.Tx, s subject, h hold, nanos int64, key string, now time.Time) (hold, error) {
	kind, save := HoldExtended, updateHold
	if h.id == "" {
		kind, save = HoldOpened, insertHold
		h = hold{id: db.NewID(), nodeID: s.NodeID, subjectID: s.ID, orgID: s.OrgID, currency: s.currency}
		if nanos == 0 {
			return h, save(ctx, tx, h)
		}
	}
	if nanos == 0 {
		return h, nil
	}
	if h.Placed == 0 {
		// Opened while nothing had a price: only now is it known what the subject is charged in.
		kind, h.currency = HoldOpened, s.currency
	}
	if h.Placed > math.MaxInt64-nanos {
		return h, insufficientFunds()
	}
	if err := moveWallet(ctx, tx, s.OrgID, h.currency, -nanos, now); err != nil {
		return h, err
	}
	h.Placed += nanos
	if err := save(ctx, tx, h); err != nil {
		return h, err
	}
	p, err := NewPosting(key, billing.Transfer(billing.WalletAccount(s.OrgID), billing.HoldAccount(h.id), h.currency,
		nanos)...)
	if err != nil {
		return h, err
	}
	return h, insertPostings(ctx, tx, p.of(kind, s, now))
}
