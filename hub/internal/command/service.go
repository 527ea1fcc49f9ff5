package command

import (
	"context"
	"net/netip"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/keylock"
	"github.com/gpuaas/gpuaas/protocol"
)

// Service runs the commands, one method each. A method says who may call it and calls the slices inside one transaction
// (run, once). It needs only the fields that it reads.
type Service struct {
	DB *db.DB
	// Sealer encrypts answers that hold a secret, so that they can be replayed.
	Sealer idempotency.Sealer
	Keys   *trust.Keys
	// Bundle returns the newest trust bundle.
	Bundle   func() protocol.Bundle
	Registry *artifact.Registry
	// Identity is where people log in beside the hub itself; it may be nil.
	Identity *IdentityProvider
	// APIURL is where the apps of instances that have a service account reach the hub.
	APIURL string
	// LeaseDuration is the longest lease that a member gets at a start.
	LeaseDuration time.Duration
	// TokenTTL is how long tokens of service accounts count; zero is iam.DefaultTokenTTL.
	TokenTTL time.Duration
	// CertificateTTL of each node certificate.
	CertificateTTL time.Duration

	// MayDial reports whether webhooks may reach an address.
	MayDial func(netip.Addr) bool

	// around is what a test puts around each transaction; it may be nil.
	around func(tx db.Tx, body func(db.Tx) error) error
	// minVersionOf replaces the bundle's lowest versions in tests.
	minVersionOf func(appSlug string) string

	projects keylock.Map
	// hashing bounds the memory for hashes of passwords: one at a time.
	hashing keylock.Map
}

// run runs a command: check and fn share one transaction, which may start afresh. fn runs where the resource has the
// version that the caller wants to change.
func run[G, T any](ctx context.Context, s *Service, check access.Check[G],
	fn func(tx db.Tx, granted G) (T, error),
) (T, error) {
	return transact(ctx, s, check, func(tx db.Tx, granted G) (T, error) {
		return meet(ctx, tx, func() (T, error) { return fn(tx, granted) })
	})
}

func transact[G, T any](ctx context.Context, s *Service, check access.Check[G],
	fn func(tx db.Tx, granted G) (T, error),
) (T, error) {
	out, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (out T, err error) {
		body := func(tx db.Tx) error {
			granted, err := check(ctx, tx)
			if err != nil {
				return err
			}
			out, err = fn(tx, granted)
			return err
		}
		if s.around != nil {
			err = s.around(tx, body)
		} else {
			err = body(tx)
		}
		return out, err
	})
	if p := preconditionOf(ctx); p != nil {
		p.over = true
	}
	return out, err
}

// do is run for commands that answer nothing.
func do[G any](ctx context.Context, s *Service, check access.Check[G], fn func(tx db.Tx, granted G) error) error {
	_, err := run(ctx, s, check, func(tx db.Tx, granted G) (struct{}, error) { return struct{}{}, fn(tx, granted) })
	return err
}

// once is run for commands that happen once for each idempotency key: a repeated request gets the first answer.
func once[G, T any](ctx context.Context, s *Service, m Meta, check access.Check[G],
	fn func(tx db.Tx, granted G) (T, error),
) (T, error) {
	return onceSealed(ctx, s, m, idempotency.Plain{}, check, fn)
}

// onceSealed is once for answers that hold a secret; seal encrypts them.
func onceSealed[G, T any](ctx context.Context, s *Service, m Meta, seal idempotency.Sealer, check access.Check[G],
	fn func(tx db.Tx, granted G) (T, error),
) (T, error) {
	return transact(ctx, s, check, func(tx db.Tx, granted G) (T, error) {
		return idempotency.Do(ctx, tx, m.request(), seal, func() (T, error) {
			// A repeated request meets its own change, and gets the first answer.
			return meet(ctx, tx, func() (T, error) { return fn(tx, granted) })
		})
	})
}

// inProject is once under the project's lock: the instances of a project share its wallet, the capacity of its
// allocations and the intents of its nodes, so that in parallel their transactions would only conflict and retry. On
// PostgreSQL those of all projects do: it finds conflicts between pages of indexes, which neighbours share.
func inProject(ctx context.Context, s *Service, m Meta, permission iam.Permission, projectID string,
	fn func(tx db.Tx, project iam.Project) (instance.Instance, error),
) (instance.Instance, error) {
	key := projectID
	if s.DB.Engine() == db.PostgreSQL {
		key = ""
	}
	unlock, err := s.projects.Lock(ctx, key)
	if err != nil {
		return instance.Instance{}, db.Cancelled(err)
	}
	defer unlock()
	i, err := once(ctx, s, m, access.Project(m.Principal, permission, projectID), fn)
	if err == nil {
		failpoint.Hit("hub/command/committed")
	}
	return i, err
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
