// Package uplink is the node's side of the session to a hub: it enrolls, keeps the certificate fresh, dials, verifies
// and accepts what is pushed, reports what is observed, uploads usage, fetches documents and serves tunnels. It decides
// nothing about workloads, and nothing waits for it: without a hub everything else goes on.
package uplink

import (
	"cmp"
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// Times of a session.
const (
	// sendTimeout bounds one message, fetchTimeout one document.
	sendTimeout  = 30 * time.Second
	fetchTimeout = 30 * time.Second
	// factsTimeout bounds how long the facts of a hello may take: a containerd that does not answer, or a slow disk,
	// must not keep it back until the hub, which waits for it for three seconds, closes the connection.
	factsTimeout = time.Second
	// lastRefusalWait is how long the last refusal may take to reach the hub before the connection is closed.
	lastRefusalWait = 2 * time.Second
)

// Reconciler observes the machine; agent/internal/reconcile implements it.
type Reconciler interface {
	Report() agent.Report
	Subscribe() <-chan struct{}
	// Pulls returns the pulls of images under way.
	Pulls() []*protocol.ImagePull
	// SyncClock sets the clock by the time in a hub's answer, which took the given time to arrive.
	SyncClock(ctx context.Context, hub time.Time, took time.Duration)
}

// Config is how the session behaves. Zero values take the defaults.
type Config struct {
	AgentVersion   string
	ReportInterval time.Duration
	// DialRetryMax bounds the pause between dials of a hub that does not answer, or with which no session lasts.
	DialRetryMax time.Duration
	// UsageRetry is the pause after a segment that the hub could not take now.
	UsageRetry time.Duration
	// APIURL is the hub's API, for renewals; SessionAddr overrides the address from enrollment when set.
	APIURL      string
	SessionAddr string
	// Facts are gathered for each hello, which is sent without those that are not there when ctx ends.
	Facts func(ctx context.Context) *protocol.NodeFacts
	// LacksFeatures are those of this build that the machine cannot have.
	LacksFeatures []string
	// Logs reads the log of one container run; the zero time means all of it.
	Logs func(ctx context.Context, runID string, tailLines int, since time.Time, follow bool) (io.ReadCloser, error)
	// Exec runs a command in the container of one run; the end of ctx kills it.
	Exec func(ctx context.Context, runID string, c execstream.Command) (exitCode int, err error)
	// Copy copies files into or out of the container of a run; see pkg/filecopy for the streams.
	Copy func(ctx context.Context, runID, path string, into bool, c execstream.Command) (exitCode int, err error)
	// RemoveEnvironment removes an environment that no workload uses; the fault of one that is in use is a Conflict.
	RemoveEnvironment func(ctx context.Context, projectID, digest string) error
	Log               *slog.Logger
}

// Uplink holds at most one session. Make one with New, then call Run once.
type Uplink struct {
	cfg      Config
	creds    *Credentials
	store    *state.Store
	clock    *state.Clock
	log      *slog.Logger
	acceptor *accept.Acceptor
	tokens   *link.Tokens
	// connect is link.Dial, random a value in [0, 1); tests replace both.
	connect func(ctx context.Context, addr string, tlsConf *tls.Config, tokens *link.Tokens) (*link.Conn, error)
	random  func() float64

	mu     sync.Mutex
	conn   *link.Conn
	status agent.SessionStatus

	// lastSession is the number of the last session that this process was welcomed to; used by one session at a time.
	lastSession uint64

	// tunnels are those of all sessions: a command whose container does not answer delays no new session.
	tunnels sync.WaitGroup

	// observed and sealed wake the session when there is something new to report or to upload.
	observed, sealed <-chan struct{}
}

// New makes an uplink. The acceptor accepts the documents that the hub pushes.
func New(cfg Config, creds *Credentials, store *state.Store, clock *state.Clock, acceptor *accept.Acceptor) *Uplink {
	cfg.ReportInterval = cmp.Or(max(cfg.ReportInterval, 0), hubsession.DefaultReportInterval)
	cfg.UsageRetry = cmp.Or(max(cfg.UsageRetry, 0), hubsession.DefaultUsageRetry)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Uplink{
		cfg:      cfg,
		creds:    creds,
		store:    store,
		clock:    clock,
		log:      cfg.Log,
		acceptor: acceptor,
		tokens:   &link.Tokens{},
		connect:  link.Dial,
		random:   rand.Float64,
	}
}

// Run holds a session whenever a hub answers, until ctx ends.
func (u *Uplink) Run(ctx context.Context, observer Reconciler) error {
	u.observed, u.sealed = observer.Subscribe(), u.store.SubscribeUsage()
	var renewing sync.WaitGroup
	defer renewing.Wait()
	defer u.tunnels.Wait()
	renewer := &renewer{creds: u.creds, store: u.store, clock: u.clock, apiURL: u.apiURL(), log: u.log}
	renewing.Go(func() { renewer.run(ctx) })
	retry, why := hubsession.Backoff{Longest: u.cfg.DialRetryMax}, inquiry{ask: renewer.renew}
	for ctx.Err() == nil {
		shown, _ := u.creds.Certificate() // a dial without one fails by itself
		lasted, err := u.session(ctx, observer)
		if ctx.Err() != nil {
			return nil
		}
		if lasted > 0 {
			why = inquiry{ask: renewer.renew}
		}
		if link.IsCertificateRefused(err) {
			err = why.reason(ctx, shown, err)
		}
		if link.IsPeerUnknown(err) {
			u.followBundle(ctx)
		}
		u.disconnected(err)
		wait := retry.Pause(lasted, err, u.random())
		u.log.InfoContext(ctx, "no session", slog.String("hub", u.addr()), slog.Any("error", err),
			slog.String("retry_in", wait.String()))
		if !loop.Pause(ctx, wait) {
			return nil
		}
	}
	return nil
}

func (u *Uplink) apiURL() string { return cmp.Or(u.cfg.APIURL, u.creds.Identity().APIURL) }
func (u *Uplink) addr() string   { return cmp.Or(u.cfg.SessionAddr, u.creds.Identity().SessionAddr) }

func (u *Uplink) dial(ctx context.Context) (*link.Conn, error) {
	return u.connect(ctx, u.addr(), link.ClientTLS(u.creds.Certificate, hubPeer(u.store, u.clock)), u.tokens)
}

func (u *Uplink) connected(conn *link.Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.conn = conn
	u.status = agent.SessionStatus{
		Connected: true, HubAddr: u.addr(), Since: u.clock.Now(), Quarantined: u.status.Quarantined,
	}
	u.log.Info("session open", slog.String("hub", u.status.HubAddr))
}

func (u *Uplink) setQuarantined(reason string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.status.Quarantined = reason
	if reason != "" {
		u.log.Warn("the hub has quarantined this node: it gets nothing new until an admin has released it",
			slog.String("reason", reason))
	}
}

func (u *Uplink) disconnected(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.conn = nil
	if u.status.Connected || u.status.Since.IsZero() {
		u.status.Since = u.clock.Now()
	}
	u.status.Connected, u.status.HubAddr, u.status.LastError = false, u.addr(), ""
	if err != nil {
		u.status.LastError = err.Error()
	}
}

// Status returns the state of the session.
func (u *Uplink) Status() agent.SessionStatus {
	u.mu.Lock()
	status := u.status
	u.mu.Unlock()
	status.LastRefusal = u.acceptor.LastRefusal()
	return status
}

// jitter shortens d at random by up to half of it.
func jitter(d time.Duration) time.Duration {
	return hubsession.Spread(d, rand.Float64()) //nolint:gosec // not a secret
}

// errNoSession is the error of calls that need a session when there is none.
func errNoSession() error {
	return fault.New(fault.Unavailable, agent.CodeHubAway, "There is no session to a hub at the moment.", nil)
}

// RegistryTLS verifies the registry as a hub and shows this node's certificate: the registry accepts a pull credential
// only with it.
func (u *Uplink) RegistryTLS() (*tls.Config, error) {
	if !u.creds.Enrolled() {
		return nil, errNoSession()
	}
	return hubTLS(u.store, u.clock, u.creds.Certificate), nil
}
