// Package db is the hub's one way to its database: the pool, serializable transactions with their retry, ids and
// migrations. It speaks to CockroachDB and to PostgreSQL and hides which one it is. It owns no table but goose's own
// two; slices own theirs.
package db

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/notify"
)

// Tx is what a slice may do inside the transaction that a command opened. It cannot commit, roll back or nest.
type Tx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	// QueryAll sends statements in one round trip and calls each with the rows of each, in their order. The rows count
	// during the call. After a statement that fails, the others fail as well.
	QueryAll(ctx context.Context, list []Statement, each func(n int, rows pgx.Rows, err error))
	// Queue sends a statement with the next one or with COMMIT, which saves its round trip. Its result is dropped; where
	// it fails, the statement that it was sent with fails. The returned error is of an earlier statement.
	Queue(ctx context.Context, sql string, args ...any) error
	// Changed names resources that the transaction changes: after the commit, DB.Changes signals their subscribers.
	Changed(resourceIDs ...string)
	// Enqueue names items of a work queue that are due after the commit: DB.OnCommit says who processes them.
	Enqueue(queue string, items ...string)
	// CopyIn sends rows in the form that a COPY … FROM STDIN names; CopyRows writes them.
	CopyIn(ctx context.Context, sql string, rows io.Reader) (pgconn.CommandTag, error)
}

// Engine is the kind of database behind a DB.
type Engine string

// The engines that the hub runs on.
const (
	PostgreSQL  Engine = "postgresql"
	CockroachDB Engine = "cockroachdb"
)

const (
	// defaultMaxConns bounds the pool of one hub process; pool_max_conns in the URL overrides it. A caller that finds the
	// pool empty waits until a connection is free or the caller's context ends.
	defaultMaxConns = 24
	// statementCache is how many prepared statements a connection keeps; the hub has fewer that it repeats. Its memory is
	// taken at once.
	statementCache = 256
	// connectTimeout bounds one attempt to reach the database.
	connectTimeout = 10 * time.Second
	// silence is how long a database may leave what was sent without an acknowledgement of its machine: one that is cut
	// off, or whose power is, would hold its callers for a quarter of an hour, until TCP gives up.
	silence = 10 * time.Second
	// maxQueuedStatements is how many statements wait for the next one at most; then they are sent by themselves.
	maxQueuedStatements = 64
	// idleInTransaction is when the database itself ends a transaction that its client left open.
	idleInTransaction = 60 * time.Second
)

// DB is a pool of connections to one database. It is safe for concurrent use.
type DB struct {
	pool   *pgxpool.Pool
	engine Engine
	// beforeCommit is nil outside tests, which break the connection there.
	beforeCommit func(*pgx.Conn)
	// afterSnapshot is nil outside tests, which empty a table there.
	afterSnapshot func()
	// changes has the subscribers of the resources that transactions change.
	changes notify.Topics
	// queues has who processes the items that transactions enqueue.
	queues workQueues
	// writes has who learns of transactions that write a table.
	writes tableWatches
}

// Changes is signalled with the ids of the resources that a transaction named as changed, once it has committed.
func (d *DB) Changes() *notify.Topics { return &d.changes }

// Open connects and finds out which engine answers. The URL is of libpq's form; pgxpool's own parameters are
// understood. A PostgreSQL that may lose confirmed transactions is refused.
func Open(ctx context.Context, url string) (*DB, error) {
	conf, err := pgxpool.ParseConfig(url)
	if err != nil {
		// The parser's text holds the URL with its password masked; it still belongs to the log, not to a caller.
		return nil, fault.New(fault.Unprocessable, codeDatabaseURLInvalid, "The database URL cannot be read; expected "+
			"postgres://user@host:port/name.", err)
	}
	if !strings.Contains(url, "pool_max_conns") {
		conf.MaxConns = defaultMaxConns
	}
	if !strings.Contains(url, "statement_cache_capacity") {
		conf.ConnConfig.StatementCacheCapacity = statementCache
	}
	if conf.ConnConfig.ConnectTimeout == 0 {
		conf.ConnConfig.ConnectTimeout = connectTimeout
	}
	conf.ConnConfig.DialFunc = dialer().DialContext
	params := conf.ConnConfig.RuntimeParams
	setDefault(params, "application_name", "gpuaas-hub")
	setDefault(params, "timezone", "UTC")
	setDefault(params, "idle_in_transaction_session_timeout", fmt.Sprintf("%d", idleInTransaction.Milliseconds()))
	preferPrimary(conf.ConnConfig)
	conf.AfterConnect = prepareConn

	pool, err := pgxpool.NewWithConfig(ctx, conf)
	if err != nil {
		return nil, unavailable(err)
	}
	d := &DB{pool: pool}
	var version string
	if err := pool.QueryRow(ctx, `SELECT version()`).Scan(&version); err != nil {
		pool.Close()
		return nil, unavailable(err)
	}
	switch {
	case strings.HasPrefix(version, "CockroachDB"):
		d.engine = CockroachDB
	case strings.HasPrefix(version, "PostgreSQL"):
		d.engine = PostgreSQL
		if err := requireDurable(ctx, pool); err != nil {
			pool.Close()
			return nil, err
		}
	default:
		pool.Close()
		return nil, fault.New(fault.Unprocessable, codeDatabaseUnsupported, "The database is neither CockroachDB nor "+
			"PostgreSQL.", fmt.Errorf("version() says %q", version))
	}
	return d, nil
}

