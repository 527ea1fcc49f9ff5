package ledger

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// UsageHour is what was accepted of one subject, meter and price in a UTC hour, and what was charged for it.
type UsageHour struct {
	OrgID, ProjectID, AppInstanceID, AppSlug, AllocationID, NodeID string

	SubjectID   string
	UsageSource string
	Meter       string
	Quantity    int64
	Hour        time.Time
	// PriceID is empty where the usage has no price; then there is no currency and nothing is charged.
	PriceID         string
	Currency        string
	ChargedNanos    int64
	WrittenOffNanos int64
}

// hourCursor is the last row of a page: hours are listed newest first, those of an hour by descending key.
type hourCursor struct {
	Hour      time.Time `json:"h"`
	SubjectID string    `json:"s"`
	Meter     string    `json:"m"`
	PriceID   string    `json:"p"`
}

func (c hourCursor) String() string {
	raw, _ := json.Marshal(c) // strings and a time: it cannot fail
	return base64.RawURLEncoding.EncodeToString(raw)
}

// parseHourCursor reads what String wrote. No cursor is the one before all rows.
func parseHourCursor(text string) (c hourCursor, err error) {
	if text == "" {
		return hourCursor{Hour: endOfTime(), SubjectID: noPrice, PriceID: noPrice}, nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil || !db.IsID(c.SubjectID) || !db.IsID(c.PriceID) || strings.ContainsRune(c.Meter, 0) {
		return c, fault.CursorInvalid()
	}
	return c, nil
}

// endOfTime is after all hours.
func endOfTime() time.Time { return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC) }

// ListHours gives usage by hours, newest first, and the cursor of the next page, empty at the end. From and To bound
// the hours.
func ListHours(ctx context.Context, tx db.Tx, f Filter) ([]UsageHour, string, error) {
	before, err := parseHourCursor(f.Before)
	if err != nil {
		return nil, "", err
	}
	f.Before = ""
	if err := f.check(); err != nil {
		return nil, "", err
	}
	if f.To.IsZero() {
		f.To = endOfTime()
	}
	var w db.Where
	from, to := w.Arg(f.From), w.Arg(f.To)
	f.narrow(&w, "s.")
	// An hour that begins before To is listed whole, with what was opened later in it.
	w.And("s.opened_at < " + w.Arg(f.To.Add(time.Hour-1).Truncate(time.Hour)))
	w.And("(s.settled_at IS NULL OR s.settled_at >= " + from + ")")
	meter := ""
	if f.Meter != "" {
		meter = " AND u.meter = " + w.Arg(f.Meter)
	}
	limit, last := w.Arg(f.limit()+1), "("+w.Arg(before.Hour)+"::timestamptz, "+w.Arg(before.SubjectID)+"::uuid, "+
		w.Arg(before.Meter)+"::text, "+w.Arg(before.PriceID)+"::uuid)"
	rows, err := db.Select(ctx, tx, scanHour,
		`SELECT s.org_id, s.project_id, coalesce(s.app_instance_id::text, ''), s.app_slug, coalesce(s.allocation_id::text,
			''),
			s.node_id, s.id, s.kind, h.meter, h.quantity, h.hour, h.price_id, coalesce(p.currency, s.currency), h.charged_nanos,
			h.written_off_nanos
		FROM subjects s CROSS JOIN LATERAL (SELECT u.* FROM usage_hours u WHERE u.node_id = s.node_id
			AND u.subject_id = s.id AND u.hour >= `+from+
			` AND u.hour < `+to+meter+`
			AND (u.hour, u.subject_id, u.meter, u.price_id) < `+last+`
			ORDER BY u.hour DESC, u.meter DESC, u.price_id DESC LIMIT `+limit+`) AS h
		LEFT JOIN prices p ON p.id = h.price_id`+w.SQL()+
			` ORDER BY h.hour DESC, s.id DESC, h.meter DESC, h.price_id DESC LIMIT `+limit, w.Args...)
	if err != nil {
		return nil, "", err
	}
	rows, next := page(rows, f.limit(), func(h UsageHour) string {
		price := h.PriceID
		if price == "" {
			price = noPrice
		}
		return hourCursor{h.Hour, h.SubjectID, h.Meter, price}.String()
	})
	return rows, next, nil
}

func scanHour(row pgx.CollectableRow) (h UsageHour, err error) {
	var kind string
	err = row.Scan(&h.OrgID, &h.ProjectID, &h.AppInstanceID, &h.AppSlug, &h.AllocationID, &h.NodeID, &h.SubjectID, &kind,
		&h.Meter, &h.Quantity,
		&h.Hour, &h.PriceID, &h.Currency, &h.ChargedNanos, &h.WrittenOffNanos)
	h.Hour, h.UsageSource = h.Hour.UTC(), SourceAppRuntime
	switch kind {
	case Allocation:
		h.UsageSource = SourceAllocation
	case Volume:
		h.UsageSource = SourceVolume
	case Attachment:
		h.UsageSource = SourceAttachment
	}
	if h.PriceID == noPrice {
		h.PriceID, h.Currency = "", ""
	}
	return h, err
}
