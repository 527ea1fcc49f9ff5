// Package ledger owns what is billed and what it costs: subjects, usage, accruals, prices, wallets, holds, leases and
// the double-entry journal. It does not measure (a node does, for members), sign leases (dispatch), place workloads, or
// decide who may see a bill (iam).
//
// Invariants, each with a test: the legs of every posting sum to zero per currency; journal, usage, suspense and price
// rows never change; a posting's key is unique; a wallet moves only when a hold opens, grows, shrinks or closes and
// when credit is granted; what is collected never exceeds the hold, the rest is written off in the open; a segment is
// posted once, by its place in the chain of its store, and a stretch of a subject's time is charged once, whatever the
// node calls it. Usage draws on its hold when it arrives and is in the journal within a posting interval: a hold's
// account, less its pending postings, is the hold.
package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Kinds of subjects.
const (
	// Member is the part of an app instance on one allocation; its node measures it, within leases.
	Member = "member"
	// Allocation is held capacity; the hub measures it, from claim to release.
	Allocation = "allocation"
	// Volume is a volume of a project with its snapshots; the hub measures it, from its first report to its deletion.
	Volume = "volume"
	// Attachment is a project's use of another project's app instance; the hub measures it, until it is detached.
	Attachment = "attachment"
)

// The meters that the hub itself measures, in microseconds and byte-seconds; a node's meters are in protocol.
const (
	MeterAllocationSeconds = "allocation_seconds"
	MeterVolumeByteSeconds = "volume_byte_seconds"
	MeterAttachmentSeconds = "attachment_seconds"
)

// Where a usage record comes from.
const (
	SourceAllocation = "allocation"
	SourceAppRuntime = "app_runtime"
	SourceVolume     = "volume"
	SourceAttachment = "attachment"
)

// Subject is what is billed. All of it is frozen when it is made.
type Subject struct {
	// ID is the member's, the allocation's or the volume's.
	ID                string
	Kind              string
	OrgID             string
	ProjectID         string
	AppInstanceID     string
	AppSlug           string
	AllocationID      string
	NodeID            string
	SKU               string
	OperatingMode     string
	ControlPlaneScope string
	RuntimeBackend    string
	CorrelationID     string
	// CPUMillis and MemoryBytes are a member's limits: they bound what can be measured, and size the hold where
	// processor time or memory has a price. Zero means unknown: nothing is held for it then.
	CPUMillis   int64
	MemoryBytes int64
	// Accelerators are those that the member has, a slice of a GPU is one; without any it is charged for none.
	Accelerators int64
	// AcceleratorSlices is in how many slices the GPU is shared of which the member has one; 0: none of its accelerators
	// is a slice.
	AcceleratorSlices int64
	// VolumeBytes is what a volume takes with its snapshots.
	VolumeBytes int64
	OpenedAt    time.Time
}

// SetAccelerators says which accelerators a member has.
func (s *Subject) SetAccelerators(ids []string) {
	s.Accelerators, s.AcceleratorSlices = int64(len(ids)), 0
	for _, id := range ids {
		_, _, slices := protocol.SliceOf(id)
		s.AcceleratorSlices = int64(slices)
	}
}

// subject is the row, with how far it has come.
type subject struct {
	Subject
	currency     string
	leaseNo      int64
	accruedUntil time.Time
	closedAt     time.Time
	settledAt    time.Time
	final        billing.Final
	// failures is how often in a row a periodic pass could not process it.
	failures int64
	// idle is when its node last said that nothing of it runs, from the first such report to the last; zero while
	// something runs.
	idle rating.Interval
	// binaryID is ID, kept once it was read.
	binaryID pgtype.UUID
}

func (s *subject) uuid() pgtype.UUID {
	if !s.binaryID.Valid {
		s.binaryID = id(s.ID)
	}
	return s.binaryID
}

