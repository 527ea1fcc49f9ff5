// Package managed runs a private PostgreSQL for a hub that was given no database URL: a child process of an
// unprivileged user, reachable through a Unix socket only, started again when it crashes and gone when the hub is gone.
// It owns the database's directory and process; schema and statements belong to package db and the slices.
package managed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// engineFile records the engine and its major version when the directory is made; both stay what they are.
	engineFile = "engine"
	// role and database are the names that the hub uses inside its private server.
	role     = "gpuaas"
	database = "gpuaas"

	// startTimeout bounds waiting for the first answer, crash recovery of a large log included.
	startTimeout = 2 * time.Minute
	readyPoll    = 20 * time.Millisecond
	// fastStop is how long open transactions get to end before the server is stopped without a checkpoint.
	fastStop = 30 * time.Second
	// Pause before the server is started again: doubled from restartMin after each crash, reset when it has run for
	// stableAfter.
	restartMin  = 200 * time.Millisecond
	restartMax  = 10 * time.Second
	stableAfter = time.Minute
	// socketPathLimit is what a Unix socket's address holds (sun_path, 108 bytes with its zero).
	socketPathLimit = 107
)

// Config says where the server lives. Dir is required.
type Config struct {
	// Dir is the hub's directory for it; made if absent. Every directory above it must let the unprivileged user through.
	Dir string
	// BinDir holds initdb and postgres; empty searches the PATH and the directories where Debian, Red Hat and the source
	// build put them.
	BinDir string
	// User owns and runs the server when the hub is root; empty takes the first of gpuaas-hub, gpuaas and postgres that
	// exists.
	User string
	// Settings are added to postgresql.conf, for tests that need no durability.
	Settings map[string]string
	// Log receives what the server says; nil discards it.
	Log *slog.Logger
}

// Server is a running private PostgreSQL.
type Server struct {
	conf   Config
	layout layout
	bin    string
	// recorded is the major version that the directory was made for; 0 for a new one.
	recorded int
	user     account
	lock     *os.File

	stop    chan struct{}
	stopped chan struct{}
	once    sync.Once

	mu  sync.Mutex
	pid int
}

type layout struct{ root, data, socket string }

func layoutOf(dir string) (layout, error) {
	root, err := filepath.Abs(dir)
	return layout{root: root, data: filepath.Join(root, "data"), socket: filepath.Join(root, "run")}, err
}

// Start makes the directory if it is new, starts the server and waits until it answers. The caller must Close it.
func Start(ctx context.Context, conf Config) (_ *Server, err error) {
	if conf.Log == nil {
		conf.Log = slog.New(slog.DiscardHandler)
	}
	at, err := layoutOf(conf.Dir)
	if err != nil {
		return nil, fmt.Errorf("database directory: %w", err)
	}
	s := &Server{conf: conf, layout: at, stop: make(chan struct{}), stopped: make(chan struct{})}
	if n := len(filepath.Join(s.layout.socket, ".s.PGSQL.5432")); n > socketPathLimit {
		return nil, refuse(codeDatabasePathTooLong, fmt.Sprintf("The path of the database's socket is %d bytes long, at "+
			"most %d are possible: choose a shorter data directory than %s.", n, socketPathLimit, at.root), nil)
	}
	if s.user, err = unprivileged(conf.User); err != nil {
		return nil, err
	}
	// Before anything is made: a machine without PostgreSQL is left as it is.
	if s.recorded, err = s.recordedMajor(); err != nil {
		return nil, err
	}
	if s.bin, err = findBinaries(s.conf.BinDir, s.recorded); err != nil {
		return nil, err
	}
	if err := s.makeRoot(); err != nil {
		return nil, err
	}
	if s.lock, err = lockDir(at.root); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = s.lock.Close()
		}
	}()
	if err := s.prepare(ctx); err != nil {
		return nil, err
	}
	if err := s.waitForPredecessor(ctx); err != nil {
		return nil, err
	}
	err = s.run(ctx)
	failpoint.Hit("hub/database/started")
	return s, err
}

// Running gives the URL of the private server that another process runs in dir; ok is false where none does. It is for
// the hub's own commands on the same machine: the server lets in its own user and root only.
func Running(dir string) (url string, ok bool) {
	at, err := layoutOf(dir)
	s := &Server{layout: at}
	return s.URL(), err == nil && s.predecessor() != 0
}

func (s *Server) run(ctx context.Context) error {
	started := make(chan error, 1)
	go s.supervise(started)
	if err := <-started; err != nil {
		<-s.stopped
		return err
	}
	if err := s.waitReady(ctx); err != nil {
		_ = s.Close()
		return err
	}
	return nil
}

// URL is what db.Open takes.
func (s *Server) URL() string { return s.URLFor(database) }

// URLFor is URL for another database of the same server.
func (s *Server) URLFor(name string) string {
	u := url.URL{
		Scheme: "postgres", User: url.User(role), Path: "/" + name,
		RawQuery: url.Values{"host": {s.layout.socket}}.Encode(),
	}
	return u.String()
}

