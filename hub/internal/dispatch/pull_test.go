package dispatch

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// countingTx counts the statements that read.
type countingTx struct {
	db.Tx
	statements int
}

func (c *countingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	c.statements++
	return c.Tx.Query(ctx, sql, args...)
}

func (c *countingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	c.statements++
	return c.Tx.QueryRow(ctx, sql, args...)
}

// However many members a node has: each image that one of them starts with is asked for.
func TestMayPullTakesOneStatement(t *testing.T) {
	d := dbtest.New(t)
	now := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	ask := func(node, repository string) (may bool, statements int, err error) {
		_, _ = db.Query(t.Context(), d, func(tx db.Tx) (bool, error) {
			c := &countingTx{Tx: tx}
			may, err = mayPull(t.Context(), c, node, repository)
			statements = c.statements
			return may, nil
		})
		return may, statements, err
	}
	do := func(fn func(tx db.Tx) error) {
		t.Helper()
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) { return struct{}{}, fn(tx) })
		require.NoError(t, err)
	}
	exec := func(sql string, args ...any) {
		t.Helper()
		do(func(tx db.Tx) error { return tx.Queue(t.Context(), sql, args...) })
	}
	node := enrolled(t, d, now)
	save := func(generation uint64, members ...*protocol.Workload) {
		t.Helper()
		state := plan.NodeState{NodeID: node}
		for _, w := range members {
			data, err := proto.Marshal(w)
			require.NoError(t, err)
			state.Parts = append(state.Parts, plan.Part{ID: w.GetId(), Workload: w, Bytes: data, SHA256: sha256.Sum256(data)})
		}
		payload, err := proto.Marshal(&protocol.DesiredState{Generation: generation, Parts: state.Refs()})
		require.NoError(t, err)
		envelope, err := proto.Marshal(&protocol.Envelope{Payload: payload})
		require.NoError(t, err)
		h := stateHeader{nodeID: node, epoch: 1, generation: generation, keyID: "k", sha256: []byte{1}}
		do(func(tx db.Tx) error {
			return insertState(t.Context(), tx, h, stateHeader{nodeID: node}, nil, envelope, state, now)
		})
	}
	runs := func(id, image string) *protocol.Workload {
		return &protocol.Workload{Id: id, Services: []*protocol.Service{{Name: "main", Image: image}}}
	}

	may, statements, err := ask(node, "a")
	require.NoError(t, err)
	require.False(t, may, "it has no state")
	require.Equal(t, 1, statements)

	upgrading := runs("2", "b@sha256:2")
	upgrading.Fallback = runs("2", "old@sha256:3")
	save(1, runs("1", "gone@sha256:0"))
	save(2, runs("1", "a@sha256:1"), upgrading)
	check := func(atMost int) {
		t.Helper()
		for repository, want := range map[string]bool{
			"a": true, "b": true, "old": true, "gone": false, "": false,
			"a@sha256:1": false,
		} {
			may, statements, err := ask(node, repository)
			require.NoError(t, err)
			require.Equal(t, want, may, repository)
			require.LessOrEqual(t, statements, atMost, repository)
		}
	}
	check(1)
	exec(`UPDATE node_states SET repositories = NULL`)
	check(3)
	save(3)
	may, _, err = ask(node, "a")
	require.NoError(t, err)
	require.False(t, may, "the newest state names nothing")
	save(4, runs("1", "a@sha256:1"))
	exec(`UPDATE nodes SET quarantined_at = $1`, now)
	_, _, err = ask(node, "a")
	require.ErrorContains(t, err, "quarantined")
	may, _, err = ask(db.NewID(), "a")
	require.NoError(t, err)
	require.False(t, may, "another node")
}

func enrolled(t *testing.T, d *db.DB, now time.Time) string {
	t.Helper()
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	secret, err := fleet.NewJoinSecret()
	require.NoError(t, err)
	id, err := db.RunTx(t.Context(), d, func(tx db.Tx) (string, error) {
		if _, err := fleet.CreateToken(t.Context(), tx, fleet.NewToken{ID: db.NewID(), Secret: secret, CreatedBy: "admin"},
			now); err != nil {
			return "", err
		}
		n, _, err := fleet.Enroll(t.Context(), tx, fleet.Enrollment{
			NodeID: db.NewID(), Secret: secret, Hostname: "n1", PublicKey: pub, CertificateExpiresAt: now.Add(time.Hour),
		}, now)
		return n.ID, err
	})
	require.NoError(t, err)
	return id
}
