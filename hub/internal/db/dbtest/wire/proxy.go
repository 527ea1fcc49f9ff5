// Package wire is a proxy that a test puts between the hub and PostgreSQL. It reads the messages of both: it can cut a
// connection or answer an error at a chosen statement, and answer as CockroachDB does. It keeps no data and decides
// about no transaction: PostgreSQL does. It is for tests only.
package wire

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Proxy passes connections on to one PostgreSQL.
type Proxy struct {
	// upstream is the socket of PostgreSQL.
	upstream string
	// cockroach says whether the proxy answers as CockroachDB.
	cockroach bool
	// rewrite changes the text of a statement; nil changes none.
	rewrite  func(sql string) string
	listener net.Listener
	dir      string

	mu     sync.Mutex
	faults []*fault
	// answers are the errors that take the place of those which PostgreSQL gives for a marker, by the marker.
	answers map[string]*pgproto3.ErrorResponse
	open    map[*link]struct{}
	done    sync.WaitGroup
}

// Option changes what a proxy does.
type Option func(*Proxy)

// Rewrite has the proxy change the text of each statement.
func Rewrite(change func(sql string) string) Option { return func(p *Proxy) { p.rewrite = change } }

// Open opens the database of a URL through a proxy.
func Open(t testing.TB, direct string, options ...Option) (*db.DB, *Proxy) {
	t.Helper()
	p := New(t, direct, options...)
	through, err := p.URL(direct)
	if err != nil {
		t.Fatalf("%s: %v", direct, err)
	}
	d, err := db.Open(t.Context(), through)
	if err != nil {
		t.Fatalf("open the database through the proxy: %v", err)
	}
	t.Cleanup(d.Close)
	return d, p
}

// New starts a proxy before the PostgreSQL that a URL with a socket's directory names. It ends with the test.
func New(t testing.TB, upstream string, options ...Option) *Proxy {
	t.Helper()
	p, err := start(upstream, options...)
	if err != nil {
		t.Fatalf("start a proxy before PostgreSQL: %v", err)
	}
	t.Cleanup(p.close)
	return p
}

func start(upstream string, options ...Option) (*Proxy, error) {
	conf, err := pgconn.ParseConfig(upstream)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "gpuaas-wire-") // of mode 0700: what lies behind asks for no password
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", filepath.Join(dir, ".s.PGSQL.5432")) //nolint:noctx // answers at once
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	p := &Proxy{
		upstream: filepath.Join(conf.Host, fmt.Sprintf(".s.PGSQL.%d", conf.Port)), listener: l, dir: dir,
		answers: map[string]*pgproto3.ErrorResponse{}, open: map[*link]struct{}{},
	}
	for _, o := range options {
		o(p)
	}
	p.done.Go(p.accept)
	return p, nil
}

// close ends the proxy and all of its connections.
func (p *Proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	for l := range p.open {
		l.cut()
	}
	p.mu.Unlock()
	p.done.Wait()
	_ = os.RemoveAll(p.dir)
}

// URL is a URL of PostgreSQL's, changed to one that goes through the proxy.
func (p *Proxy) URL(direct string) (string, error) {
	u, err := url.Parse(direct)
	if err != nil {
		return "", err
	}
	q := u.Query()
	q.Set("host", p.dir)
	u.RawQuery = q.Encode()
	return u.String(), nil
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("unix", p.upstream) //nolint:noctx // answers at once
		if err != nil {
			_ = client.Close()
			continue
		}
		l := &link{
			proxy: p, client: client, server: server,
			toServer: pgproto3.NewFrontend(server, server), toClient: pgproto3.NewBackend(client, client),
			statements: map[string]string{}, portals: map[string]string{},
		}
		p.mu.Lock()
		p.open[l] = struct{}{}
		p.mu.Unlock()
		p.done.Go(func() {
			defer l.cut()
			l.requests()
		})
		p.done.Go(func() {
			defer p.forget(l)
			l.answers()
		})
	}
}

func (p *Proxy) forget(l *link) {
	l.cut()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, l)
}

// how is what happens at a statement.
type how uint8

const (
	// refuse: the statement is not executed, and an error is the answer.
	refuse how = iota
	// refuseAfter: the statement, a COMMIT, is executed, and an error is the answer.
	refuseAfter
	// cutBefore: the connection ends before the statement reaches the server.
	cutBefore
	// cutAfter: the connection ends when the server has executed the statement, a COMMIT, before its answer.
	cutAfter
)

type fault struct {
	matches func(sql string) bool
	how     how
	answer  *pgproto3.ErrorResponse
	left    int
}

// CutBefore ends the connection of the next statement that begins so, before it reaches the server.
func (p *Proxy) CutBefore(prefix string) {
	p.add(&fault{matches: begins(prefix), how: cutBefore, left: 1})
}

// CutAfterCommit ends the connection of the next COMMIT when the server has committed, before its answer.
func (p *Proxy) CutAfterCommit() { p.add(&fault{matches: commits, how: cutAfter, left: 1}) }

// Answer has the next n statements that begin so answered by an error in place of their execution.
func (p *Proxy) Answer(prefix string, e *pgproto3.ErrorResponse, n int) {
	p.add(&fault{matches: begins(prefix), how: refuse, answer: e, left: n})
}

// AnswerCommit has the next COMMIT answered by an error; executed says whether the server commits nevertheless.
func (p *Proxy) AnswerCommit(e *pgproto3.ErrorResponse, executed bool) {
	f := &fault{matches: commits, how: refuse, answer: e, left: 1}
	if executed {
		f.how = refuseAfter
	}
	p.add(f)
}

// Pending is how many faults have not happened yet.
func (p *Proxy) Pending() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.faults {
		n += f.left
	}
	return n
}

func (p *Proxy) add(f *fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, f)
}

// at takes the fault that is due at a statement, nil where there is none.
func (p *Proxy) at(sql string) *fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.faults {
		if f.left > 0 && f.matches(sql) {
			f.left--
			return f
		}
	}
	return nil
}

// marker is a statement that PostgreSQL cannot parse: its error is replaced by the given one on its way back, and the
// transaction has failed on the server, too.
func (p *Proxy) marker(e *pgproto3.ErrorResponse) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := fmt.Sprintf("gpuaas_fault_%d", len(p.answers)+1)
	p.answers[name] = e
	return name
}

// answerFor is the error that takes the place of e; nil where e stays.
func (p *Proxy) answerFor(e *pgproto3.ErrorResponse) *pgproto3.ErrorResponse {
	_, after, found := strings.Cut(e.Message, `"gpuaas_fault_`)
	if !found {
		return nil
	}
	number, _, _ := strings.Cut(after, `"`)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.answers["gpuaas_fault_"+number]
}

func begins(prefix string) func(string) bool {
	return func(sql string) bool { return strings.HasPrefix(sql, prefix) }
}

// commits reports whether a statement commits: on CockroachDB that is the end of the savepoint for retries.
func commits(sql string) bool { return strings.EqualFold(sql, "COMMIT") || sql == releaseRestart }
