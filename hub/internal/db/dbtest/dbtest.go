// Package dbtest gives a test a fresh, migrated database on a real private PostgreSQL: one server per test process, in
// memory where the machine has a place for that and else under /tmp, gone with the process; or on a given one. It is
// for tests only.
package dbtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
)

// template is the migrated database that each test's own is copied from.
const template = "gpuaas_template"

type server struct {
	*managed.Server
	dir  string
	next atomic.Int64
	// leash ends the janitor when this process ends, whatever ends it.
	leash io.WriteCloser
}

//nolint:gochecknoglobals // one server per test process; a test has no other place to share it
var start = sync.OnceValues(startServer)

// New returns an open database that has every migration and belongs to this test alone.
func New(t testing.TB) *db.DB {
	t.Helper()
	d, err := db.Open(t.Context(), URL(t))
	if err != nil {
		t.Fatalf("open test database: %v", err)
	}
	t.Cleanup(d.Close)
	return d
}

// URL is New for a test that opens the database itself.
func URL(t testing.TB) string {
	t.Helper()
	if given := os.Getenv(Given); given != "" {
		return migratedOn(t, given)
	}
	return PrivateURL(t)
}

// PrivateURL is URL on the private server whatever Given says, for tests that stand between the hub and its socket.
func PrivateURL(t testing.TB) string {
	t.Helper()
	return copyOf(t, template)
}

// EmptyURL is a database without any table, for tests of migration itself.
func EmptyURL(t testing.TB) string {
	t.Helper()
	if given := os.Getenv(Given); given != "" {
		return emptyOn(t, given)
	}
	return copyOf(t, "template0")
}

func copyOf(t testing.TB, from string) string {
	t.Helper()
	s, err := start()
	if err != nil {
		t.Fatalf("start PostgreSQL for tests: %v", err)
	}
	name := "test_" + strconv.FormatInt(s.next.Add(1), 10)
	// Copying files takes half the processor time of logging each page, PostgreSQL's own choice.
	if err := s.admin(t.Context(), "CREATE DATABASE "+name+" TEMPLATE "+from+" STRATEGY file_copy"); err != nil {
		t.Fatalf("make test database: %v", err)
	}
	t.Cleanup(func() {
		if err := s.admin(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("drop test database: %v", err)
		}
	})
	return s.URLFor(name)
}

// Server starts a server that belongs to this test alone, with settings of its own.
func Server(t testing.TB, settings map[string]string) *managed.Server {
	t.Helper()
	s, err := launch(t.Context(), settings, func(string) error { return nil })
	if err != nil {
		t.Fatalf("start PostgreSQL for this test: %v", err)
	}
	t.Cleanup(func() { s.end(t) })
	return s.Server
}

func (s *server) end(t testing.TB) {
	if err := errors.Join(s.Close(), s.leash.Close()); err != nil {
		t.Errorf("stop PostgreSQL: %v", err)
	}
}

// launch starts a server in a directory that goes with this process. fill may put a database there.
func launch(ctx context.Context, settings map[string]string, fill func(dir string) error) (_ *server, err error) {
	dir, err := os.MkdirTemp(place(), "gpuaas-dbtest-")
	if err != nil {
		return nil, err
	}
	s := &server{}
	if s.leash, err = startJanitor(dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	// As durable as the hub demands; in memory that costs next to nothing.
	with := map[string]string{"shared_buffers": "32MB", "max_wal_size": "256MB", "autovacuum": "off"}
	maps.Copy(with, settings)
	if err := fill(dir); err != nil {
		return nil, errors.Join(err, s.leash.Close())
	}
	s.dir = dir
	if s.Server, err = managed.Start(ctx, managed.Config{Dir: dir, Settings: with}); err != nil {
		return nil, errors.Join(err, s.leash.Close())
	}
	return s, nil
}

func startServer() (*server, error) {
	ctx := context.Background() //nolint:forbidigo // the server outlives the test that happens to start it
	s, err := launch(ctx, nil, func(string) error { return nil })
	if err != nil {
		return nil, err
	}
	if err := s.admin(ctx, "CREATE DATABASE "+template+" TEMPLATE template0"); err != nil {
		return nil, err
	}
	d, err := db.Open(ctx, s.URLFor(template))
	if err != nil {
		return nil, err
	}
	defer d.Close() // a database with a connection cannot be copied
	return s, db.Migrate(ctx, d)
}

// place is a directory for the server's files. Making and dropping databases is thousands of files, which cost a disk
// more than they are worth.
func place() string {
	const (
		memory   = "/dev/shm"
		minBytes = 4 << 30
	)
	var fs unix.Statfs_t
	if err := unix.Statfs(memory, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC ||
		fs.Bavail*uint64(fs.Bsize) < minBytes {
		return "/tmp"
	}
	return memory
}

// startJanitor starts a shell that does nothing until this process is gone, then stops the server and removes the
// directory: a test binary has no hook at its end that also runs after a panic or a kill.
func startJanitor(dir string) (io.WriteCloser, error) {
	const script = `read -r _; pid=$(head -n1 "$1/data/postmaster.pid" 2>/dev/null) && kill -QUIT "$pid" 2>/dev/null
while [ -n "$pid" ] && readlink "/proc/$pid/cwd" >/dev/null; do sleep 0.05; done; rm -rf -- "$1"`
	cmd := exec.Command("/bin/sh", "-c", script, "sh", filepath.Clean(dir)) //nolint:noctx // must outlive every context
	leash, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start janitor: %w", err)
	}
	return leash, nil
}

func (s *server) admin(ctx context.Context, statement string) error {
	return on(ctx, s.URLFor("postgres"), statement)
}
