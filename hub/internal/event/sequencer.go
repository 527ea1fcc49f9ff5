package event

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

const (
	// sequencerLease is how long a hub that fell silent blocks the numbering for the others.
	sequencerLease = 15 * time.Second
	// sequencerBatch bounds one transaction of the sequencer.
	sequencerBatch = 500
)

// Sequencer numbers committed events and chains the rows of the audit trail. Any number of hubs may run one; a lease
// row lets one of them work.
type Sequencer struct {
	DB *db.DB
	// Holder is this hub's id.
	Holder string
	Now    func() time.Time

	// observe is what a test puts around each transaction; it may be nil.
	observe func(db.Tx) db.Tx
}

// Number numbers the committed events that have no number yet, and returns how many. It returns 0 while another hub
// holds the lease.
func (s *Sequencer) Number(ctx context.Context) (int, error) {
	return inBatches(ctx, sequencerBatch, s.numberEvents)
}

// Chain links the committed rows of the audit trail that have no place in their chain yet, and returns how many. It
// returns 0 unless this hub has the lease, which Number takes.
func (s *Sequencer) Chain(ctx context.Context) (int, error) {
	return inBatches(ctx, auditBatch, s.chainAudit)
}

// inBatches repeats do until it does less than a full batch, and returns how many it did.
func inBatches(ctx context.Context, size int, do func(context.Context) (int, error)) (total int, err error) {
	for {
		n, err := do(ctx)
		total += n
		if err != nil || n < size {
			return total, err
		}
	}
}

// run runs fn under the lock of the lease row, which fn takes first. It reads rows of all commands, so that in a
// serializable transaction it would make them conflict.
func (s *Sequencer) run(ctx context.Context, fn func(db.Tx) (int, error)) (int, error) {
	return db.LockTx(ctx, s.DB, func(tx db.Tx) (int, error) {
		if s.observe != nil {
			tx = s.observe(tx)
		}
		return fn(tx)
	})
}

func (s *Sequencer) numberEvents(ctx context.Context) (int, error) {
	return s.run(ctx, func(tx db.Tx) (int, error) {
		now := s.Now()
		l, events, err := underLease(ctx, tx, func(tx db.Tx) ([]Event, error) {
			return db.Select(ctx, tx, scanEvent,
				`SELECT `+eventColumns+` FROM events WHERE pos IS NULL ORDER BY id LIMIT $1`, sequencerBatch)
		})
		if err != nil {
			return 0, err
		}
		if l.holder != "" && l.holder != s.Holder && l.until.After(now) {
			return 0, nil
		}
		// An idle hub renews its lease when half of it has passed, not in every pass.
		if len(events) == 0 && l.holder == s.Holder && l.until.Sub(now) > sequencerLease/2 {
			return 0, nil
		}
		if len(events) > 0 {
			tx.Enqueue(NumberedQueue, s.Holder)
			ids, positions := make([]string, len(events)), make([]int64, len(events))
			for i, e := range order(events) {
				l.lastPos++
				ids[i], positions[i] = e.ID, l.lastPos
			}
			if err := tx.Queue(ctx, `
				UPDATE events SET pos = n.pos
				FROM (SELECT unnest($1::UUID[]) AS id, unnest($2::INT8[]) AS pos) AS n
				WHERE events.id = n.id`, ids, positions); err != nil {
				return 0, err
			}
		}
		l.holder, l.until = s.Holder, now.Add(sequencerLease)
		failpoint.Hit("hub/events/numbered")
		return len(events), saveLease(ctx, tx, l)
	})
}

// positionLeap is more than a hub numbers between two backups.
const positionLeap = 1_000_000_000

// Leap leaves places free after the last one: a restored hub must not give a place again that a client has seen taken.
func Leap(ctx context.Context, tx db.Tx) error {
	l, err := selectLease(ctx, tx)
	if err != nil {
		return err
	}
	l.lastPos += positionLeap
	l.holder, l.until = "", time.Time{}
	return saveLease(ctx, tx, l)
}
