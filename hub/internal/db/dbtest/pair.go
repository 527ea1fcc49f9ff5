package dbtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Pair is a primary and a standby that follows it synchronously: what the primary confirms is on the standby's disk.
type Pair struct{ primary, standby *server }

// standbyWait bounds each wait while a pair is made.
const standbyWait = time.Minute

// NewPair starts a pair that belongs to this test alone. Its database is empty.
func NewPair(t testing.TB) *Pair {
	t.Helper()
	p := &Pair{}
	var err error
	// Shared memory in the server's directory: what lies elsewhere stays when the server is killed for good.
	inDirectory := map[string]string{"dynamic_shared_memory_type": "mmap"}
	if p.primary, err = launch(t.Context(), inDirectory, func(string) error { return nil }); err != nil {
		t.Fatalf("start the primary: %v", err)
	}
	t.Cleanup(func() { p.primary.end(t) })
	if err := p.primary.admitStandby(t.Context()); err != nil {
		t.Fatalf("let a standby connect: %v", err)
	}
	if p.standby, err = launch(t.Context(), nil, p.primary.copyTo); err != nil {
		t.Fatalf("start the standby: %v", err)
	}
	t.Cleanup(func() { p.standby.end(t) })
	if err := p.primary.follow(t.Context()); err != nil {
		t.Fatalf("make the standby synchronous: %v", err)
	}
	return p
}

// URL names both hosts.
func (p *Pair) URL() string {
	_, standby, _ := strings.Cut(p.standby.URL(), "?host=")
	return p.primary.URL() + "," + standby
}

// KillPrimary kills the primary as a power cut does: every process of it at once, and for good.
func (p *Pair) KillPrimary(t testing.TB) {
	t.Helper()
	// A directory of another name keeps the supervisor from starting the primary again: its machine is gone.
	gone := filepath.Join(p.primary.dir, "gone")
	if err := os.Rename(filepath.Join(p.primary.dir, "data"), gone); err != nil {
		t.Fatal(err)
	}
	gone, err := filepath.EvalSymlinks(gone)
	if err != nil {
		t.Fatal(err)
	}
	servers := ProcessesIn(gone)
	if len(servers) == 0 {
		t.Fatalf("no process works in %s", gone)
	}
	for _, pid := range servers {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	RemoveMemory(t, servers)
}

// PromoteStandby makes the standby the primary.
func (p *Pair) PromoteStandby(t testing.TB) {
	t.Helper()
	if err := p.standby.admin(t.Context(), `SELECT pg_promote(true, 60)`); err != nil {
		t.Fatalf("promote the standby: %v", err)
	}
}

// admitStandby lets the server's own user replicate, which the private server's rules do not.
func (s *server) admitStandby(ctx context.Context) error {
	path := filepath.Join(s.dir, "data", "pg_hba.conf")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("local replication all peer map=hub\n")
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := s.admin(ctx, `SELECT pg_reload_conf()`); err != nil {
		return err
	}
	return eventually(ctx, func(ctx context.Context) (bool, error) {
		conn, err := pgconn.Connect(ctx, s.URLFor("postgres")+"&replication=true")
		if err != nil {
			return false, nil //nolint:nilerr // the rules are not read yet
		}
		return true, conn.Close(ctx)
	})
}

// eventually asks until the answer is yes.
func eventually(ctx context.Context, ask func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, standbyWait)
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		if yes, err := ask(ctx); yes || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-poll.C:
		}
	}
}

// copyTo makes a standby's directory.
func (s *server) copyTo(dir string) error {
	info, err := os.Stat(filepath.Join(s.dir, "data"))
	if err != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("the owner of the data directory is not known")
	}
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	if err := os.Chown(data, int(owner.Uid), int(owner.Gid)); err != nil {
		return err
	}
	// The directory itself lets the server's user through, as the hub's does.
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // see above
		return err
	}
	server, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", s.PID()))
	if err != nil {
		return err
	}
	//nolint:noctx // the test's own directories; ends with the copy of a few megabytes
	cmd := exec.Command(filepath.Join(filepath.Dir(server), "pg_basebackup"), "--pgdata", data, "--write-recovery-conf",
		"--wal-method", "stream", "--checkpoint", "fast", "--no-sync", "--dbname", s.URLFor("postgres"))
	cmd.Dir = "/"
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("pg_basebackup: %w: %s", err, out)
	}
	engine, err := os.ReadFile(filepath.Join(s.dir, "engine"))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "engine"), engine, 0o600) //nolint:gosec // a directory of this process's own
}

// follow makes commits wait for the standby, and waits until they do.
func (s *server) follow(ctx context.Context) error {
	for _, sql := range []string{`ALTER SYSTEM SET synchronous_standby_names = '*'`, `SELECT pg_reload_conf()`} {
		if err := s.admin(ctx, sql); err != nil {
			return err
		}
	}
	conn, err := pgx.Connect(ctx, s.URLFor("postgres"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return eventually(ctx, func(ctx context.Context) (bool, error) {
		var n int
		err := conn.QueryRow(ctx, `SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'`).Scan(&n)
		return n == 1, err
	})
}
