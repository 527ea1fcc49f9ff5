package uplink

import (
	"context"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// Names of documents in Accepted and Refused.
const (
	documentState  = "state"
	documentLeases = "leases"
	documentBundle = "bundle"
)

// AcceptState verifies a desired state and stores it, wherever it comes from: a hub, a file, a neighbour. A refusal is
// returned, and reported to the hub as soon as there is one.
func (u *Uplink) AcceptState(ctx context.Context, env *protocol.Envelope, parts [][]byte) (*protocol.Accepted, error) {
	v, err := protocol.VerifyState(env, u.store.Bundle(), u.creds.Node())
	if protocol.RefusalOf(err) == protocol.RefusalBundleOld && u.refreshBundle(ctx) == nil {
		v, err = protocol.VerifyState(env, u.store.Bundle(), u.creds.Node())
	}
	if err == nil {
		failpoint.Hit("agent/accept/verified")
		err = u.store.AcceptState(v, parts)
	}
	if err != nil {
		u.noteRefusal(documentState, v.Message(), err)
		return nil, err
	}
	u.log.InfoContext(ctx, "state accepted", "epoch", v.Message().GetEpoch(), "generation", v.Message().GetGeneration())
	return &protocol.Accepted{Document: documentState, Epoch: v.Message().GetEpoch(), Generation: v.Message().GetGeneration()}, nil
}

// AcceptLeases verifies a batch of leases and stores those that are newer.
func (u *Uplink) AcceptLeases(env *protocol.Envelope) (*protocol.Accepted, error) {
	v, err := protocol.VerifyLeases(env, u.store.Bundle(), u.creds.Node())
	if err == nil {
		failpoint.Hit("agent/leases/verified")
		err = u.store.AcceptLeases(v)
	}
	if err != nil {
		u.noteRefusal(documentLeases, nil, err)
		return nil, err
	}
	return &protocol.Accepted{Document: documentLeases, Epoch: v.Message().GetEpoch()}, nil
}

// AcceptBundle stores the next trust bundle.
func (u *Uplink) AcceptBundle(env *protocol.Envelope) (*protocol.Accepted, error) {
	if err := u.store.AcceptBundle(env); err != nil {
		u.noteRefusal(documentBundle, nil, err)
		return nil, err
	}
	b := u.store.Bundle()
	return &protocol.Accepted{Document: documentBundle, Epoch: b.Epoch(), Generation: b.Version()}, nil
}

// NoteRefusal reports a document to the hub that was refused before it could be verified.
func (u *Uplink) NoteRefusal(err error) { u.noteRefusal(documentState, nil, err) }

// noteRefusal queues a refusal for the hub and keeps it for the owner. state may be nil.
func (u *Uplink) noteRefusal(document string, state *protocol.DesiredState, err error) {
	r := &protocol.Refused{
		Document: document, Epoch: state.GetEpoch(), Generation: state.GetGeneration(), Reason: refusalOf(err), Detail: refusalDetail(err),
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
