package command_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
)

// nodeStep is a change of the node by an admin.
func nodeStep(name string, prepare func(w *world), run func(ctx context.Context, s *command.Service, m command.Meta,
	nodeID string) error,
) atomicStep {
	return atomicStep{name, "nodes", func(w *world) func(commandtest.Around) error {
		prepare(w)
		m := w.Admin("k")
		return w.command(func(ctx context.Context, s *command.Service) error { return run(ctx, s, m, w.Node) })
	}}
}

// law08FleetCommandsAreOneTransaction is law08DataEventAndAuditAreOneTransaction for the commands on nodes.
func law08FleetCommandsAreOneTransaction(t *testing.T) {
	asItIs := func(*world) {}
	lost := nodeStep("remove lost node", func(w *world) {
		w.Running()
		w.silent()
	}, func(ctx context.Context, s *command.Service, m command.Meta, nodeID string) error {
		return s.RemoveNode(ctx, m, nodeID, command.RemoveNodeInput{Lost: true, Reason: "burnt"})
	})
	lost.table = "app_instances"
	requireAtomic(t, []atomicStep{
		nodeStep("drain node", asItIs, func(ctx context.Context, s *command.Service, m command.Meta, nodeID string) error {
			return s.DrainNode(ctx, m, nodeID)
		}),
		nodeStep("undrain node", (*world).drained, func(ctx context.Context, s *command.Service, m command.Meta,
			nodeID string,
		) error {
			return s.UndrainNode(ctx, m, nodeID)
		}),
		nodeStep("remove node", (*world).drained, func(ctx context.Context, s *command.Service, m command.Meta,
			nodeID string,
		) error {
			return s.RemoveNode(ctx, m, nodeID, command.RemoveNodeInput{Reason: "sold"})
		}),
		lost,
		nodeStep("release node", func(w *world) {
			w.Tx(func(ctx context.Context, tx db.Tx) error {
				_, _, err := fleet.Quarantine(ctx, tx, w.Node, fleet.ReasonIdentityUsedTwice, w.Now)
				return err
			})
		}, func(ctx context.Context, s *command.Service, m command.Meta, nodeID string) error {
			return s.ReleaseNode(ctx, m, nodeID)
		}),
		nodeStep("ban node", asItIs, func(ctx context.Context, s *command.Service, m command.Meta, nodeID string) error {
			return s.BanNode(ctx, m, nodeID, "stolen")
		}),
	})
}

// law08CredentialsAreOneTransaction does so for the commands that let nodes in.
func law08CredentialsAreOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{
		{"create join token", "join_tokens", func(w *world) func(commandtest.Around) error {
			m := w.Admin("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Sealer = idempotency.Plain{}
				return second(s.CreateJoinToken(ctx, m, fleet.NewToken{}))
			})
		}},
		{"enroll node", "nodes", func(w *world) func(commandtest.Around) error {
			w.Tx(func(ctx context.Context, tx db.Tx) error {
				_, err := fleet.CreateToken(ctx, tx, fleet.NewToken{ID: db.NewID(), Secret: "secret", CreatedBy: "admin"}, w.Now)
				return err
			})
			keys, key := w.keys(), w.key()
			in := command.EnrollNodeInput{JoinToken: "secret", Hostname: "n2", CSRPEM: hubtest.CSR(w.T, key)}
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Keys, s.CertificateTTL = keys, time.Hour
				return second(s.EnrollNode(ctx, command.Meta{CorrelationID: "c", Now: w.Now}, in))
			})
		}},
		{"renew node", "nodes", func(w *world) func(commandtest.Around) error {
			keys, key := w.keys(), w.key()
			w.Exec(`UPDATE nodes SET public_key = $2 WHERE id = $1`, w.Node, []byte(key.Public().(ed25519.PublicKey)))
			csr := hubtest.CSR(w.T, key)
			in := command.RenewNodeInput{
				NodeID:    w.Node,
				CSRPEM:    csr,
				IssuedAt:  "now",
				Signature: ed25519.Sign(key, fleet.RenewalMessage(w.Node, csr, "now")),
			}
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Keys, s.CertificateTTL = keys, 2*time.Hour
				return second(s.RenewNode(ctx, command.Meta{CorrelationID: "c", Now: w.Now}, in))
			})
		}},
	})
}

// key is a node's.
func (w *world) key() ed25519.PrivateKey {
	w.T.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	return key
}

// keys are the hub's.
func (w *world) keys() *trust.Keys {
	w.T.Helper()
	options := trust.InitOptions{
		DataDir:          filepath.Join(w.T.TempDir(), "data"),
		OfflineDir:       filepath.Join(w.T.TempDir(), "keys"),
		TrustDomain:      "gpuaas.test",
		Passphrase:       hubtest.Passphrase,
		Now:              w.Now,
		ScryptWorkFactor: 8,
	}
	_, err := trust.Init(options)
	require.NoError(w.T, err)
	keys, err := trust.Open(options.DataDir)
	require.NoError(w.T, err)
	return keys
}
