package uplink

import (
	"context"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/protocol"
)

// AcceptState passes a desired state on to be verified and stored, wherever it comes from: a hub, a file, a neighbour.
// A refusal is returned, and reported to the hub as soon as there is one.
func (u *Uplink) AcceptState(ctx context.Context, env *protocol.Envelope, parts [][]byte) (*protocol.Ack, error) {
	m, err := u.acceptor.State(env, parts)
	for protocol.RefusalOf(err) == protocol.RefusalBundleOld && u.refreshBundle(ctx) {
		m, err = u.acceptor.State(env, parts)
	}
	if err != nil {
		u.noteRefusal(accept.DocumentState, m, err)
		return nil, err
	}
	u.log.InfoContext(ctx, "state accepted", "epoch", m.GetEpoch(), "generation", m.GetGeneration())
	return &protocol.Ack{Document: accept.DocumentState, Epoch: m.GetEpoch(), Generation: m.GetGeneration()}, nil
}

// AcceptLeases is AcceptState for a batch of leases.
func (u *Uplink) AcceptLeases(env *protocol.Envelope) (*protocol.Ack, error) {
	m, err := u.acceptor.Leases(env)
	if err != nil {
		u.noteRefusal(accept.DocumentLeases, nil, err)
		return nil, err
	}
	return &protocol.Ack{Document: accept.DocumentLeases, Epoch: m.GetEpoch()}, nil
}

// AcceptBundle is AcceptState for the next trust bundle.
func (u *Uplink) AcceptBundle(env *protocol.Envelope) (*protocol.Ack, error) {
	b, err := u.acceptor.Bundle(env)
	if err != nil {
		u.noteRefusal(accept.DocumentBundle, nil, err)
		return nil, err
	}
	return &protocol.Ack{Document: accept.DocumentBundle, Epoch: b.Epoch(), Generation: b.Version()}, nil
}

// NoteRefusal reports a document to the hub that was refused before it could be verified.
func (u *Uplink) NoteRefusal(err error) { u.noteRefusal(accept.DocumentState, nil, err) }

// noteRefusal queues a refusal for the hub and keeps it for the owner. state may be nil.
func (u *Uplink) noteRefusal(document string, state *protocol.DesiredState, err error) {
	r := &protocol.Nack{
		Document: document, Epoch: state.GetEpoch(), Generation: state.GetGeneration(), Reason: refusalOf(err),
		Detail: refusalDetail(err),
	}
	u.log.Warn("document refused", "document", document, "reason", r.GetReason(), "detail", r.GetDetail(), "error", err)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.status.LastRefusal = document + ": " + r.GetReason() + ": " + r.GetDetail()
	if len(u.refusals) == maxRefusals {
		u.refusals = u.refusals[1:]
	}
	u.refusals = append(u.refusals, r)
	select {
	case u.refused <- struct{}{}:
	default:
	}
}
