package command

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/keylock"
	"github.com/gpuaas/gpuaas/protocol"
)

// Service runs the commands, one method each. A method checks who may call it, opens the transaction, and calls the
// slices inside it. A command needs only the fields that its method reads.
type Service struct {
	DB *db.DB
	// Sealer encrypts answers that hold a secret, so that they can be replayed.
	Sealer Sealer
	Keys   *trust.Keys
	// Bundle returns the newest trust bundle.
	Bundle   func() protocol.Bundle
	Registry *artifact.Registry
	// LeaseDuration is the longest lease that a member gets at a start.
	LeaseDuration time.Duration
	// CertificateTTL of each node certificate.
	CertificateTTL time.Duration

	// EnqueueNode tells the dispatcher that a node's desired state has changed. It is called after the commit.
	EnqueueNode func(nodeID string)
	// Disconnect ends a node's connection; ShutOut also refuses its next handshakes. Both are called after the commit.
	Disconnect, ShutOut func(nodeID, reason string)
	Log                 *slog.Logger

	// minVersionOf replaces the bundle's lowest versions in tests.
	minVersionOf func(appSlug string) string

	projects keylock.Map
}

// withProjectLock runs transactions on the same project one at a time: the instances of a project share its wallet,
// the capacity of its allocations and the intents of its nodes, so that in parallel they would only conflict and retry.
func (s *Service) withProjectLock(ctx context.Context, projectID string,
	fn func(tx db.Tx) (instanceResult, error),
) (instanceResult, error) {
	unlock, err := s.projects.Lock(ctx, projectID)
	if err != nil {
		return instanceResult{}, fault.New(fault.Unavailable, db.CodeCancelled, "The request ended before it could be done.",
			err)
	}
	defer unlock()
	return db.RunTx(ctx, s.DB, fn)
}

// revoked reports whether the trust bundle has revoked a key.
func (s *Service) revoked(keyID string) bool { return s.Bundle().Revoked(keyID) }

// minVersion returns the lowest version of an app that the trust bundle lets start; empty for any.
func (s *Service) minVersion(appSlug string) string {
	if s.minVersionOf != nil {
		return s.minVersionOf(appSlug)
	}
	return s.Bundle().MinVersion(appSlug)
}
