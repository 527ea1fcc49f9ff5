// Package uplink is the node's side of the session to a hub: it enrolls, keeps the certificate fresh, dials, verifies
// and accepts what is pushed, reports what is observed, uploads usage, fetches documents and serves tunnels. It decides
// nothing about workloads, and nothing waits for it: without a hub everything else goes on.
package uplink

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// Times of a session.
const (
	// DefaultReportInterval is the pause between reports when nothing changes.
	DefaultReportInterval = 30 * time.Second
	// helloTimeout bounds the exchange of hello and welcome, sendTimeout one message, fetchTimeout one document.
	helloTimeout = 15 * time.Second
	sendTimeout  = 30 * time.Second
	fetchTimeout = 30 * time.Second
	// ackPause is how long a change waits for the hub to have taken in the report before it.
	ackPause = time.Second
	// lastRefusalWait is how long the last refusal may take to reach the hub before the connection is closed.
	lastRefusalWait = 2 * time.Second
	// tombstoneReports is how long after its removal a member that the hub has acknowledged is reported to a new session.
	tombstoneReports = 24 * time.Hour
)

// Reconciler is what observes; agent/internal/reconcile has it.
type Reconciler interface {
	Report() agent.Report
	Subscribe() <-chan struct{}
	// SyncClock takes over the time that a hub told in an answer that took so long.
	SyncClock(ctx context.Context, hub time.Time, took time.Duration)
}

// Logs reads the log of one container run.
type Logs func(ctx context.Context, runID string, tailLines int, follow bool) (io.ReadCloser, error)

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
	// Facts are gathered for each hello.
	Facts func(ctx context.Context) *protocol.NodeFacts
	Logs  Logs
	Log   *slog.Logger
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

	mu     sync.Mutex
	conn   *link.Conn
	status agent.SessionStatus

	// lastSession is the number of the last session that this process was welcomed to; used by one session at a time.
	lastSession uint64

	// observed and sealed say that there is something new to report or to upload; one session at a time listens.
	observed, sealed <-chan struct{}
}

// New makes an uplink. The acceptor accepts the documents that the hub pushes.
func New(cfg Config, creds *Credentials, store *state.Store, clock *state.Clock, acceptor *accept.Acceptor) *Uplink {
	if cfg.ReportInterval <= 0 {
		cfg.ReportInterval = DefaultReportInterval
	}
	if cfg.UsageRetry <= 0 {
		cfg.UsageRetry = DefaultUsageRetry
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Uplink{
		cfg:      cfg,
		creds:    creds,
		store:    store,
		clock:    clock,
		log:      cfg.Log,
		acceptor: acceptor,
		tokens:   &link.Tokens{},
	}
}

// Run holds a session whenever a hub answers, until ctx ends.
func (u *Uplink) Run(ctx context.Context, observer Reconciler) error {
	u.observed, u.sealed = observer.Subscribe(), u.store.SubscribeUsage()
	var renewing sync.WaitGroup
	defer renewing.Wait()
	apiURL := cmp.Or(u.cfg.APIURL, u.creds.Identity().APIURL)
	renewer := &renewer{creds: u.creds, store: u.store, clock: u.clock, apiURL: apiURL, log: u.log}
	renewing.Go(func() { renewer.run(ctx) })
	retry, why := backoff{most: u.cfg.DialRetryMax}, inquiry{ask: renewer.renew}
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
		u.disconnected(err)
		wait := retry.pause(lasted, err, rand.Float64()) //nolint:gosec // not a secret
		u.log.InfoContext(ctx, "no session", "hub", u.addr(), "error", err, "retry_in", wait.String())
		if !pause(ctx, wait) {
			return nil
		}
	}
	return nil
}

func (u *Uplink) addr() string {
	if u.cfg.SessionAddr != "" {
		return u.cfg.SessionAddr
	}
	return u.creds.Identity().SessionAddr
}

