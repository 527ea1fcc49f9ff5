package plan_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

func version(epoch, generation uint64, digest string) plan.StateVersion {
	return plan.StateVersion{Epoch: epoch, Generation: generation, SHA256: []byte(digest)}
}

func TestStatesAreOrderedByEpochThenGeneration(t *testing.T) {
	require.True(t, version(2, 1, "a").After(version(1, 9, "b")))
	require.True(t, version(1, 9, "a").After(version(1, 8, "b")))
	require.False(t, version(1, 9, "a").After(version(1, 9, "b")))
	require.True(t, version(1, 9, "a").Supersedes(version(1, 9, "b")))
	require.False(t, version(1, 9, "a").Supersedes(version(1, 9, "a")))
	require.False(t, version(1, 9, "a").Supersedes(version(2, 1, "b")))
	require.True(t, version(1, 1, "a").Supersedes(plan.StateVersion{}))
	require.False(t, version(1, 9, "").Contradicts(version(1, 9, "b")), "unknown content contradicts nothing")
	require.False(t, version(0, 0, "a").Contradicts(version(0, 0, "b")), "no state contradicts none")
	require.True(t, version(1, 9, "a").Equal(version(1, 9, "a")))
	require.False(t, version(1, 9, "a").Equal(version(1, 9, "b")))
}

// Law 2: whatever a restored hub has forgotten, its next state is above what the node accepted and holds.
func TestTheNextGenerationIsAboveWhatTheNodeHas(t *testing.T) {
	newest, none := version(1, 5, "a"), plan.StateVersion{}
	for _, c := range []struct {
		name           string
		accepted, held plan.StateVersion
		epoch, floor   uint64
		lowest, next   uint64
	}{
		{"nothing is known", none, none, 1, 0, 0, 6},
		{"the node has the newest", newest, newest, 1, 0, 0, 6},
		{"the node has accepted a newer one", version(1, 8, ""), version(1, 8, "b"), 1, 0, 9, 9},
		{"the node holds another one", version(1, 5, ""), version(1, 5, "b"), 1, 0, 6, 6},
		{"the node refused one", newest, newest, 1, 12, 12, 12},
		{"a new epoch", newest, newest, 2, 0, 0, 1},
		{"a new epoch, and it has accepted one there", version(2, 8, ""), version(2, 8, "b"), 2, 0, 9, 9},
	} {
		lowest := newest.LowestGeneration(c.epoch, c.accepted, c.held, c.floor)
		require.Equal(t, c.lowest, lowest, c.name)
		require.Equal(t, c.next, newest.NextGeneration(c.epoch, lowest), c.name)
	}
}

func TestARefusalRaisesTheGenerationOnlyWhereItWasSent(t *testing.T) {
	require.True(t, plan.ShowsNewerState(protocol.Nack_GENERATION_OLDER))
	require.True(t, plan.ShowsNewerState(protocol.Nack_GENERATION_CONFLICT))
	require.False(t, plan.ShowsNewerState(protocol.Nack_MALFORMED))
	require.Equal(t, uint64(6), version(1, 5, "a").GenerationAfterRefusal(5))
	require.Equal(t, uint64(4), version(1, 5, "a").GenerationAfterRefusal(3))
	require.Zero(t, version(1, 5, "a").GenerationAfterRefusal(6))
}