// PID is the server's process now, 0 between two lives.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pid
}

// Close stops the server and waits until it is gone. It may be called more than once.
func (s *Server) Close() error {
	s.once.Do(func() {
		close(s.stop)
		<-s.stopped
		_ = s.lock.Close()
	})
	<-s.stopped
	return nil
}

// makeRoot makes the directory and proves that the server's user can reach it.
func (s *Server) makeRoot() error {
	if err := os.MkdirAll(s.layout.root, 0o700); err != nil {
		return unusable("The database's directory "+s.layout.root+" cannot be made", err)
	}
	if s.user.same {
		return nil
	}
	// The directory itself holds nothing secret; what it contains belongs to the server's user alone.
	if err := os.Chmod(s.layout.root, 0o711); err != nil { //nolint:gosec // the unprivileged user must pass through
		return unusable("The mode of "+s.layout.root+" cannot be set", err)
	}
	for dir := filepath.Dir(s.layout.root); ; dir = filepath.Dir(dir) {
		ok, err := s.user.mayEnter(dir)
		if err != nil {
			return unusable("The directory "+dir+" cannot be examined", err)
		}
		if !ok {
			return refuse(codeDatabaseDirectoryClosed, fmt.Sprintf(
				"PostgreSQL runs as user %s, who may not pass through %s to %s. Put the data directory under /var/lib, or open "+
					"that directory with: chmod o+x %s", s.user.name, dir, s.layout.root, dir), nil)
		}
		if dir == "/" {
			return nil
		}
	}
}

// lockDir keeps a second hub out of the same directory; the kernel frees it with the process.
func lockDir(root string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(root, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, unusable("The lock in "+root+" cannot be opened", err)
	}
	if err := daemon.Lock(f); err != nil {
		_ = f.Close()
		return nil, refuse(codeDatabaseInUse, "Another hub already runs the database in "+root+"; stop it, or give this "+
			"one another data directory.", err)
	}
	return f, nil
}

// waitReady returns when the server takes statements and holds the hub's database.
func (s *Server) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	poll := time.NewTicker(readyPoll)
	defer poll.Stop()
	for {
		err := s.makeDatabase(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fault.New(fault.Unavailable, CodeDatabaseNotReady, "The private PostgreSQL in "+s.layout.root+
				" did not become ready; its own messages are in the hub's log.", errors.Join(ctx.Err(), err))
		case <-s.stopped:
			return fault.New(fault.Unavailable, CodeDatabaseNotReady, "The private PostgreSQL in "+s.layout.root+
				" ended; its own messages are in the hub's log.", err)
		case <-poll.C:
		}
	}
}

func (s *Server) makeDatabase(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URLFor("postgres"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var have bool
	if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)`, database).Scan(
		&have); err != nil || have {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+database)
	return err
}

// waitForPredecessor waits for the server of a hub that was killed: its child was told to stop, which takes a moment,
// and two servers on one directory would destroy it (PostgreSQL refuses, but as an error instead of a wait).
func (s *Server) waitForPredecessor(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	poll := time.NewTicker(readyPoll)
	defer poll.Stop()
	for told := false; ; {
		pid := s.predecessor()
		if pid == 0 {
			return nil
		}
		if !told {
			s.conf.Log.InfoContext(ctx, "waiting for the previous database server to end", "pid", pid)
			_ = syscall.Kill(pid, syscall.SIGINT)
			told = true
		}
		select {
		case <-ctx.Done():
			return refuse(codeDatabaseInUse, fmt.Sprintf("An earlier PostgreSQL (process %d) still runs in %s and does not end.",
				pid, s.layout.data), ctx.Err())
		case <-poll.C:
		}
	}
}

// predecessor is the process that runs on the directory, 0 if there is none. The pid file alone proves nothing: after a
// power cut its number may belong to anyone.
func (s *Server) predecessor() int {
	raw, err := os.ReadFile(filepath.Join(s.layout.data, "postmaster.pid"))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(raw), "\n")
	var pid int
	if _, err := fmt.Sscan(first, &pid); err != nil || pid <= 1 {
		return 0
	}
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil {
		return 0
	}
	real, err := filepath.EvalSymlinks(s.layout.data)
	if err != nil || cwd != real {
		return 0
	}
	return pid
}

func refuse(code fault.Code, public string, cause error) *fault.Error {
	return fault.New(fault.Unprocessable, code, public, cause).Permanent()
}

// unusable refuses a directory or file of the database; what says which, and what cannot be done with it.
func unusable(what string, err error) *fault.Error {
	return refuse(codeDatabaseDirectory, what+": "+reason(err)+".", err)
}

// reason is the system's own words, without the path that the text around it already names.
func reason(err error) string {
	if pathErr, ok := errors.AsType[*os.PathError](err); ok {
		return pathErr.Err.Error()
	}
	return err.Error()
}
