package wire

import (
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
)

// What CockroachDB answers, by the documentation of version 25.4:
//
//   - https://www.cockroachlabs.com/docs/v25.4/transaction-retry-error-reference: SQLSTATE 40001, the texts, the hint
//   - https://www.cockroachlabs.com/docs/v25.4/common-errors#result-is-ambiguous: SQLSTATE 40003
//   - https://www.cockroachlabs.com/docs/v25.4/advanced-client-side-transaction-retries: the savepoint
//     cockroach_restart. RELEASE commits, ROLLBACK TO starts the transaction anew with another snapshot, and the COMMIT
//     after RELEASE does nothing.
const (
	cockroachVersion = "CockroachDB CCL v25.4.0 (x86_64-pc-linux-gnu)"
	// serverVersion is the version of PostgreSQL that CockroachDB names to clients.
	serverVersion  = "13.0.0"
	releaseRestart = "RELEASE SAVEPOINT cockroach_restart"
	toRestart      = "ROLLBACK TO SAVEPOINT cockroach_restart"
	restarts       = "restart transaction: TransactionRetryWithProtoRefreshError: "
	reference      = "See: https://www.cockroachlabs.com/docs/v25.4/transaction-retry-error-reference.html#"
)

// Cockroach has the proxy answer as CockroachDB. A conflict that PostgreSQL finds becomes CockroachDB's error.
func Cockroach() Option { return func(p *Proxy) { p.cockroach = true } }

// RetrySerializable is the error of a transaction that lost to another.
func RetrySerializable() *pgproto3.ErrorResponse {
	return retry(restarts+"TransactionRetryError: retry txn (RETRY_SERIALIZABLE - failed preemptive refresh due to "+
		`encountered recently written committed value /Table/106/1/1/0 @1700512205.521833000,2): "sql txn" `+meta(),
		"retry_serializable")
}

// WriteTooOld is the error of a write over a later one; the documentation shortens its text, which is as in
// https://github.com/zitadel/zitadel/issues/7957.
func WriteTooOld() *pgproto3.ErrorResponse {
	return retry(restarts+"WriteTooOldError: write for key /Table/106/1/1/0 at timestamp 1715787882.440995219,0 too old; "+
		`must write at or above 1715787882.509992034,1: "sql txn" `+meta(), "retry_write_too_old")
}

// ReadRestart is the error of a read that met a write of which it cannot know whether it came first.
func ReadRestart() *pgproto3.ErrorResponse {
	return retry(restarts+"ReadWithinUncertaintyIntervalError: read at time 1591009232.376925064,0 encountered previous "+
		"write with future timestamp 1591009232.493830170,0 within uncertainty interval `t <= 1591009232.587671686,0`; "+
		"observed timestamps: [{1 1591009232.587671686,0} {5 1591009232.376925064,0}] "+meta(),
		"readwithinuncertaintyintervalerror")
}

// Aborted is the error of a transaction that another one has pushed away.
func Aborted() *pgproto3.ErrorResponse {
	return retry(restarts+`TransactionAbortedError(ABORT_REASON_ABORTED_RECORD_FOUND): "sql txn" `+meta(),
		"abort_reason_aborted_record_found")
}

// Ambiguous is the answer to a commit whose outcome the cluster itself does not know.
func Ambiguous() *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40003",
		Message: "result is ambiguous: error=rpc error: code = Unavailable desc = error reading from server: EOF [propagate]",
	}
}

func retry(message, hint string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40001", Message: message, Hint: reference + hint,
	}
}

func meta() string {
	return "meta={id=07d42834 key=/Table/106/1/1/0 iso=Serializable pri=0.01253025 epo=0 ts=1700512229.378453000,2 " +
		"min=1700512130.342117000,0 seq=2} lock=true stat=PENDING rts=1700512130.342117000,0 wto=false " +
		"gul=1700512130.842117000,0"
}

// asCockroach makes an error of PostgreSQL's that of CockroachDB, which knows no deadlock: it aborts a transaction.
func asCockroach(e *pgproto3.ErrorResponse) {
	switch e.Code {
	case "40001":
		*e = *RetrySerializable()
	case "40P01":
		*e = *Aborted()
	}
}

// translation is how a statement of CockroachDB's is executed by PostgreSQL.
type translation uint8

const (
	asItIs translation = iota
	// commitNow: RELEASE commits; the transaction then waits for a COMMIT that does nothing.
	commitNow
	// startAnew: ROLLBACK TO gives up the transaction and starts another.
	startAnew
)

// translate returns what the server executes for a statement.
func (l *link) translate(sql string) string {
	if !l.proxy.cockroach {
		return sql
	}
	if strings.HasPrefix(strings.ToLower(sql), "begin") {
		l.begin = sql
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = false
	switch sql {
	case releaseRestart:
		l.pending = commitNow
		return "COMMIT"
	case toRestart:
		l.pending = startAnew
		return "ROLLBACK; " + l.begin + "; SAVEPOINT cockroach_restart"
	}
	return sql
}

// completed is the hub's view of a statement's end.
func (l *link) completed(m *pgproto3.CommandComplete) []pgproto3.BackendMessage {
	switch tag := string(m.CommandTag); {
	case l.pending == commitNow && tag == "COMMIT":
		m.CommandTag = []byte("RELEASE")
	case l.pending == commitNow && tag == "ROLLBACK":
		// A statement had failed, and the hub released the savepoint nevertheless.
		l.failed = true
		return []pgproto3.BackendMessage{&pgproto3.ErrorResponse{
			Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "25P02",
			Message: "current transaction is aborted, commands ignored until end of transaction block",
		}}
	case l.pending == startAnew && tag != "ROLLBACK":
		return nil
	}
	return []pgproto3.BackendMessage{m}
}

// ready is the hub's view of the transaction's state: after RELEASE it is open until COMMIT, and after a conflict until
// ROLLBACK, where PostgreSQL has ended it.
func (l *link) ready(m *pgproto3.ReadyForQuery) []pgproto3.BackendMessage {
	list := []pgproto3.BackendMessage{m}
	if !l.proxy.cockroach {
		return list
	}
	if !l.started {
		l.started = true
		return []pgproto3.BackendMessage{
			&pgproto3.ParameterStatus{Name: "crdb_version", Value: cockroachVersion},
			&pgproto3.ParameterStatus{Name: "server_version", Value: serverVersion}, m,
		}
	}
	if l.pending == commitNow {
		m.TxStatus = 'T'
		if l.failed {
			m.TxStatus = 'E'
		}
	}
	l.pending = asItIs
	return list
}
