package nodes

import (
	"crypto/ed25519"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/protocol"
)

// enrolled are so many nodes, sorted.
func enrolled(t *testing.T, d *db.DB, n int, now time.Time) (ids []string) {
	t.Helper()
	for range n {
		id := db.NewID()
		pub, _, err := ed25519.GenerateKey(nil)
		require.NoError(t, err)
		require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			if _, err := fleet.CreateToken(t.Context(), tx, fleet.NewToken{ID: id, Secret: id, CreatedBy: "admin"},
				now); err != nil {
				return err
			}
			_, _, err := fleet.Enroll(t.Context(), tx, fleet.Enrollment{
				NodeID: id, Secret: id, Hostname: "n", PublicKey: pub, CertificateExpiresAt: now.Add(time.Hour),
			}, now)
			return err
		}))
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Law 13: a node whose accelerators break and mend in every report fills neither the events nor the audit trail, and
// what it says keeps no other node's fault from being told.
func TestLaw13ANodeWhoseAcceleratorsFlapHasABoundOfItsOwn(t *testing.T) {
	d, now := dbtest.New(t), time.Unix(1_800_000_000, 0)
	ids := enrolled(t, d, 2, now)
	flapping, other := ids[0], ids[1]
	b := &budgets{}
	apply := func(reported map[origin][]*protocol.Accelerator) {
		t.Helper()
		require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			return applyInventories(t.Context(), tx, b, reported, now)
		}))
	}
	told := func(nodeID string) int {
		t.Helper()
		n, err := db.Query(t.Context(), d, func(tx db.Tx) (int, error) {
			return db.Value[int](t.Context(), tx, `SELECT count(*) FROM events WHERE subject = $1
				AND type = 'fleet.node.accelerator_health'`, nodeID)
		})
		require.NoError(t, err)
		return n
	}
	for k := range 3 {
		var inventory []*protocol.Accelerator
		for n := range healthBurst {
			inventory = append(inventory, &protocol.Accelerator{
				Id: fmt.Sprint(n), Vendor: "amd", Health: []string{"needs_reset", "testing"}[k%2],
			})
		}
		apply(map[origin][]*protocol.Accelerator{
			{nodeID: flapping}: inventory,
			{nodeID: other}:    {{Id: "0", Vendor: "amd", Health: []string{"needs_reset", "testing"}[k%2]}},
		})
	}
	require.Equal(t, healthBurst, told(flapping))
	require.Equal(t, 3, told(other))
	now = now.Add(time.Hour)
	apply(map[origin][]*protocol.Accelerator{{nodeID: flapping}: nil})
	require.Equal(t, 2*healthBurst, told(flapping), "an hour later its changes have events again")
}

// A node that dials again gets no further share of events.
func TestPhasesOfPullsHaveABudgetForEachNode(t *testing.T) {
	var b budgets
	now := time.Unix(1_800_000_000, 0)
	for range phasesBurst {
		require.True(t, b.mayRecordPhase("n1", now))
	}
	require.False(t, b.mayRecordPhase("n1", now))
	require.True(t, b.mayRecordPhase("n2", now))
	require.True(t, b.mayRecordPhase("n1", now.Add(10*time.Second)))
}
