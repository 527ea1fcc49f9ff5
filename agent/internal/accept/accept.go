// Package accept verifies and stores signed documents, from the link, the local socket and, at each start, the disk,
// and queues refusals for the hub. It neither decides on admission (agent/admission) nor carries documents
// (agent/internal/uplink, agent/internal/local) nor keeps them (agent/internal/state).
package accept

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxRefusals bounds the refusals that wait for a session; the oldest are dropped first.
const maxRefusals = 64

// Config is what an Acceptor needs. FetchBundle and Log may be nil.
type Config struct {
	Store *state.Store
	// Node is this node's identity in signed documents.
	Node func() protocol.NodeIdentity
	// FetchBundle asks the hub for the trust bundle after the given version.
	FetchBundle func(ctx context.Context, version uint64) (*protocol.Envelope, error)
	Log         *slog.Logger
}

// Acceptor verifies documents for one node and stores those that verify. Its methods may be called at the same time.
type Acceptor struct {
	cfg    Config
	queued notify.Signal

	mu          sync.Mutex
	refusals    []*protocol.Nack
	lastRefusal string
}

// New makes an acceptor.
func New(cfg Config) *Acceptor {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Acceptor{cfg: cfg, queued: notify.NewSignal()}
}

// State verifies a desired state and stores it with the documents that came along. A state signed under a newer trust
// bundle makes it fetch that bundle first. A refusal is returned and queued for the hub.
func (a *Acceptor) State(ctx context.Context, env *protocol.Envelope, parts [][]byte) (*protocol.Ack, error) {
	m, err := a.verifyState(env, parts)
	for protocol.RefusalOf(err) == protocol.Nack_BUNDLE_TOO_OLD && a.refreshBundle(ctx) {
		m, err = a.verifyState(env, parts)
	}
	if err != nil {
		a.refuse(protocol.Envelope_STATE, m, err)
		return nil, err
	}
	a.cfg.Log.InfoContext(ctx, "state accepted", slog.Uint64("epoch", m.GetEpoch()),
		slog.Uint64("generation", m.GetGeneration()))
	return &protocol.Ack{Document: protocol.Envelope_STATE, Epoch: m.GetEpoch(), Generation: m.GetGeneration()}, nil
}

// verifyState returns what could be read of a refused state, or nil.
func (a *Acceptor) verifyState(env *protocol.Envelope, parts [][]byte) (*protocol.DesiredState, error) {
	v, err := protocol.VerifyState(env, a.cfg.Store.Bundle(), a.cfg.Node())
	if err != nil {
		return v.Message(), err
	}
	failpoint.Hit("agent/accept/verified")
	return v.Message(), a.cfg.Store.AcceptState(v, parts)
}

// refreshBundle fetches and stores the next trust bundle, and reports whether it is newer. After a change of the root
// the newest bundle is several steps away.
func (a *Acceptor) refreshBundle(ctx context.Context) bool {
	if a.cfg.FetchBundle == nil {
		return false
	}
	before := a.cfg.Store.Bundle().Version()
	env, err := a.cfg.FetchBundle(ctx, before)
	if err == nil {
		err = a.cfg.Store.AcceptBundle(env)
	}
	if err != nil {
		a.cfg.Log.WarnContext(ctx, "cannot refresh the trust bundle", slog.Any("error", err))
		return false
	}
	return a.cfg.Store.Bundle().Version() > before
}

// Leases verifies a batch of leases and stores those that are newer. A refusal is returned and queued for the hub.
func (a *Acceptor) Leases(env *protocol.Envelope) (*protocol.Ack, error) {
	v, err := protocol.VerifyLeases(env, a.cfg.Store.Bundle(), a.cfg.Node())
	if err == nil {
		failpoint.Hit("agent/leases/verified")
		err = a.cfg.Store.AcceptLeases(v)
	}
	if err != nil {
		a.refuse(protocol.Envelope_LEASES, nil, err)
		return nil, err
	}
	return &protocol.Ack{Document: protocol.Envelope_LEASES, Epoch: v.Message().GetEpoch()}, nil
}

// Bundle verifies the next trust bundle by the present one and stores it. A refusal is returned and queued for the hub.
func (a *Acceptor) Bundle(env *protocol.Envelope) (*protocol.Ack, error) {
	if err := a.cfg.Store.AcceptBundle(env); err != nil {
		a.refuse(protocol.Envelope_BUNDLE, nil, err)
		return nil, err
	}
	b := a.cfg.Store.Bundle()
	return &protocol.Ack{Document: protocol.Envelope_BUNDLE, Epoch: b.Epoch(), Generation: b.Version()}, nil
}

// RefuseUnread queues the refusal of a document that could not be read, and therefore not be verified.
func (a *Acceptor) RefuseUnread(err error) { a.refuse(protocol.Envelope_STATE, nil, err) }

// refuse queues a refusal for the hub and remembers it for the machine's owner. m may be nil.
func (a *Acceptor) refuse(document protocol.Envelope_Kind, m *protocol.DesiredState, err error) {
	// An error that is no refusal is the disk's fault, not the document's.
	reason, detail := protocol.Nack_UNAVAILABLE, fault.As(err).Public
	if refusal, is := errors.AsType[*protocol.RefusalError](err); is {
		reason, detail = refusal.Reason, refusal.Detail
	}
	n := &protocol.Nack{
		Document:   document,
		Epoch:      m.GetEpoch(),
		Generation: m.GetGeneration(),
		Reason:     reason,
		Detail:     detail,
	}
	a.cfg.Log.Warn("document refused", slog.String("document", document.Text()),
		slog.String("reason", n.GetReason().Text()),
		slog.String("detail", n.GetDetail()), slog.Any("error", err))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lastRefusal = document.Text() + ": " + n.GetReason().Text() + ": " + n.GetDetail()
	if len(a.refusals) == maxRefusals {
		a.refusals = a.refusals[1:]
	}
	a.refusals = append(a.refusals, n)
	a.queued.Send()
}

// Queued is signalled when a refusal was queued.
func (a *Acceptor) Queued() <-chan struct{} { return a.queued }

// NextRefusal returns the oldest refusal in the queue; nil when there is none.
func (a *Acceptor) NextRefusal() *protocol.Nack {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.refusals) == 0 {
		return nil
	}
	return a.refusals[0]
}

// RefusalSent removes a refusal from the queue, unless a newer one has replaced it.
func (a *Acceptor) RefusalSent(n *protocol.Nack) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.refusals) > 0 && a.refusals[0] == n {
		a.refusals = a.refusals[1:]
	}
}

// LastRefusal is the newest refusal, for people; empty when there was none.
func (a *Acceptor) LastRefusal() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lastRefusal
}