// member is what bounds the bill of a member.
func (s subject) member() billing.Member {
	return billing.Member{
		ID: s.ID, NodeID: s.NodeID, CPUMillis: s.CPUMillis, MemoryBytes: s.MemoryBytes,
		Accelerators: s.Accelerators, OpenedAt: s.OpenedAt, ClosedAt: s.closedAt, Idle: s.idle,
	}
}

// OpenSubject starts billing. For an allocation or an attachment that has a price it places the first hold, and fails
// with insufficient_funds when the wallet does not cover it; for a volume, which exists by then, it holds what there
// is. Opening the same subject again changes nothing.
func OpenSubject(ctx context.Context, tx db.Tx, s Subject) error {
	if !slices.Contains([]string{Member, Allocation, Volume, Attachment}, s.Kind) {
		return fault.New(fault.Internal, codeSubjectKind, "A subject is a member, an allocation, a volume or an attachment.",
			nil)
	}
	s.OpenedAt = s.OpenedAt.UTC().Truncate(time.Microsecond)
	if s.Kind == Allocation && s.AllocationID == "" {
		s.AllocationID = s.ID
	}
	made, err := insertSubject(ctx, tx, s)
	if err != nil || !made || s.Kind == Member {
		return err
	}
	return openAllocation(ctx, tx, subject{Subject: s, accruedUntil: s.OpenedAt})
}

// CloseSubject ends the claim at a moment: later usage goes to suspense. The rest of the hold goes back to the wallet
// at once for an allocation and for a member that never had a lease. Any other member's waits for the node's final
// record, which may be in its spool still, or for StaleAfter. Closing again changes nothing.
func CloseSubject(ctx context.Context, tx db.Tx, subjectID string, at, now time.Time) error {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil {
		return err
	}
	if !s.closedAt.IsZero() {
		return nil
	}
	s.closedAt = billing.CloseAt(s.OpenedAt, at, now)
	if s.Kind != Member {
		if _, err = accrueAllocation(ctx, tx, &s, s.closedAt, 0, now); err != nil {
			return err
		}
	}
	if err := tx.Queue(ctx, `UPDATE subjects SET closed_at = $2 WHERE id = $1`, s.ID, s.closedAt); err != nil {
		return err
	}
	if s.Kind != Member || s.leaseNo == 0 {
		return settle(ctx, tx, s, now)
	}
	return settleFinal(ctx, tx, s, now)
}

// SettleSubject gives the rest of a closed member's hold back although no final record has come. It is for a member of
// which the hub knows that its node never had it, or can never speak of it again; usage that comes all the same is
// written off.
func SettleSubject(ctx context.Context, tx db.Tx, subjectID string, now time.Time) error {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil {
		return err
	}
	if s.closedAt.IsZero() {
		return fault.New(fault.Conflict, codeSubjectOpen, "The subject is still open; close it first.", nil)
	}
	return settle(ctx, tx, s, now)
}

