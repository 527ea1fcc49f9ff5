package dispatch

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
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

// pullTest is a node whose states a test saves.
type pullTest struct {
	*testing.T
	db   *db.DB
	node string
	now  time.Time
}

func newPullTest(t *testing.T) pullTest {
	t.Helper()
	d, now := dbtest.New(t), time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	return pullTest{T: t, db: d, node: enrolled(t, d, now), now: now}
}

func (p pullTest) tx(fn func(tx db.Tx) error) {
	p.Helper()
	_, err := db.RunTx(p.Context(), p.db, func(tx db.Tx) (struct{}, error) { return struct{}{}, fn(tx) })
	require.NoError(p, err)
}

// saveState saves a state with these members as the node's newest.
func (p pullTest) saveState(generation uint64, members ...*protocol.Workload) {
	p.Helper()
	p.saveStateOf(1, generation, members...)
}

func (p pullTest) saveStateOf(epoch, generation uint64, members ...*protocol.Workload) {
	p.Helper()
	state := plan.NodeState{NodeID: p.node}
	for _, w := range members {
		data, err := proto.Marshal(w)
		require.NoError(p, err)
		state.Parts = append(state.Parts, plan.Part{ID: w.GetId(), Workload: w, Bytes: data, SHA256: sha256.Sum256(data)})
	}
	payload, err := proto.Marshal(&protocol.DesiredState{Epoch: epoch, Generation: generation, Parts: state.Refs()})
	require.NoError(p, err)
	envelope, err := proto.Marshal(&protocol.Envelope{Payload: payload})
	require.NoError(p, err)
	h := stateHeader{nodeID: p.node, epoch: epoch, generation: generation, keyID: "k", sha256: []byte{1}}
	p.tx(func(tx db.Tx) error {
		return insertState(p.Context(), tx, h, stateHeader{nodeID: p.node}, nil, envelope, state, p.now)
	})
}

// mayPull also requires that the answer takes one statement, however many members the node has.
func (p pullTest) mayPull(node, repository string) (may bool, err error) {
	p.Helper()
	_, _ = db.Query(p.Context(), p.db, func(tx db.Tx) (bool, error) {
		c := &countingTx{Tx: tx}
		may, err = mayPull(p.Context(), c, node, repository)
		require.Equal(p, 1, c.statements)
		return may, nil
	})
	return may, err
}

func (p pullTest) requireMayPull(want map[string]bool) {
	p.Helper()
	for repository, expected := range want {
		may, err := p.mayPull(p.node, repository)
		require.NoError(p, err)
		require.Equal(p, expected, may, repository)
	}
}

func runs(id, image string) *protocol.Workload {
	return &protocol.Workload{Id: id, Services: []*protocol.Service{{Name: "main", Image: image}}}
}

func TestMayPullFollowsTheNewestState(t *testing.T) {
	p := newPullTest(t)
	p.requireMayPull(map[string]bool{"a": false}) // it has no state

	upgrading := runs("2", "b@sha256:2")
	upgrading.Fallback = runs("2", "old@sha256:3")
	mounting := runs("1", "a@sha256:1")
	mounting.Services[0].ImageMounts = []*protocol.ImageMount{{Image: "weights@sha256:4", Path: "/models"}}
	p.saveState(1, runs("1", "gone@sha256:0"))
	p.saveState(2, mounting, upgrading)
	p.requireMayPull(map[string]bool{
		"a": true, "weights": true, "b": true, "old": true, "gone": false, "": false, "a@sha256:1": false,
	})
	may, err := p.mayPull(db.NewID(), "a")
	require.NoError(t, err)
	require.False(t, may, "another node")

	p.saveState(3)
	p.requireMayPull(map[string]bool{"a": false})
}

// A restored hub counts the generations of its epoch anew: the lower number is the newer state.
func TestMayPullFollowsTheNewestEpoch(t *testing.T) {
	p := newPullTest(t)
	p.saveStateOf(1, 7, runs("1", "a@sha256:1"))
	p.saveStateOf(2, 1, runs("1", "b@sha256:2"))
	p.requireMayPull(map[string]bool{"a": false, "b": true})
}

func TestAQuarantinedNodeMayNotPull(t *testing.T) {
	p := newPullTest(t)
	p.saveState(1, runs("1", "a@sha256:1"))
	p.tx(func(tx db.Tx) error { return tx.Queue(t.Context(), `UPDATE nodes SET quarantined_at = $1`, p.now) })
	_, err := p.mayPull(p.node, "a")
	require.ErrorContains(t, err, "quarantined")
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

func TestANodesOldStatesAreDeletedAndNoOtherNodes(t *testing.T) {
	p := newPullTest(t)
	other := p
	other.node = enrolled(t, p.db, p.now)
	other.saveState(1, runs("a", "x"))
	for generation := range uint64(2 * keepStates) {
		p.saveState(generation+1, runs(fmt.Sprint(generation), "x"))
	}
	for node, want := range map[string]int{p.node: keepStates, other.node: 1} {
		for _, table := range []string{"node_states", "node_state_parts"} {
			kept, err := db.ReadTx(t.Context(), p.db, func(tx db.Tx) (int, error) {
				return db.Value[int](t.Context(), tx, `SELECT count(*) FROM `+table+` WHERE node_id = $1`, node)
			})
			require.NoError(t, err)
			require.Equal(t, want, kept, table)
		}
	}
}
