package command

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// TestLaw08FleetCommandsAreOneTransaction is TestLaw08DataEventAndAuditAreOneTransaction for the commands on nodes.
func TestLaw08FleetCommandsAreOneTransaction(t *testing.T) {
	type run = func(ctx context.Context, tx db.Tx) error
	admin := func(w *world) Meta {
		m := w.meta("k")
		m.Principal = iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}
		return m
	}
	steps := map[string]struct {
		table   string
		prepare func(w *world) run
	}{
		"create join token": {"join_tokens", func(w *world) run {
			m := admin(w)
			in := fleet.NewToken{ID: db.NewID(), Secret: "secret", CreatedBy: m.Principal.ID}
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{Sealer: plain{}}).createJoinToken(ctx, tx, m, in)
				return err
			}
		}},
		"enrol node": {"nodes", func(w *world) run {
			m := Meta{CorrelationID: "c", Now: w.now}
			pub, _, err := ed25519.GenerateKey(rand.Reader)
			require.NoError(w.t, err)
			_, err = db.RunTx(w.t.Context(), w.d, func(tx db.Tx) (fleet.JoinToken, error) {
				return fleet.CreateToken(w.t.Context(), tx, fleet.NewToken{ID: db.NewID(), Secret: "secret", CreatedBy: "admin"},
					w.now)
			})
			require.NoError(w.t, err)
			in := fleet.Enrollment{
				NodeID: db.NewID(), Secret: "secret", Hostname: "n2", PublicKey: pub,
				CertificateExpiresAt: w.now.Add(time.Hour),
			}
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).enrolNode(ctx, tx, m, in)
				return err
			}
		}},
		"renew node": {"nodes", func(w *world) run {
			m := Meta{CorrelationID: "c", Now: w.now}
			pub, key, err := ed25519.GenerateKey(rand.Reader)
			require.NoError(w.t, err)
			w.tx(func(ctx context.Context, tx db.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE nodes SET public_key = $2 WHERE id = $1`, w.node, []byte(pub))
				return err
			})
			in := RenewNodeInput{NodeID: w.node, CSRPEM: "csr", IssuedAt: "now", Signature: ed25519.Sign(key,
				fleet.RenewalMessage(w.node, "csr", "now"))}
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{CertificateTTL: 2 * time.Hour}).renewNode(ctx, tx, m, in, pub)
				return err
			}
		}},
		"drain node": {"nodes", func(w *world) run {
			m := admin(w)
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).drainNode(ctx, tx, m, w.node)
				return err
			}
		}},
		"undrain node": {"nodes", func(w *world) run {
			m := admin(w)
			w.drained()
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).undrainNode(ctx, tx, m, w.node)
				return err
			}
		}},
		"remove node": {"nodes", func(w *world) run {
			m := admin(w)
			w.drained()
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).removeNode(ctx, tx, m, w.node, RemoveNodeInput{Reason: "sold"})
				return err
			}
		}},
		"remove lost node": {"app_instances", func(w *world) run {
			w.running()
			w.silent()
			m := admin(w)
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).removeNode(ctx, tx, m, w.node, RemoveNodeInput{Lost: true, Reason: "burnt"})
				return err
			}
		}},
		"release node": {"nodes", func(w *world) run {
			m := admin(w)
			w.tx(func(ctx context.Context, tx db.Tx) error {
				_, _, err := fleet.Quarantine(ctx, tx, w.node, fleet.ReasonIdentityUsedTwice, m.Now)
				return err
			})
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).releaseNode(ctx, tx, m, w.node)
				return err
			}
		}},
		"ban node": {"nodes", func(w *world) run {
			m := admin(w)
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).banNode(ctx, tx, m, w.node, "stolen")
				return err
			}
		}},
	}
	for name, s := range steps {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			run := s.prepare(w)
			before := w.contents()
			statements := w.brokenAt(0, run, false)
			for n := 1; n <= statements; n++ {
				w.brokenAt(n, run, false)
			}
			require.Equal(t, before, w.contents(), "nothing is left of %d broken attempts", statements)
			w.brokenAt(0, run, true)
			after := w.contents()
			for _, table := range []string{s.table, "events", "audit_rows"} {
				require.NotEqual(t, before[table], after[table], table)
			}
		})
	}
}
