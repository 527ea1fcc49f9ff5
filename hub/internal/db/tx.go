package db

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/cockroachdb/cockroach-go/v2/crdb"
	crdbpgx "github.com/cockroachdb/cockroach-go/v2/crdb/crdbpgxv5"
	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const (
	// maxConflicts bounds how often one transaction starts afresh after losing to another; then the caller gets "busy"
	// (503).
	maxConflicts = 50
	// maxLostConnections bounds fresh starts after the connection broke before COMMIT, when nothing can have been written.
	maxLostConnections = 3
	// The pause before the nth fresh start is random below min(backoffCap, backoffBase<<n).
	backoffBase = 2 * time.Millisecond
	backoffCap  = 250 * time.Millisecond
	// diskFullRetry is when to ask again after the database's disk was full.
	diskFullRetry = 30 * time.Second
	// commitTimeout bounds COMMIT and ROLLBACK, which go on when the caller has gone: ending them half-way would leave the
	// outcome unknown.
	commitTimeout = 10 * time.Second
)

// completionUnknown is the SQLSTATE by which CockroachDB says that it does not know how a statement ended.
const completionUnknown = "40003"

// ErrAmbiguousCommit is in the chain of the fault that RunTx returns when the connection broke during COMMIT: the
// transaction may or may not have happened. Doing it again is right only under the same key.
var ErrAmbiguousCommit = errors.New("db: outcome of the commit is unknown")

// RunTx runs fn in one SERIALIZABLE transaction and commits it. It starts afresh when the database asks for it, so fn
// must have no effect outside tx. An error of fn rolls back and is returned as it is.
func RunTx[T any](ctx context.Context, d *DB, fn func(tx Tx) (T, error)) (T, error) {
	return run(ctx, d, pgx.TxOptions{IsoLevel: pgx.Serializable, AccessMode: pgx.ReadWrite}, fn)
}

// WriteTx is RunTx for an fn that returns nothing.
func WriteTx(ctx context.Context, d *DB, fn func(tx Tx) error) error {
	_, err := RunTx(ctx, d, func(tx Tx) (struct{}, error) { return struct{}{}, fn(tx) })
	return err
}

// LockTx runs fn in one READ COMMITTED transaction and commits it; on CockroachDB it is RunTx. fn must lock the rows
// that its decisions rest on (SELECT … FOR UPDATE, in one order) before it reads what they guard. It then waits for
// another transaction where RunTx would start afresh, and conflicts with none that changes other rows.
func LockTx[T any](ctx context.Context, d *DB, fn func(tx Tx) (T, error)) (T, error) {
	opts := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	if d.engine == CockroachDB {
		opts.IsoLevel = pgx.Serializable
	}
	return run(ctx, d, opts, fn)
}

// ReadTx runs fn over one consistent snapshot that fn cannot change. On PostgreSQL it is REPEATABLE READ, so that a
// listing never makes a writer start afresh.
func ReadTx[T any](ctx context.Context, d *DB, fn func(tx Tx) (T, error)) (T, error) {
	opts := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	if d.engine == CockroachDB {
		opts.IsoLevel = pgx.Serializable
	}
	return run(ctx, d, opts, fn)
}

// Query runs fn without a transaction: each statement sees its own moment, and none may write. Use it where one
// statement answers, or several that need not agree: BEGIN and COMMIT would cost as much as they do.
func Query[T any](ctx context.Context, d *DB, fn func(tx Tx) (T, error)) (T, error) {
	return attempt(ctx, false, d.queryOnce, fn)
}

func run[T any](ctx context.Context, d *DB, opts pgx.TxOptions, fn func(tx Tx) (T, error)) (T, error) {
	once := func(ctx context.Context, body func(Tx) error) result { return d.once(ctx, opts, body) }
	if opts.AccessMode != pgx.ReadWrite || !trace.SpanFromContext(ctx).IsRecording() {
		return attempt(ctx, opts.AccessMode == pgx.ReadWrite, once, fn)
	}
	ctx, span := otel.Tracer("gpuaas/db").Start(ctx, "transaction")
	out, err := attempt(ctx, true, once, fn)
	telemetry.EndSpan(span, err)
	return out, err
}