// dialer makes connections that end when the other machine is silent. How long a statement takes is not its concern.
func dialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: silence / 2, Interval: silence / 2, Count: 2},
		Control: func(network, _ string, c syscall.RawConn) error {
			if !strings.HasPrefix(network, "tcp") {
				return nil
			}
			var failed error
			err := c.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
			})
			return errors.Join(err, failed)
		},
	}
}

// Engine says which kind of database this is.
func (d *DB) Engine() Engine { return d.engine }

// Close waits for running transactions and closes the pool.
func (d *DB) Close() { d.pool.Close() }

// Ping proves that a statement goes through.
func (d *DB) Ping(ctx context.Context) error {
	if err := d.pool.Ping(ctx); err != nil {
		return unavailable(err)
	}
	return nil
}

// NewID makes a UUIDv7: unique without asking the database, and roughly in order of creation.
func NewID() string {
	id, err := uuid.NewV7()
	if err != nil {
		// Only a kernel without randomness gets here; no id made then would be safe.
		panic(err)
	}
	return id.String()
}

// NewUUID is NewID as it travels to the database.
func NewUUID() pgtype.UUID {
	id, err := uuid.NewV7()
	if err != nil {
		panic(err) // as in NewID
	}
	return pgtype.UUID{Bytes: id, Valid: true}
}

// IsID reports whether s is an id in the canonical form that NewID gives. Check before an id from outside reaches SQL:
// a malformed one is an absent resource, not a database error.
func IsID(s string) bool {
	return len(s) == 36 && uuid.Validate(s) == nil && strings.ToLower(s) == s
}

// IsNoRows reports that QueryRow found nothing.
func IsNoRows(err error) bool { return errors.Is(err, pgx.ErrNoRows) }

// IsUniqueViolation reports that a row already exists. On PostgreSQL the transaction is lost with it: prefer
// INSERT ... ON CONFLICT DO NOTHING where the command wants to go on.
func IsUniqueViolation(err error) bool { return sqlState(err) == "23505" }

// IsRejected reports whether the database refuses the data themselves (SQLSTATE classes 22, 23 and 54): the same again
// fails again.
func IsRejected(err error) bool {
	state := sqlState(err)
	return strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23") || strings.HasPrefix(state, "54")
}

// IsLockTimeout reports whether a statement gave up because others kept a table busy.
func IsLockTimeout(err error) bool { return sqlState(err) == "55P03" }

// IsDatabase reports whether the database itself answered with the error.
func IsDatabase(err error) bool { return sqlState(err) != "" }

func setDefault(m map[string]string, key, value string) {
	if _, ok := m[key]; !ok {
		m[key] = value
	}
}

// prepareConn makes a scanned TIMESTAMPTZ carry UTC instead of the process's zone, so that times compare and print
// alike everywhere, and has PostgreSQL plan each prepared statement once for a connection: the hub's are short, and
// planning them anew for their arguments took a fifth of the database's time. PostgreSQL reads along an index where it
// can: what a sequential scan has read of a small table conflicts with every transaction that writes to it. Where it
// cannot, the plan seems so costly that it would be compiled, which takes longer than it runs. CockroachDB decides all
// that by itself, and has no setting for the durability of a commit.
func prepareConn(ctx context.Context, conn *pgx.Conn) error {
	conn.TypeMap().RegisterType(&pgtype.Type{
		Name: "timestamptz", OID: pgtype.TimestamptzOID,
		Codec: &pgtype.TimestamptzCodec{ScanLocation: time.UTC},
	})
	if conn.PgConn().ParameterStatus("crdb_version") != "" {
		return nil
	}
	_, err := conn.Exec(ctx, `SELECT set_config('plan_cache_mode', 'force_generic_plan', false),
		set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false), `+raiseSynchronousCommit)
	return err
}

func unavailable(cause error) *fault.Error {
	return fault.New(fault.Unavailable, CodeDatabaseUnavailable, "The database does not answer; try again in a moment.",
		cause).RetryAfter(time.Second)
}

func sqlState(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}
