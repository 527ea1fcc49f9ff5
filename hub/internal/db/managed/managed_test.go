package managed_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// asHub makes the test binary a hub of its own, for the tests that kill one.
const asHub = "GPUAAS_TEST_AS_HUB"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asHub); dir != "" {
		s, err := managed.Start(context.Background(), managed.Config{Dir: dir, Settings: fast()})
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		fmt.Println("ready", s.PID())
		select {}
	}
	os.Exit(m.Run())
}

func fast() map[string]string {
	return map[string]string{"fsync": "off", "shared_buffers": "16MB"}
}

// directory is under /tmp itself: what the testing package makes may be closed to the database's user.
func directory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "gpuaas-managed-") //nolint:usetesting // see above
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func start(t *testing.T, dir string) *managed.Server {
	t.Helper()
	s, err := managed.Start(t.Context(), managed.Config{Dir: dir, Settings: fast()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func query[T any](t *testing.T, s *managed.Server, sql string) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	rows, err := conn.Query(t.Context(), sql)
	require.NoError(t, err)
	out, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(t, err)
	if len(out) == 0 {
		var zero T
		return zero
	}
	return out[0]
}

func alive(pid int) bool {
	_, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	return err == nil
}

func TestDataOutlivesTheServer(t *testing.T) {
	dir := directory(t)
	s := start(t, dir)
	query[int](t, s, `CREATE TABLE kept (n INT8)`)
	query[int](t, s, `INSERT INTO kept VALUES (42)`)
	pid := s.PID()
	require.NoError(t, s.Close())
	require.NoError(t, s.Close(), "closing twice is no error")
	require.False(t, alive(pid))

	engine, err := os.ReadFile(filepath.Join(dir, "engine"))
	require.NoError(t, err)
	require.Regexp(t, `^postgresql [0-9]+\n$`, string(engine))
	require.Equal(t, 42, query[int](t, start(t, dir), `SELECT n FROM kept`))
}

func TestServerHearsNothingButItsSocket(t *testing.T) {
	s := start(t, directory(t))
	require.Empty(t, query[string](t, s, `SHOW listen_addresses`))
	require.Equal(t, "0700", query[string](t, s, `SHOW unix_socket_permissions`))
	require.Equal(t, "gpuaas", query[string](t, s, `SELECT current_user::TEXT`))
	if os.Geteuid() == 0 {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID()))
		require.NoError(t, err)
		require.NotRegexp(t, `(?m)^Uid:\t0\t`, string(status), "PostgreSQL does not run as root")
	}
}

func TestCrashedServerIsStartedAgain(t *testing.T) {
	s := start(t, directory(t))
	query[int](t, s, `CREATE TABLE kept (n INT8)`)
	first := s.PID()
	require.NoError(t, unix.Kill(first, unix.SIGKILL))
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), s.URL())
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close(t.Context()) }()
		_, err = conn.Exec(t.Context(), `INSERT INTO kept VALUES (1)`)
		return err == nil
	}, time.Minute, 20*time.Millisecond, "answers again")
	require.NotEqual(t, first, s.PID())
}

func TestServerDiesWithTheHubAndTheNextHubGoesOn(t *testing.T) {
	dir := directory(t)
	hub := exec.Command(os.Args[0])
	hub.Env = append(os.Environ(), asHub+"="+dir)
	hub.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := hub.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, hub.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	var pid int
	_, err = fmt.Sscanf(line, "ready %d", &pid)
	require.NoError(t, err, line)
	require.True(t, alive(pid))

	_, err = managed.Start(t.Context(), managed.Config{Dir: dir, Settings: fast()})
	require.EqualValues(t, "database_in_use", fault.As(err).Code)

	require.NoError(t, hub.Process.Kill())
	_ = hub.Wait()
	s := start(t, dir) // waits for the old server where it has not ended yet
	require.False(t, alive(pid))
	require.Equal(t, 1, query[int](t, s, `SELECT 1`))
}

func TestEngineNeverChangesByItself(t *testing.T) {
	for content, code := range map[string]string{
		"postgresql 9\n":   "database_binaries_missing",
		"cockroachdb 25\n": "database_engine",
		"nonsense":         "database_engine",
	} {
		dir := directory(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "engine"), []byte(content), 0o600))
		_, err := managed.Start(t.Context(), managed.Config{Dir: dir})
		require.EqualValues(t, code, fault.As(err).Code, content)
		require.True(t, fault.IsPermanent(err))
	}
}

func TestDirectoryCutShortIsMadeAnew(t *testing.T) {
	dir := directory(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "data", "base"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "data", "PG_VERSION"), []byte("15\n"), 0o600))
	require.Equal(t, 1, query[int](t, start(t, dir), `SELECT 1`))
}

func TestWhatIsMissingIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		conf managed.Config
		code string
		says string
	}{
		"no programs": {managed.Config{Dir: directory(t), BinDir: t.TempDir()}, "database_binaries_missing", "initdb"},
		"long path": {
			managed.Config{Dir: directory(t) + "/" + strings.Repeat("x", 100)},
			"database_path_too_long",
			"shorter",
		},
		"no such user": {managed.Config{Dir: directory(t), User: "nobody-of-this-name"}, "database_user", map[bool]string{
			true: "useradd", false: "Only root",
		}[os.Geteuid() == 0]},
	} {
		_, err := managed.Start(t.Context(), c.conf)
		require.EqualValues(t, c.code, fault.As(err).Code, name)
		require.Contains(t, fault.As(err).Public, c.says, name)
	}
}

func TestDirectoryClosedToTheServersUserIsSaid(t *testing.T) {
	skip.Root(t, "servers of another user")
	closed := directory(t)
	require.NoError(t, os.Chmod(closed, 0o700))
	_, err := managed.Start(t.Context(), managed.Config{Dir: filepath.Join(closed, "postgres")})
	require.EqualValues(t, "database_directory_closed", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "chmod o+x "+closed)
}