// session dials, greets and serves until the connection ends. It returns how long it served.
func (u *Uplink) session(ctx context.Context, observer Reconciler) (lasted time.Duration, err error) {
	if !u.store.Bundle().Valid() {
		if err := u.trustAgain(ctx); err != nil {
			return 0, err
		}
	}
	conn, err := u.dial(ctx)
	if err != nil {
		return 0, err
	}
	s := &session{
		u:          u,
		conn:       conn,
		observer:   observer,
		unreadable: make(chan error, 1),
		acks:       make(chan struct{}, 1),
		sent:       map[uint64][]string{},
		first:      true,
	}
	ctx, cancel := context.WithCancel(ctx)
	code, reason := link.CodeOK, "the agent is stopping"
	var workers sync.WaitGroup
	defer func() {
		cancel()
		_ = conn.Close(code, reason)
		workers.Wait()
	}()
	if err := s.greet(ctx); err != nil {
		return 0, err
	}
	u.connected(conn)
	began := time.Now()
	ended := make(chan error, 4)
	for _, work := range []func(context.Context) error{s.receive, s.report, s.upload, s.serveTunnels} {
		workers.Go(func() { ended <- work(ctx) })
	}
	select {
	case <-ctx.Done():
		return time.Since(began), ctx.Err()
	case err := <-ended:
		code, reason = link.CodeProtocol, "the session cannot go on"
		if connErr := conn.Err(); connErr != nil && !errors.Is(err, errGoAway) {
			err = connErr
		}
		if how, known := link.CloseCode(err); known && how == link.CodeShutdown {
			err = fmt.Errorf("%w: %w", errGoAway, err)
		}
		return time.Since(began), err
	}
}

func (u *Uplink) dial(ctx context.Context) (*link.Conn, error) {
	return link.Dial(ctx, u.addr(), link.ClientTLS(u.creds.Certificate, hubPeer(u.store, u.clock)), u.tokens)
}

func (u *Uplink) connected(conn *link.Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.conn = conn
	u.status = agent.SessionStatus{
		Connected: true, HubAddr: u.addr(), Since: u.clock.Now(), Quarantined: u.status.Quarantined,
	}
	u.log.Info("session open", "hub", u.status.HubAddr)
}

func (u *Uplink) setQuarantined(reason string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.status.Quarantined = reason
	if reason != "" {
		u.log.Warn("the hub has quarantined this node: it gets nothing new until an admin has released it", "reason", reason)
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

// session is one connection after its dial.
type session struct {
	u        *Uplink
	conn     *link.Conn
	control  *link.Stream
	observer Reconciler
	// unreadable passes from receive to report why nothing more can be read from the control stream.
	unreadable chan error

	mu      sync.Mutex
	counter uint64
	// acked is the last report that the hub has taken in; acks is signalled when it grows.
	acked uint64
	acks  chan struct{}
	// sent are the removed members in each report that the hub has not acknowledged.
	sent  map[uint64][]string
	first bool
}

// greet exchanges hello and welcome.
func (s *session) greet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	var err error
	s.control, err = s.conn.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	if err != nil {
		return err
	}
	if err := s.control.SetDeadline(time.Now().Add(helloTimeout)); err != nil {
		return err
	}
	hello := &protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: s.hello(ctx)}}
	asked := time.Now()
	if err := s.send(hello); err != nil {
		return err
	}
	failpoint.Hit("agent/session/greeted")
	answer := &protocol.HubMessage{}
	if err := s.control.Receive(answer, protocol.MaxControlBytes); err != nil {
		return err
	}
	if bye := answer.GetGoAway(); bye != nil {
		return refusedSession(bye.GetReason())
	}
	welcome := answer.GetWelcome()
	if welcome == nil {
		return errors.New("the hub does not answer the hello")
	}
	if t := welcome.GetHubTime(); t != nil {
		// The hub wrote its time down before the answer's way here.
		took, way := time.Since(asked), s.conn.OneWay()
		s.observer.SyncClock(ctx, t.AsTime().Add(min(way, took)), max(took-way, 0))
	}
	s.u.lastSession = welcome.GetSessionNo()
	s.u.setQuarantined(welcome.GetQuarantineReason())
	if welcome.GetNewIncarnation() {
		return s.reincarnate(ctx, errors.New("the store is behind the hub's record"))
	}
	// A hub that has posted what was never sealed here knows more than this store, too.
	err = s.u.store.AcknowledgeUsage(spool.Word{
		Incarnation: s.u.store.Incarnation(), Posted: welcome.GetPostedSegment(), Archived: welcome.GetArchivedSegment(),
		PostedSHA256: welcome.GetPostedSha256(),
	})
	if errors.Is(err, spool.ErrOtherStore) {
		return s.reincarnate(ctx, err)
	}
	if err != nil {
		return err
	}
	failpoint.Hit("agent/session/welcomed")
	if posted := welcome.GetPostedSegment(); posted < s.u.store.Spool().Marks.Posted {
		if err := s.rewind(ctx, posted); err != nil {
			return err
		}
	}
	if welcome.GetRequestStateUpload() {
		if err := s.uploadState(ctx); err != nil {
			return err
		}
	}
	return s.control.SetDeadline(time.Time{})
}

