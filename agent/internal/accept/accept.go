// Package accept decides what counts: it verifies signed documents, whatever way they came and again from the disk at
// each start, and judges whether a publisher admits a workload. It neither carries documents (agent/internal/uplink,
// agent/internal/local) nor keeps them (agent/internal/state).
package accept

import (
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// Names of documents in Accepted and Refused.
const (
	DocumentState  = "state"
	DocumentLeases = "leases"
	DocumentBundle = "bundle"
)

// Acceptor verifies documents for one node and stores those that count.
type Acceptor struct {
	Store *state.Store
	// Node is who this node is in signed documents.
	Node func() protocol.NodeIdentity
}

// State verifies a desired state and stores it with the documents that came along. On a refusal it returns what could
// be read of it, or nil.
func (a *Acceptor) State(env *protocol.Envelope, parts [][]byte) (*protocol.DesiredState, error) {
	v, err := protocol.VerifyState(env, a.Store.Bundle(), a.Node())
	if err != nil {
		return v.Message(), err
	}
	failpoint.Hit("agent/accept/verified")
	return v.Message(), a.Store.AcceptState(v, parts)
}

// Leases verifies a batch of leases and stores those that are newer.
func (a *Acceptor) Leases(env *protocol.Envelope) (*protocol.LeaseBatch, error) {
	v, err := protocol.VerifyLeases(env, a.Store.Bundle(), a.Node())
	if err != nil {
		return nil, err
	}
	failpoint.Hit("agent/leases/verified")
	return v.Message(), a.Store.AcceptLeases(v)
}

// Bundle verifies the next trust bundle by the present one and stores it.
func (a *Acceptor) Bundle(env *protocol.Envelope) (protocol.Bundle, error) {
	if err := a.Store.AcceptBundle(env); err != nil {
		return protocol.Bundle{}, err
	}
	return a.Store.Bundle(), nil
}