// Owing is how many members of a node have a bill that is not final: their claim is open, or their last record is not
// here.
func Owing(ctx context.Context, tx db.Tx, nodeID string) (n int, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM subjects WHERE node_id = $1 AND kind = 'member' AND settled_at IS NULL`,
		nodeID).Scan(&n)
	return n, err
}

// UnsettledMembers lists closed members that SettleDue may settle and that are not set aside, in order of their ids,
// from the one after a given id on: those whose final record is known, and those whose node has said nothing final for
// StaleAfter.
func UnsettledMembers(ctx context.Context, tx db.Tx, after string, now time.Time, limit int) ([]Row, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Row],
		`SELECT s.id, s.org_id, s.node_id FROM subjects s
		LEFT JOIN leases l ON l.node_id = s.node_id AND l.subject_id = s.id AND l.lease_no = s.lease_no
		WHERE s.settled_at IS NULL AND s.closed_at IS NOT NULL
			AND (s.final_incarnation IS NOT NULL OR s.closed_at < $1 AND l.expires_at < $1)
			AND (s.retry_at IS NULL OR s.retry_at <= $2) AND s.id > $3 ORDER BY s.id LIMIT $4`,
		now.Add(-billing.StaleAfter), now, orFirst(after), limit)
}

// FinalMembers lists those of the closed, unsettled members of nodes whose final record is known, in order of their
// ids.
func FinalMembers(ctx context.Context, tx db.Tx, nodeIDs []string, now time.Time) ([]Row, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Row],
		`SELECT id, org_id, node_id FROM subjects WHERE node_id = ANY($1::uuid[]) AND settled_at IS NULL
			AND closed_at IS NOT NULL AND final_incarnation IS NOT NULL AND (retry_at IS NULL OR retry_at <= $2)
		ORDER BY id`, nodeIDs, now)
}

// SettleDue gives the rest of a closed member's hold back once its node's records are here up to the final one, or its
// node has said nothing final for StaleAfter. Before that it changes nothing. It reports whether the member had been
// set aside.
func SettleDue(ctx context.Context, tx db.Tx, subjectID string, now time.Time) (wasAside bool, err error) {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil || s.closedAt.IsZero() {
		return false, err
	}
	leased, err := LeasedUntil(ctx, tx, s.ID)
	if err != nil {
		return false, err
	}
	if billing.Stale(s.closedAt, leased, now) {
		return s.failures > 0, settle(ctx, tx, s, now)
	}
	return s.failures > 0, settleFinal(ctx, tx, s, now)
}

// SetAside keeps a subject that cannot be processed out of the periodic passes for a while, so that it is not taken
// first again.
func SetAside(ctx context.Context, tx db.Tx, subjectID string, now time.Time) error {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil {
		return err
	}
	return setAside(ctx, tx, subjectID, s.failures+1, now.Add(billing.RetryAfter(s.failures+1)))
}

// settleFinal settles a closed member once its node's records are here up to the final one.
func settleFinal(ctx context.Context, tx db.Tx, s subject, now time.Time) error {
	if s.closedAt.IsZero() || s.final.Incarnation == "" {
		return nil
	}
	of := billing.Store{NodeID: s.NodeID, Incarnation: s.final.Incarnation}
	posted, err := Watermarks(ctx, tx, of)
	if err != nil || !s.final.Posted(int64(posted[of].LastRecord)) {
		return err
	}
	return settle(ctx, tx, s, now)
}

// settle posts what the journal does not have yet and gives what is left of the hold back to the wallet.
func settle(ctx context.Context, tx db.Tx, s subject, now time.Time) error {
	if !s.settledAt.IsZero() {
		return nil
	}
	if err := tx.Queue(ctx, `UPDATE subjects SET settled_at = $2, failures = 0, retry_at = NULL WHERE id = $1`, s.ID,
		now); err != nil {
		return err
	}
	if err := postPending(ctx, tx, s, now); err != nil {
		return err
	}
	h, ok, err := holdOf(ctx, tx, s)
	if err != nil || !ok || h.Balance() == 0 {
		return err
	}
	return release(ctx, tx, s, h, h.Balance(), HoldClosed, "hold_closed:"+h.id, now)
}

// release moves nanos from a subject's hold back to its org's wallet.
func release(ctx context.Context, tx db.Tx, s subject, h hold, nanos int64, kind, key string, now time.Time) error {
	h.Released += nanos
	if err := updateHold(ctx, tx, h); err != nil {
		return err
	}
	if err := moveWallet(ctx, tx, s.OrgID, h.currency, nanos, now); err != nil {
		return err
	}
	p, err := NewPosting(key, billing.Transfer(billing.HoldAccount(h.id), billing.WalletAccount(s.OrgID), h.currency,
		nanos)...)
	if err != nil {
		return err
	}
	return insertPostings(ctx, tx, p.of(kind, s, now))
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