// reincarnate takes a new incarnation and ends the session, which was opened under the old one.
func (s *session) reincarnate(ctx context.Context, why error) error {
	if err := s.u.store.TakeNewIncarnation(s.u.clock.Now()); err != nil {
		return err
	}
	s.u.log.WarnContext(ctx, "this store takes a new incarnation", "incarnation", s.u.store.Incarnation(), "reason", why)
	return errDialAgain
}

func (s *session) hello(ctx context.Context) *protocol.Hello {
	accepted, usage := s.u.store.Accepted(), s.u.store.Spool()
	h := &protocol.Hello{
		ProtocolVersion: protocol.Version, AgentVersion: s.u.cfg.AgentVersion, Incarnation: usage.Incarnation,
		Epoch: accepted.Epoch, Generation: accepted.Generation, StateSha256: accepted.SHA256,
		BundleVersion: s.u.store.Bundle().Version(), LastSegment: usage.LastSegment, Features: accept.Features(),
		LastSession: s.u.lastSession,
	}
	if s.u.cfg.Facts != nil {
		h.Facts = s.u.cfg.Facts(ctx)
	}
	return h
}

func (s *session) send(m *protocol.NodeMessage) error {
	if err := s.control.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	return s.control.Send(m)
}

// receive takes what the hub sends, one message after the other: order is part of its meaning.
func (s *session) receive(ctx context.Context) error {
	for {
		m := &protocol.HubMessage{}
		err := s.control.Receive(m, protocol.MaxControlBytes)
		if errors.Is(err, link.ErrTooLarge) {
			s.refuseTooLarge(err)
			<-ctx.Done() // report ends the session
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		switch x := m.GetMessage().(type) {
		case *protocol.HubMessage_PushState:
			err = s.answer(s.u.acceptor.State(ctx, x.PushState.GetEnvelope(), x.PushState.GetParts()))
		case *protocol.HubMessage_PushLeases:
			err = s.answer(s.u.acceptor.Leases(x.PushLeases.GetEnvelope()))
		case *protocol.HubMessage_PushBundle:
			err = s.answer(s.u.acceptor.Bundle(x.PushBundle.GetEnvelope()))
		case *protocol.HubMessage_ReportAck:
			err = s.acknowledged(x.ReportAck.GetCounter())
		case *protocol.HubMessage_GoAway:
			return fmt.Errorf("%w: %s", errGoAway, x.GoAway.GetReason())
		case *protocol.HubMessage_Welcome, nil:
			// A message of a newer hub that this agent does not know is no reason to part.
		}
		if err != nil {
			return err
		}
	}
}

func (s *session) answer(a *protocol.Ack, _ error) error {
	if a == nil {
		return nil // the refusal is queued
	}
	err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{Ack: a}})
	failpoint.Hit("agent/accept/answered")
	return err
}

// refuseTooLarge queues the refusal and leaves closing the stream, which cannot be read any further, to report: only
// the goroutine that sends reports and refusals can close it without cutting one off.
func (s *session) refuseTooLarge(cause error) {
	s.u.acceptor.RefuseUnread(protocol.Refuse(protocol.RefusalTooLarge, "a message has over %d bytes",
		protocol.MaxControlBytes))
	s.unreadable <- cause
}