// attempt runs fn until it has come to an end.
func attempt[T any](ctx context.Context, writes bool, once func(context.Context, func(Tx) error) result,
	fn func(tx Tx) (T, error),
) (T, error) {
	var out, zero T
	body := func(tx Tx) (err error) {
		out, err = fn(tx)
		return err
	}
	conflicts, lost := 0, 0
	for {
		res := once(ctx, body)
		switch res.outcome {
		case committed:
			return out, nil
		case failed:
			return zero, orDiskFull(res.err)
		case unknown:
			if writes {
				return zero, ambiguous(res.err)
			}
			fallthrough
		case lostConnection:
			if lost++; lost > maxLostConnections {
				return zero, unavailable(res.err)
			}
		case conflict:
			if conflicts++; conflicts > maxConflicts {
				return zero, busy(res.err)
			}
		}
		if err := pause(ctx, conflicts+lost); err != nil {
			return zero, Cancelled(err)
		}
	}
}

// outcome is how one attempt ended.
type outcome uint8

const (
	committed outcome = iota
	// failed: rolled back for good.
	failed
	// conflict: rolled back; a fresh start may succeed.
	conflict
	// lostConnection: broken before COMMIT was sent; nothing was written.
	lostConnection
	// unknown: broken after COMMIT was sent.
	unknown
)

type result struct {
	outcome outcome
	err     error
}

func (d *DB) once(ctx context.Context, opts pgx.TxOptions, body func(Tx) error) result {
	if d.engine == CockroachDB {
		return d.onceCockroach(ctx, opts, body)
	}
	return d.oncePostgres(ctx, opts, body)
}

// oncePostgres never hands COMMIT to a library: crdbpgx ignores its error, and on PostgreSQL that is where a
// serialization failure shows, so that a write would be lost in silence. BEGIN goes out with the first statement, and
// COMMIT takes along what was still to be sent.
func (d *DB) oncePostgres(ctx context.Context, opts pgx.TxOptions, body func(Tx) error) result {
	lent, err := d.pool.Acquire(ctx)
	if err != nil {
		return beginFailed(ctx, err)
	}
	conn := lent.Conn()
	open := true
	defer func() {
		if open {
			rollback(ctx, conn)
		}
		lent.Release()
	}()

	w := &retryingTx{on: conn, conn: conn, writes: &d.writes}
	begin := &pgx.Batch{}
	begin.Queue(`BEGIN ISOLATION LEVEL ` + string(opts.IsoLevel) + ` ` + string(opts.AccessMode))
	w.queued = begin
	err = body(w)
	// The watched errors go first: a slice that turned a serialization failure into "not found" must not hide it.
	if w.conflict != nil {
		return result{conflict, w.conflict}
	}
	if err == nil {
		err = w.dead
	}
	if err != nil {
		switch {
		case isConflict(err):
			return result{conflict, err}
		case conn.IsClosed() && ctx.Err() == nil:
			return result{lostConnection, err}
		}
		return result{failed, err}
	}
	if w.queued == begin && begin.Len() == 1 {
		return result{outcome: committed} // nothing was asked of the database
	}

	if d.beforeCommit != nil {
		d.beforeCommit(conn)
	}
	if opts.AccessMode == pgx.ReadWrite {
		failpoint.Hit("hub/db/committing")
	}
	open = false
	commitCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	done := committing(commit(commitCtx, w))
	if done.outcome != committed {
		rollback(ctx, conn)
	}
	if opts.AccessMode == pgx.ReadWrite {
		failpoint.Hit("hub/db/committed")
	}
	d.announce(done.outcome, w)
	return done
}

func (d *DB) onceCockroach(ctx context.Context, opts pgx.TxOptions, body func(Tx) error) result {
	var w *retryingTx
	err := crdbpgx.ExecuteTx(crdb.WithMaxRetries(ctx, maxConflicts), d.pool, opts, func(tx pgx.Tx) error {
		w = &retryingTx{on: tx, conn: tx.Conn(), writes: &d.writes}
		err := body(w)
		if err == nil {
			err = w.flushed(ctx)
		}
		if w.conflict != nil {
			return w.conflict
		}
		return err
	})
	var (
		doubtful *crdb.AmbiguousCommitError
		tooMany  *crdb.MaxRetriesExceededError
	)
	switch {
	case err == nil:
		d.announce(committed, w)
		return result{outcome: committed}
	case errors.As(err, &doubtful):
		done := committing(doubtful.Unwrap())
		d.announce(done.outcome, w)
		return done
	case errors.As(err, &tooMany):
		return result{failed, busy(err)}
	case isConflict(err):
		return result{conflict, err}
	case ctx.Err() == nil && (isConnectionLoss(err) || sqlState(err) == completionUnknown):
		// Before the commit was sent nothing is in doubt: the transaction has ended without it.
		return result{lostConnection, err}
	}
	return result{failed, err}
}

