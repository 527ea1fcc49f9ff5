package ledger

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// UsageRecord is accepted usage with what its subject was made with.
type UsageRecord struct {
	ID                string
	OrgID             string
	ProjectID         string
	AppInstanceID     string
	AppSlug           string
	AllocationID      string
	NodeID            string
	UsageSource       string
	Meter             string
	Quantity          int64
	OperatingMode     string
	ControlPlaneScope string
	RuntimeBackend    string
	StartedAt         time.Time
	EndedAt           time.Time
	CorrelationID     string
	PostingID         string
	RunID             string
	LeaseNo           int64
	VolumeID          string
}

// usageColumns are what all tables of raw usage have.
const usageColumns = `id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id`

// ListUsage gives raw usage, newest first, and the cursor of the next page, empty at the end. With a filter by org,
// project or instance, it leaves out what came for a subject that was settled before the oldest raw usage.
func ListUsage(ctx context.Context, tx db.Tx, f Filter) ([]UsageRecord, string, error) {
	if err := f.check(); err != nil {
		return nil, "", err
	}
	u, err := usageQueryOf(ctx, tx, f)
	if err != nil {
		return nil, "", err
	}
	arms, limit := "("+u.slots(usageColumns, f.limit()+1, f.limit()+1)+")", u.Arg(f.limit()+1)
	rows, err := db.Select(ctx, tx, pgx.RowToStructByPos[UsageRecord],
		`SELECT u.id, s.org_id, s.project_id, coalesce(s.app_instance_id::text, ''), s.app_slug,
			coalesce(s.allocation_id::text, ''), s.node_id, CASE s.kind WHEN '`+Allocation+`' THEN '`+SourceAllocation+
			`' WHEN '`+Volume+`' THEN '`+SourceVolume+`' WHEN '`+Attachment+`' THEN '`+SourceAttachment+
			`' ELSE '`+SourceAppRuntime+`' END,
			u.meter, u.quantity, s.operating_mode, s.control_plane_scope,
			s.runtime_backend, u.started_at, u.ended_at, s.correlation_id, coalesce(u.posting_id::text, ''),
			u.run_id, u.lease_no,
			CASE s.kind WHEN '`+Volume+`' THEN s.id::text ELSE '' END
		FROM `+arms+` AS u JOIN subjects s ON s.id = u.subject_id ORDER BY u.id DESC LIMIT `+limit, u.Args...)
	if err != nil {
		return nil, "", err
	}
	rows, next := page(rows, f.limit(), func(r UsageRecord) string { return r.ID })
	return rows, next, nil
}

// usageQuery builds a query of all tables of raw usage. Each table is read along an index and gives no more rows than a
// page has.
type usageQuery struct {
	db.Where
	// ofSubjects is the parameter with the subjects' ids; empty where the filter names none.
	ofSubjects string
}

// usageQueryOf resolves the filter's org, project and instance to subjects, as the slots' rows have nothing else.
func usageQueryOf(ctx context.Context, tx db.Tx, f Filter) (*usageQuery, error) {
	u := &usageQuery{}
	u.Compare("meter =", f.Meter)
	if !f.From.IsZero() {
		u.And("ended_at > " + u.Arg(f.From))
	}
	u.Between("started_at", time.Time{}, f.To)
	u.Compare("id <", f.Before)
	if f.UsageSource != "" {
		u.And(`subject_id IN (SELECT id FROM subjects WHERE kind = ` + u.Arg(kindOf(f.UsageSource)) + `)`)
	}
	if f.OrgID == "" && f.ProjectID == "" && f.AppInstanceID == "" {
		return u, nil
	}
	subjects, err := subjectsWithRawUsage(ctx, tx, f)
	if err != nil {
		return nil, err
	}
	u.ofSubjects = u.Arg(subjects)
	return u, u.startAt(ctx, tx, len(subjects), f.limit()+1)
}

func kindOf(source string) string {
	switch source {
	case SourceAllocation:
		return Allocation
	case SourceVolume:
		return Volume
	case SourceAttachment:
		return Attachment
	}
	return Member
}

// subjectsWithRawUsage returns the filter's subjects but for those that were settled before the oldest slot began.
func subjectsWithRawUsage(ctx context.Context, tx db.Tx, f Filter) ([]pgtype.UUID, error) {
	var oldest zeronull.Timestamptz
	if err := tx.QueryRow(ctx, `SELECT min(from_at) FROM usage_slots`).Scan(&oldest); err != nil {
		return nil, err
	}
	var w db.Where
	Filter{OrgID: f.OrgID, ProjectID: f.ProjectID, AppInstanceID: f.AppInstanceID}.narrow(&w, "")
	w.And("(settled_at IS NULL OR settled_at >= " + w.Arg(time.Time(oldest)) + ")")
	return db.Select(ctx, tx, pgx.RowTo[pgtype.UUID], `SELECT id FROM subjects`+w.SQL(), w.Args...)
}

// startAt leaves out what is older than the page where many subjects would each give a page of rows: no row of the page
// is older than the last one of as many subjects' newest rows.
func (u *usageQuery) startAt(ctx context.Context, tx db.Tx, subjects, limit int) error {
	if subjects <= limit {
		return nil
	}
	bound := *u
	newest, offset := "("+bound.slots("id", 1, limit)+")", bound.Arg(limit-1)
	ids, err := db.Select(ctx, tx, pgx.RowTo[pgtype.UUID], `SELECT n.id FROM `+newest+` AS n ORDER BY n.id DESC OFFSET `+
		offset+` LIMIT 1`, bound.Args...)
	if err == nil && len(ids) > 0 {
		u.And("id >= " + u.Arg(ids[0]))
	}
	return err
}

// slots reads columns of all slots, the newest rows of each; with subjects, those of the newest rows of each subject.
func (u *usageQuery) slots(columns string, ofSubject, ofSlot int) string {
	most, each := u.Arg(ofSlot), ""
	if u.ofSubjects != "" {
		each = u.Arg(ofSubject)
	}
	return eachSlotTable(func(table string) string {
		if u.ofSubjects == "" {
			return `SELECT ` + columns + ` FROM ` + table + u.SQL() + ` ORDER BY id DESC LIMIT ` + most
		}
		return `SELECT r.* FROM unnest(` + u.ofSubjects + `::uuid[]) AS x(subject)
			CROSS JOIN LATERAL (SELECT ` + columns + ` FROM ` + table +
			u.SQL("subject_id = x.subject") + ` ORDER BY id DESC LIMIT ` + each + `) AS r ORDER BY r.id DESC LIMIT ` + most
	})
}
