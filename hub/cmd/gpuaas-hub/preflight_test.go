package main

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestStartSaysWhatIsWrongAndWhatToDo(t *testing.T) {
	h := newHome(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = tcp.Close() }()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = udp.Close() }()
	free := []string{"--listen", "127.0.0.1:0", "--session-listen", "127.0.0.1:0"}
	for name, c := range map[string]struct {
		args       []string
		code, says string
	}{
		"TCP port taken": {[]string{
			"--data-dir", h.data, "--listen", tcp.Addr().String(), "--session-listen",
			"127.0.0.1:0",
		}, "listen_failed", "--listen"},
		"UDP port taken": {[]string{
			"--data-dir", h.data, "--listen", "127.0.0.1:0", "--session-listen",
			udp.LocalAddr().String(),
		}, "listen_failed", "--session-listen"},
		"foreign address": {
			[]string{"--data-dir", h.data, "--listen", "192.0.2.1:8443", "--session-listen", "127.0.0.1:0"},
			"listen_failed", "--advertise-api",
		},
		"no data dir": {
			append([]string{"--data-dir", filepath.Join(h.dir, "none")}, free...), "data_dir_missing",
			"gpuaas-hub init",
		},
		"no PostgreSQL": {append([]string{"--data-dir", h.data, "--postgres-bin-dir", filepath.Join(h.dir, "none")},
			free...), "", "initdb"},
		"no database file": {append([]string{"--data-dir", h.data, "--database-url-file", filepath.Join(h.dir, "none")},
			free...), "database_url_unreadable", "cannot be read"},
		"bad address": {[]string{"--data-dir", h.data, "--listen", "8443"}, "flag_invalid", "HOST:PORT"},
		"open metrics": {
			append([]string{"--data-dir", h.data, "--metrics-listen", "0.0.0.0:9"}, free...), "flag_invalid",
			"loopback",
		},
		"long lease": {
			append([]string{"--data-dir", h.data, "--lease-duration", "1000h"}, free...), "flag_invalid",
			"168h",
		},
		"short tokens": {
			append([]string{"--data-dir", h.data, "--auth-service-account-token-ttl-seconds", "59"}, free...), "flag_invalid",
			"60 and 3600",
		},
		"long tokens": {
			append([]string{"--data-dir", h.data, "--auth-service-account-token-ttl-seconds", "3601"}, free...), "flag_invalid",
			"60 and 3600",
		},
		"log level": {
			append([]string{"--data-dir", h.data, "--log-level", "loud"}, free...), "log_flags_invalid",
			"--log-level",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := cli(t, c.args...)
			require.Error(t, err)
			f := fault.As(err)
			if c.code != "" {
				require.EqualValues(t, c.code, f.Code, "%v", err)
			}
			require.Contains(t, f.Public, c.says)
		})
	}
}

func TestRootKeyInsideStopsTheStart(t *testing.T) {
	h := newHome(t)
	data, err := os.ReadFile(filepath.Join(h.keys, trust.RootKeyFile))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(h.data, "copy"), data, 0o600))
	_, err = cli(t, "serve", "--data-dir", h.data, "--listen", "127.0.0.1:0", "--session-listen", "127.0.0.1:0")
	require.EqualValues(t, "root_key_in_data_dir", fault.As(err).Code)
}

func TestTwoHubsDoNotShareADataDirectory(t *testing.T) {
	dir := t.TempDir()
	lock, err := checkDataDir(dir)
	require.NoError(t, err)
	_, err = checkDataDir(dir)
	require.EqualValues(t, "data_dir_in_use", fault.As(err).Code)
	require.NoError(t, lock.Close())
	lock, err = checkDataDir(dir)
	require.NoError(t, err)
	require.NoError(t, lock.Close())
}

func TestSecondHubOnTheSameDatabaseRefusesToStart(t *testing.T) {
	first, second := newHome(t), newHome(t)
	r := start(t, first)
	defer r.end(t)
	url, ok := managed.Running(filepath.Join(first.data, "postgres"))
	require.True(t, ok)
	file := filepath.Join(second.dir, "database-url")
	require.NoError(t, os.WriteFile(file, []byte(url), 0o600))
	_, err := cli(t, "serve", "--data-dir", second.data, "--database-url-file", file, "--listen", "127.0.0.1:0",
		"--session-listen", "127.0.0.1:0")
	require.Equal(t, db.CodeLeaseHeld, fault.As(err).Code)
	require.ErrorContains(t, err, fmt.Sprintf("process %d on ", os.Getpid()))
}

