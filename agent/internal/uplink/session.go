package uplink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// session dials, exchanges hellos and serves until the connection ends. It returns how long it served.
func (u *Uplink) session(ctx context.Context, observer Reconciler) (lasted time.Duration, err error) {
	if !u.store.Bundle().Valid() {
		if err := u.refetchBundle(ctx); err != nil {
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
		acks:       notify.NewSignal(),
		reported:   map[string]reportedStatus{},
	}
	ctx, cancel := context.WithCancel(ctx)
	code, reason := link.CodeOK, "the agent is stopping"
	var workers sync.WaitGroup
	defer func() {
		cancel()
		_ = conn.Close(code, reason)
		workers.Wait()
	}()
	if err := s.exchangeHello(ctx); err != nil {
		return 0, err
	}
	u.connected(conn)
	began := time.Now()
	ended := make(chan error, 5)
	for _, work := range []func(context.Context) error{s.receive, s.report, s.reportPulls, s.upload, s.serveTunnels} {
		workers.Go(func() { ended <- work(ctx) })
	}
	select {
	case <-ctx.Done():
		return time.Since(began), ctx.Err()
	case err := <-ended:
		code, reason = link.CodeProtocol, "the session cannot go on"
		if connErr := conn.Err(); connErr != nil && !errors.Is(err, hubsession.ErrGoAway) {
			err = connErr
		}
		if how, known := link.CloseCode(err); known && how == link.CodeShutdown {
			err = fmt.Errorf("%w: %w", hubsession.ErrGoAway, err)
		}
		return time.Since(began), err
	}
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
	reports hubsession.Reports
	// reportedAt is when the newest report was sent, by the counter since boot.
	reportedAt time.Duration
	// acks wakes when the hub has acknowledged a report.
	acks notify.Signal

	// reported are the statuses that were sent in this session, by member; report alone uses it.
	reported map[string]reportedStatus

	pullsMu sync.Mutex
	// pulls are those that the hub was told of last.
	pulls []*protocol.ImagePull
}

// exchangeHello exchanges hello and welcome.
func (s *session) exchangeHello(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, hubsession.HelloTimeout)
	defer cancel()
	var err error
	s.control, err = s.conn.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	if err != nil {
		return err
	}
	if err := s.control.SetDeadline(time.Now().Add(hubsession.HelloTimeout)); err != nil {
		return err
	}
	hello := &protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: s.hello(ctx)}}
	asked := s.u.clock.SinceBoot()
	if err := s.send(hello); err != nil {
		return err
	}
	failpoint.Hit("agent/session/hello_sent")
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
	s.syncClock(ctx, welcome.GetHubTime(), asked)
	s.u.lastSession = welcome.GetSessionNo()
	s.u.setQuarantined(welcome.GetQuarantineReason())
	if err := hubsession.Open(sessionStore{s.u}, hubsession.Welcome{
		NewIncarnation: welcome.GetNewIncarnation(),
		HubProgress: spool.HubProgress{
			Incarnation:  s.u.store.Incarnation(),
			Posted:       welcome.GetPostedSegment(),
			Archived:     welcome.GetArchivedSegment(),
			PostedSHA256: welcome.GetPostedSha256(),
		},
	}); err != nil {
		return err
	}
	if welcome.GetRequestStateUpload() {
		if err := s.uploadState(ctx); err != nil {
			return err
		}
	}
	return s.control.SetDeadline(time.Time{})
}

// syncClock takes over the hub's time from an answer to what was asked then, by the counter since boot: unlike Go's
// monotonic time it counts while the machine sleeps. The hub read its clock before the answer travelled here.
func (s *session) syncClock(ctx context.Context, hub *timestamppb.Timestamp, asked time.Duration) {
	if hub == nil {
		return
	}
	took, way := s.u.clock.SinceBoot()-asked, s.conn.OneWay()
	s.observer.SyncClock(ctx, hub.AsTime().Add(min(way, took)), max(took-way, 0))
}

// sessionStore is the node's store as hubsession changes it.
type sessionStore struct{ u *Uplink }

func (a sessionStore) PostedSegment() uint64 { return a.u.store.Spool().Marks.Posted }

func (a sessionStore) AcknowledgeUsage(hub spool.HubProgress) error {
	if err := a.u.store.AcknowledgeUsage(hub); err != nil {
		return err
	}
	failpoint.Hit("agent/session/welcomed")
	return nil
}

