package db_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// administer runs statements as an operator does.
func administer(t *testing.T, url string, list ...string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	for _, sql := range list {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
}

// set changes a setting of the whole server and waits until new connections have it.
func set(t *testing.T, s *managed.Server, setting, value string) {
	t.Helper()
	administer(t, s.URL(), `ALTER SYSTEM SET `+setting+` = `+value, `SELECT pg_reload_conf()`)
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), s.URL())
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close(t.Context()) }()
		var now string
		return conn.QueryRow(t.Context(), `SHOW `+setting).Scan(&now) == nil && now == value
	}, time.Minute, 5*time.Millisecond, "%s = %s", setting, value)
}

// synchronous is the setting that the hub's own transactions have.
func synchronous(t *testing.T, url string) string {
	t.Helper()
	d, err := db.Open(t.Context(), url)
	require.NoError(t, err)
	defer d.Close()
	value, err := db.RunTx(t.Context(), d, func(tx db.Tx) (string, error) {
		return db.Value[string](t.Context(), tx, `SELECT current_setting('synchronous_commit')`)
	})
	require.NoError(t, err)
	return value
}

func TestCommitsAreSynchronousWhateverTheServerTheRoleOrTheURLSay(t *testing.T) {
	s := dbtest.Server(t, nil)
	for _, weak := range []string{"off", "local", "remote_write"} {
		set(t, s, "synchronous_commit", weak)
		require.Equal(t, "on", synchronous(t, s.URL()), "the server says %s", weak)
	}
	set(t, s, "synchronous_commit", "remote_apply")
	require.Equal(t, "remote_apply", synchronous(t, s.URL()), "what is stronger stays")
	require.Equal(t, "on", synchronous(t, s.URL()+"&synchronous_commit=off"), "the URL says off")
	administer(t, s.URL(), `ALTER ROLE CURRENT_USER SET synchronous_commit = off`)
	require.Equal(t, "on", synchronous(t, s.URL()), "the role says off")
}

func TestAServerThatMayLoseConfirmedTransactionsIsRefused(t *testing.T) {
	s := dbtest.Server(t, nil)
	for _, setting := range []string{"fsync", "full_page_writes"} {
		set(t, s, setting, "off")
		_, err := db.Open(t.Context(), s.URL())
		require.EqualValues(t, "database_not_durable", fault.As(err).Code)
		require.True(t, fault.Is(err, fault.Unprocessable))
		for _, says := range []string{"setting " + setting + " is off", "postgresql.conf", "reload the server"} {
			require.Contains(t, fault.As(err).Public, says)
		}
		set(t, s, setting, "on")
		d, err := db.Open(t.Context(), s.URL())
		require.NoError(t, err, "the remedy that the message names")
		d.Close()
	}
}

// A host that answers but follows the primary is passed over, in whatever order the URL names the two.
func TestAURLOfSeveralHostsReachesTheOneThatTakesWrites(t *testing.T) {
	writes, reads := dbtest.Server(t, nil), dbtest.Server(t, nil)
	set(t, reads, "default_transaction_read_only", "on")
	for _, order := range [][]*managed.Server{{writes, reads}, {reads, writes}} {
		d, err := db.Open(t.Context(), hosts(order[0], order[1]))
		require.NoError(t, err)
		do(t, d, `CREATE TABLE IF NOT EXISTS kept (n INT8)`)
		d.Close()
	}
}

// hosts is a URL of both servers.
func hosts(a, b *managed.Server) string {
	_, second, _ := strings.Cut(b.URL(), "?host=")
	return a.URL() + "," + second
}