// sendLastRefusals sends what is queued and gives the hub time to read it before the connection goes.
func (s *session) sendLastRefusals(ctx context.Context, cause error) error {
	s.sendRefusals()
	_ = s.control.CloseWrite()
	pause(ctx, lastRefusalWait)
	return cause
}

// sendRefusals empties the queue and reports whether it could; what cannot be sent waits for the next session.
func (s *session) sendRefusals() bool {
	for n := s.u.acceptor.NextRefusal(); n != nil; n = s.u.acceptor.NextRefusal() {
		if err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: n}}); err != nil {
			return false
		}
		s.u.acceptor.RefusalSent(n)
	}
	return true
}

// report sends the observed state on change and every interval, and refusals as they come.
func (s *session) report(ctx context.Context) error {
	ticker := time.NewTicker(s.u.cfg.ReportInterval)
	defer ticker.Stop()
	for {
		if !s.sendRefusals() {
			return errors.New("the control stream is closed")
		}
		if r := s.observer.Report(); r.Passes > 0 {
			if err := s.sendReport(r); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		case <-s.u.observed:
			if !s.settle(ctx) {
				return ctx.Err()
			}
		case <-s.u.acceptor.Queued():
		case cause := <-s.unreadable:
			return s.sendLastRefusals(ctx, cause)
		}
	}
}

// settle waits until the hub has taken in the last report: what changes meanwhile becomes one report, however busy it
// is, and one change alone is reported at once. It reports whether ctx still lives.
func (s *session) settle(ctx context.Context) bool {
	limit := time.NewTimer(ackPause)
	defer limit.Stop()
	for {
		s.mu.Lock()
		taken := s.acked >= s.counter
		s.mu.Unlock()
		if taken {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-limit.C:
			return true
		case <-s.acks:
		}
	}
}

func (s *session) sendReport(r agent.Report) error {
	now := s.u.clock.Now()
	members := s.u.store.Members()
	s.mu.Lock()
	s.counter++
	out := &protocol.Report{
		Counter: s.counter, At: timestamppb.New(now), Epoch: r.Epoch, Generation: r.Generation,
		Conditions: r.Conditions,
	}
	var removed []string
	for _, w := range r.Workloads {
		if w.GetRemoval() != nil {
			old := now.Sub(w.GetRemoval().GetAt().AsTime()) > tombstoneReports
			if members[w.GetMemberId()].Reported && (!s.first || old) {
				continue
			}
			removed = append(removed, w.GetMemberId())
		}
		out.Workloads = append(out.Workloads, w)
	}
	s.first = false
	if len(removed) > 0 {
		s.sent[s.counter] = removed
	}
	s.mu.Unlock()
	err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: out}})
	failpoint.Hit("agent/report/sent")
	return err
}

// acknowledged notes that the hub has stored a report: the proofs in it need no repeating.
func (s *session) acknowledged(counter uint64) error {
	s.mu.Lock()
	s.acked = max(s.acked, counter)
	select {
	case s.acks <- struct{}{}:
	default:
	}
	ids := s.sent[counter]
	for c := range s.sent {
		if c <= counter {
			delete(s.sent, c)
		}
	}
	s.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	failpoint.Hit("agent/report/acknowledged")
	return s.u.store.AcknowledgeRemovals(ids)
}

// pause waits and reports whether ctx still lives.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// away is the answer to whoever needs a hub when there is none.
func away() error {
	return fault.New(fault.Unavailable, agent.CodeHubAway, "There is no session to a hub at the moment.", nil)
}

// RegistryTLS verifies the registry as a hub and shows this node's certificate, without which a pull credential is
// void.
func (u *Uplink) RegistryTLS() (*tls.Config, error) {
	if !u.creds.Enrolled() {
		return nil, away()
	}
	return hubTLS(u.store, u.clock, u.creds.Certificate), nil
}