func (a sessionStore) RewindUsage(posted uint64) error {
	before := a.PostedSegment()
	if err := a.u.store.RewindUsage(posted); err != nil {
		return err
	}
	a.u.log.Warn("the hub was restored: usage is sent again", slog.Uint64("from_segment", posted+1),
		slog.Uint64("to_segment", before))
	return nil
}

func (a sessionStore) TakeNewIncarnation(why error) error {
	lost, err := a.u.store.TakeNewIncarnation(a.u.clock.Now())
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		a.u.log.Error("usage is lost: the disk does not give these segments any more", slog.Any("segments", lost))
	}
	a.u.log.Warn("this store takes a new incarnation", slog.String("incarnation", a.u.store.Incarnation()),
		slog.Any("reason", why))
	return nil
}

func (s *session) hello(ctx context.Context) *protocol.Hello {
	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()
	accepted, usage := s.u.store.Accepted(), s.u.store.Spool()
	h := &protocol.Hello{
		ProtocolVersion: protocol.Version, AgentVersion: s.u.cfg.AgentVersion, Incarnation: usage.Incarnation,
		Epoch: accepted.Epoch, Generation: accepted.Generation, StateSha256: accepted.SHA256,
		BundleVersion: s.u.store.Bundle().Version(), LastSegment: usage.LastSegment, Features: s.u.features(),
		LastSession: s.u.lastSession,
	}
	if s.u.cfg.Facts != nil {
		h.Facts = s.u.cfg.Facts(ctx)
	}
	return h
}

func (s *session) send(m *protocol.NodeMessage) error { return sendWithin(s.control, m) }

// receive handles the hub's messages one after the other: their order has a meaning.
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
			err = s.acceptState(ctx, x.PushState)
		case *protocol.HubMessage_PushLeases:
			err = s.answer(s.u.acceptor.Leases(x.PushLeases.GetEnvelope()))
		case *protocol.HubMessage_PushBundle:
			err = s.answer(s.u.acceptor.Bundle(x.PushBundle.GetEnvelope()))
		case *protocol.HubMessage_ReportAck:
			err = s.acknowledged(ctx, x.ReportAck)
		case *protocol.HubMessage_GoAway:
			return fmt.Errorf("%w: %s", hubsession.ErrGoAway, x.GoAway.GetReason())
		case *protocol.HubMessage_Welcome, nil:
			// A message of a newer hub that this agent does not know is no reason to part.
		}
		if err != nil {
			return err
		}
	}
}

// acceptState accepts a state in the trace of the hub's push.
func (s *session) acceptState(ctx context.Context, m *protocol.PushState) error {
	ctx, end := traced(ctx, m.GetTraceparent(), "accept state")
	ack, err := s.u.acceptor.State(ctx, m.GetEnvelope(), m.GetParts())
	end(err)
	return s.answer(ack, err)
}

func (s *session) answer(a *protocol.Ack, _ error) error {
	if a == nil {
		return nil // the refusal is queued
	}
	err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{Ack: a}})
	failpoint.Hit("agent/accept/acknowledged")
	return err
}

// refuseTooLarge queues the refusal and leaves closing the stream, which cannot be read any further, to report: only
// the goroutine that sends reports and refusals can close it without cutting one off.
func (s *session) refuseTooLarge(cause error) {
	s.u.acceptor.RefuseUnread(protocol.Refuse(protocol.Nack_TOO_LARGE, "a message has over %d bytes",
		protocol.MaxControlBytes))
	s.unreadable <- cause
}

// sendLastRefusals sends the queued refusals and gives the hub time to read them before the connection ends.
func (s *session) sendLastRefusals(ctx context.Context, cause error) error {
	s.sendRefusals()
	_ = s.control.CloseWrite()
	loop.Pause(ctx, lastRefusalWait)
	return cause
}

// sendRefusals sends the queued refusals. It returns false if a refusal could not be sent; that one and those after it
// wait for the next session.
func (s *session) sendRefusals() bool {
	for n := s.u.acceptor.NextRefusal(); n != nil; n = s.u.acceptor.NextRefusal() {
		if err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: n}}); err != nil {
			return false
		}
		s.u.acceptor.RefusalSent(n)
	}
	return true
}

// features are what workloads on this node may need.
func (u *Uplink) features() []string {
	return slices.DeleteFunc(admission.Features(), func(f string) bool { return slices.Contains(u.cfg.LacksFeatures, f) })
}
