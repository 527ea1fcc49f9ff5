package usagechain_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// booked is a book after the segments of a set have arrived: bit i is segment i+1.
func booked(t *testing.T, chain []usagechain.Link, arrived int) *book {
	t.Helper()
	b := &book{ahead: map[uint64]usagechain.Link{}, posted: map[uint64]int{}}
	for i := range chain {
		if arrived&(1<<i) != 0 {
			require.NoError(t, b.take(chain[i]))
		}
	}
	return b
}

// TestLaw05AForgedLinkInAGapIsRefusedByEitherNeighbour tries, for every set of posted segments and every number that is
// missing in it, a link that names another predecessor and one that has another content: the neighbour that is there
// refuses it, nothing is posted, and the true segment still fits.
func TestLaw05AForgedLinkInAGapIsRefusedByEitherNeighbour(t *testing.T) {
	const n = 6
	chain, fork := chainOf(n, "true"), chainOf(n, "fork")
	byPredecessor, bySuccessor := 0, 0
	for arrived := range 1 << n {
		has := func(i int) bool { return i < 0 || i < n && arrived&(1<<i) != 0 }
		for i := range n {
			if has(i) {
				continue
			}
			otherPredecessor, otherContent := chain[i], chain[i]
			otherPredecessor.Previous, otherContent.SHA256 = fork[n-1].SHA256, fork[i].SHA256
			b := booked(t, chain, arrived)
			mark := b.mark
			refuses := func(forged usagechain.Link) {
				require.Equal(t, protocol.Nack_CHAIN_BROKEN, protocol.RefusalOf(b.take(forged)), "segment %d beside %b", i+1,
					arrived)
				require.Zero(t, b.posted[forged.Number])
				require.Equal(t, mark, b.mark)
			}
			if has(i - 1) {
				refuses(otherPredecessor)
				byPredecessor++
			}
			if has(i + 1) {
				refuses(otherContent)
				bySuccessor++
			}
			require.NoError(t, b.take(chain[i]), "the true one fits")
			require.Equal(t, 1, b.posted[uint64(i+1)])
		}
	}
	require.Positive(t, byPredecessor)
	require.Positive(t, bySuccessor)
}