func (d *DB) queryOnce(ctx context.Context, body func(Tx) error) result {
	err := body(queryOnly{d.pool})
	switch {
	case err == nil:
		return result{outcome: committed}
	case ctx.Err() != nil:
		return beginFailed(ctx, err)
	case isConflict(err):
		return result{conflict, err}
	case isConnectionLoss(err):
		return result{lostConnection, err}
	}
	return result{failed, err}
}

// committing judges what COMMIT answered.
func committing(err error) result {
	switch state := sqlState(err); {
	case err == nil:
		return result{outcome: committed}
	case isConflict(err):
		return result{conflict, err}
	case errors.Is(err, pgx.ErrTxCommitRollback):
		// A statement failed, fn went on as if it had not, and the database rolled back.
		return result{failed, err}
	case state != "" && state != completionUnknown && !strings.HasPrefix(state, "57P") && !strings.HasPrefix(state, "08"):
		return result{failed, err}
	}
	// No answer, 40003 (CockroachDB: maybe committed), or a shutdown that may have come just after the commit.
	return result{unknown, err}
}

// Cancelled is the fault of a request that ended, by its deadline or its caller, before it could be done.
func Cancelled(cause error) error {
	return fault.New(fault.Unavailable, CodeCancelled, "The request ended before it could be done.", cause)
}

func beginFailed(ctx context.Context, err error) result {
	if ctx.Err() != nil {
		return result{failed, Cancelled(err)}
	}
	return result{lostConnection, err}
}

func commit(ctx context.Context, w *retryingTx) error {
	tag, err := w.Exec(ctx, `COMMIT`)
	if err == nil && tag.String() == "ROLLBACK" {
		return pgx.ErrTxCommitRollback
	}
	return err
}

// rollback ends a transaction that is open. A connection on which that fails is broken and not used again; the database
// rolls back by itself.
func rollback(ctx context.Context, conn *pgx.Conn) {
	const idle = 'I'
	if conn.IsClosed() || !conn.PgConn().IsBusy() && conn.PgConn().TxStatus() == idle {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	if _, err := conn.Exec(ctx, `ROLLBACK`); err != nil {
		_ = conn.Close(ctx)
	}
}

func isConflict(err error) bool {
	state := sqlState(err)
	return state == "40001" || state == "40P01"
}

func isConnectionLoss(err error) bool {
	state := sqlState(err)
	if state != "" {
		return strings.HasPrefix(state, "57P") || strings.HasPrefix(state, "08")
	}
	var known *fault.Error
	return err != nil && !errors.As(err, &known) && errIsNetwork(err)
}

func ambiguous(cause error) *fault.Error {
	return fault.New(fault.Unavailable, codeCommitAmbiguous,
		"The database broke off while saving; it is not known whether the change was made. Send the same request again "+
			"with the same X-Idempotency-Key.",
		errors.Join(ErrAmbiguousCommit, cause)).RetryAfter(time.Second)
}

// orDiskFull makes a full disk of the database an error that the caller may retry later.
func orDiskFull(err error) error {
	if sqlState(err) != "53100" {
		return err
	}
	return fault.New(fault.Unavailable, codeDatabaseDiskFull,
		"The hub's database has no disk space left; nothing was changed. Try again when the hub's operator has freed some.",
		err).RetryAfter(diskFullRetry)
}

func busy(cause error) *fault.Error {
	return fault.New(fault.Unavailable, CodeDatabaseBusy, "Too many changes at the same place at once; try again in a "+
		"moment.", cause).RetryAfter(time.Second)
}

func pause(ctx context.Context, n int) error {
	limit := min(backoffCap, backoffBase<<min(n, 10))
	t := time.NewTimer(rand.N(limit)) //nolint:gosec // spreads retries, keeps no secret
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
