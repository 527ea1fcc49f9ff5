package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// MaxPage bounds a listing.
	MaxPage = 200
	// DefaultPage is a listing's length where nobody says.
	DefaultPage = 50
)

// Filter narrows a listing of usage or of postings. The caller has checked access to all that the
// filter lets through; empty fields let everything through.
type Filter struct {
	OrgID         string
	ProjectID     string
	AppInstanceID string
	// UsageSource and Meter are for usage, Kind for postings.
	UsageSource string
	Meter       string
	Kind        string
	// From and To bound when a posting was made: [From, To). Usage counts that ended after From and began before To.
	From, To time.Time
	// Before is the cursor of the page before; Limit is cut to MaxPage, DefaultPage when zero.
	Before string
	Limit  int
}

// ListPostings gives the journal, newest first, and the cursor of the next page, empty at the end.
func ListPostings(ctx context.Context, tx db.Tx, f Filter) ([]Posting, string, error) {
	if err := f.check(); err != nil {
		return nil, "", err
	}
	var w db.Where
	f.narrow(&w, "")
	w.Compare("kind =", f.Kind)
	w.Between("created_at", f.From, f.To)
	limit := w.Arg(f.limit() + 1) // before w.Args is read
	rows, err := db.Select(ctx, tx, scanPosting,
		`SELECT id, key, kind, subject_kind, subject_id, org_id, coalesce(project_id::text, ''),
			coalesce(app_instance_id::text, ''), meter, coalesce(price_id::text, ''), period_from, period_to,
			coalesce(corrects::text, ''),
			description, correlation_id, created_at
		FROM postings`+w.SQL()+` ORDER BY id DESC LIMIT `+limit, w.Args...)
	if err != nil {
		return nil, "", err
	}
	rows, next := page(rows, f.limit(), func(p Posting) string { return p.ID })
	return rows, next, withLegs(ctx, tx, rows)
}

// ListPrices gives the price book of a meter, or all of it, newest first, and the cursor of the next page. visible,
// which may be nil, adds which apps the caller may know of, by the column of their slugs.
func ListPrices(ctx context.Context, tx db.Tx, f Filter, visible func(w *db.Where, slug string),
) ([]Price, string, error) {
	if err := f.check(); err != nil {
		return nil, "", err
	}
	var w db.Where
	w.Compare("meter =", f.Meter)
	if visible != nil {
		visible(&w, "p.app_slug")
	}
	f.narrow(&w, "p.")
	most := w.Arg(f.limit() + 1)
	rows, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (p Price, err error) {
		err = row.Scan(&p.ID, &p.Meter, &p.AppSlug, &p.SKU, &p.Currency, &p.Nanos, &p.Per, &p.PerQuantity, &p.HostBasisPoints,
			&p.From, &p.CreatedAt, (*zeronull.Timestamptz)(&p.To))
		return p, err
	}, `SELECT `+priceColumns+
		`, (SELECT min(n.from_at) FROM prices n WHERE n.meter = p.meter AND n.app_slug = p.app_slug AND n.sku = p.sku
			AND n.currency = p.currency AND n.from_at > p.from_at)
		FROM prices p`+w.SQL()+` ORDER BY p.id DESC LIMIT `+most, w.Args...)
	if err != nil {
		return nil, "", err
	}
	rows, next := page(rows, f.limit(), func(p Price) string { return p.ID })
	return rows, next, nil
}

// narrow adds the conditions of the filter on the ids of a table.
func (f Filter) narrow(w *db.Where, table string) {
	w.Compare(table+"org_id =", f.OrgID)
	w.Compare(table+"project_id =", f.ProjectID)
	w.Compare(table+"app_instance_id =", f.AppInstanceID)
	w.Compare(table+"id <", f.Before)
}

func (f Filter) limit() int {
	if f.Limit <= 0 {
		return DefaultPage
	}
	return min(f.Limit, MaxPage)
}

func (f Filter) check() error {
	for _, id := range []string{f.OrgID, f.ProjectID, f.AppInstanceID} {
		if id != "" && !db.IsID(id) {
			return fault.New(fault.Malformed, codeIDInvalid, "An id of the filter is not an id.", nil)
		}
	}
	if f.Before != "" && !db.IsID(f.Before) {
		return fault.CursorInvalid()
	}
	return nil
}

// page cuts the one row too many that says that there is more.
func page[T any](rows []T, limit int, id func(T) string) ([]T, string) {
	if len(rows) <= limit {
		return rows, ""
	}
	return rows[:limit], id(rows[limit-1])
}

func scanPosting(row pgx.CollectableRow) (Posting, error) {
	var p Posting
	err := row.Scan(&p.ID, &p.Key, &p.Kind, &p.SubjectKind, &p.SubjectID, &p.OrgID, &p.ProjectID, &p.AppInstanceID,
		&p.Meter, &p.PriceID,
		(*zeronull.Timestamptz)(&p.PeriodFrom), (*zeronull.Timestamptz)(&p.PeriodTo), &p.Corrects, &p.Description,
		&p.CorrelationID, &p.CreatedAt)
	return p, err
}

func withLegs(ctx context.Context, tx db.Tx, postings []Posting) error {
	ids := make([]string, len(postings))
	for i, p := range postings {
		ids[i] = p.ID
	}
	var (
		posting string
		leg     Leg
	)
	return db.ForEach(ctx, tx, []any{&posting, &leg.Account, &leg.Currency, &leg.Nanos}, func() {
		i := slices.Index(ids, posting)
		postings[i].Legs = append(postings[i].Legs, leg)
	},
		`SELECT posting_id, account, currency, amount_nanos FROM entries WHERE posting_id = ANY($1::uuid[])
			ORDER BY posting_id, leg`, ids)
}