func TestADatabaseThatMayLoseConfirmedChangesIsRefusedAtTheStart(t *testing.T) {
	h := newHome(t)
	file := filepath.Join(h.dir, "database-url")
	url := dbtest.Server(t, map[string]string{"fsync": "off"}).URL()
	require.NoError(t, os.WriteFile(file, []byte(url), 0o600))
	_, err := cli(t, "serve", "--data-dir", h.data, "--database-url-file", file, "--listen", "127.0.0.1:0",
		"--session-listen", "127.0.0.1:0")
	require.EqualValues(t, "database_not_durable", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "setting fsync is off")
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	var tables int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_tables WHERE schemaname = 'public'`).Scan(
		&tables))
	require.Zero(t, tables, "nothing is made in it")
}

// A hub that was taken for dead, and whose database another one works on, ends by itself: it changes nothing more.
func TestAHubWhoseDatabaseWasTakenOverStops(t *testing.T) {
	h := newHome(t)
	r := start(t, h)
	defer r.stop()
	url, ok := managed.Running(filepath.Join(h.data, "postgres"))
	require.True(t, ok)
	d, err := db.Open(t.Context(), url)
	require.NoError(t, err)
	_, err = db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, tx.Queue(t.Context(), `UPDATE hub_lease SET holder = $1, owner = $1`, db.NewID())
	})
	require.NoError(t, err)
	d.Close()
	select {
	case err = <-r.ended:
	case <-time.After(2 * time.Minute):
		require.FailNow(t, "the hub goes on")
	}
	require.Equal(t, db.CodeLeaseHeld, fault.As(err).Code)
	require.ErrorContains(t, err, "taken over")
}

// mount gives a small file system of the test's own.
func mount(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, options), "these tests run as root (make test)")
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

func TestFullDiskIsSaidAtTheStart(t *testing.T) {
	dir := mount(t, "size=1m")
	_, err := checkDataDir(dir)
	require.EqualValues(t, "disk_full", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "Free some space")
}

func TestUnwritableDirectoryIsSaidAtTheStart(t *testing.T) {
	dir := mount(t, "size=1m")
	require.NoError(t, syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	_, err := checkDataDir(dir)
	require.EqualValues(t, "data_dir_unwritable", fault.As(err).Code)
}

func TestWrongClockIsSaidAtTheStart(t *testing.T) {
	h := newHome(t)
	keys, err := trust.Open(h.data)
	require.NoError(t, err)
	require.NoError(t, checkClock(keys, time.Now()))
	err = checkClock(keys, time.Unix(0, 0))
	require.EqualValues(t, "clock_wrong", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "timedatectl")
	err = checkClock(keys, time.Now().AddDate(30, 0, 0))
	require.EqualValues(t, "clock_or_authority", fault.As(err).Code)
}

func TestATokenIsNotLostInACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin-token")
	crash := os.ErrProcessDone
	var first string
	// Before it counts: the next start uses the same one.
	_, _, err := withTokenFile(path, func(token string) (bool, error) { first = token; return false, crash })
	require.ErrorIs(t, err, crash)
	token, made, err := withTokenFile(path, func(token string) (bool, error) {
		require.Equal(t, first, token)
		return true, nil
	})
	require.NoError(t, err)
	require.True(t, made)
	require.Equal(t, first, token)

	// After it counts, before the move: the next start, where nothing is made any more, still moves it.
	require.NoError(t, os.Rename(path, path+".new"))
	_, made, err = withTokenFile(path, func(string) (bool, error) { return false, nil })
	require.NoError(t, err)
	require.False(t, made)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, first, strings.TrimSpace(string(text)))

	// An ordinary later start leaves the file alone.
	_, _, err = withTokenFile(path, func(string) (bool, error) { return false, nil })
	require.NoError(t, err)
	require.NoFileExists(t, path+".new")
	text, err = os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, first, strings.TrimSpace(string(text)))
}

// The guide's commands run as root, and the hub as a user of its own, who backs these files up each hour.
func TestReplacedKeysAndTokensBelongToTheHubsUser(t *testing.T) {
	skip.Root(t, "the ownership of files")
	const user = 65534
	h := newHome(t)
	each := func(visit func(path string, owner uint32)) {
		require.NoError(t, filepath.WalkDir(h.data, func(path string, entry fs.DirEntry, err error) error {
			require.NoError(t, err)
			info, err := entry.Info()
			require.NoError(t, err)
			stat, ok := info.Sys().(*syscall.Stat_t)
			require.True(t, ok)
			visit(path, stat.Uid)
			return nil
		}))
	}
	each(func(path string, _ uint32) { require.NoError(t, os.Lchown(path, user, user)) })
	keys, err := trust.Open(h.data)
	require.NoError(t, err)
	_, err = cli(t, "trust", "revoke", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase,
		"--key-id", keys.State().KeyID())
	require.NoError(t, err)
	_, _, err = withTokenFile(filepath.Join(h.data, "admin-token"), func(string) (bool, error) { return true, nil })
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(h.data, "admin-token"))
	each(func(path string, owner uint32) { require.EqualValues(t, user, owner, path) })
}

// To a node, each of these is the node itself.
func TestAnAdvertisedAddressNeedsAHost(t *testing.T) {
	for _, flag := range []string{"advertise-api", "advertise-session"} {
		for _, addr := range []string{":8443", " :8443", "0.0.0.0:8443", "[::]:8443"} {
			_, err := cli(t, "serve", "--data-dir", t.TempDir(), "--"+flag, addr)
			require.EqualValues(t, "flag_invalid", fault.As(err).Code, addr)
			require.Contains(t, fault.As(err).Public, "--"+flag, addr)
		}
	}
}

func TestAdvertisedAddresses(t *testing.T) {
	at := func(s string) net.Addr { a, err := net.ResolveTCPAddr("tcp", s); require.NoError(t, err); return a }
	for _, c := range []struct{ flag, listens, want string }{
		{"", "127.0.0.1:8443", "127.0.0.1:8443"},
		{"hub.example:443", "0.0.0.0:8443", "hub.example:443"},
		{"10.0.0.1:0", "0.0.0.0:8443", "10.0.0.1:8443"},
	} {
		got, err := advertised(c.flag, at(c.listens))
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	own, err := os.Hostname()
	require.NoError(t, err)
	got, err := advertised("", at("0.0.0.0:1"))
	require.NoError(t, err)
	require.Equal(t, own+":1", got)
}
