package heard_test

import (
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/heard"
	"github.com/gpuaas/gpuaas/protocol"
)

// chainOf seals n segments.
func chainOf(n int, salt string) []heard.Link {
	out := make([]heard.Link, 0, n)
	var previous []byte
	for i := range n {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %x", salt, i, previous))
		out = append(out, heard.Link{Number: uint64(i + 1), SHA256: sum[:], Previous: previous})
		previous = sum[:]
	}
	return out
}

// book is what post does with place, in memory.
type book struct {
	mark   heard.Mark
	ahead  map[uint64]heard.Link
	posted map[uint64]int
}

func (b *book) take(at heard.Link) error {
	known, err := b.mark.Place(b.ahead, at)
	if err != nil || known {
		return err
	}
	b.posted[at.Number]++
	b.ahead[at.Number] = at
	b.mark = b.mark.Past(b.ahead)
	return nil
}

// TestLaw05AnyOrderPostsEachSegmentOnce: whatever is lost, repeated or overtaken on the way, each segment is posted at most
// once, the mark never passes a gap, and what a forger or a damaged store mixes in is never taken beside the true chain.
func TestLaw05AnyOrderPostsEachSegmentOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "segments")
		chain, fork := chainOf(n, "true"), chainOf(n, "fork")
		b := &book{ahead: map[uint64]heard.Link{}, posted: map[uint64]int{}}
		arrivals := rapid.SliceOf(rapid.IntRange(0, n-1)).Draw(t, "arrivals")
		for _, i := range arrivals {
			require.NoError(t, b.take(chain[i]), "the true chain fits in any order")
			if forged := rapid.IntRange(0, n-1).Draw(t, "forged"); b.posted[uint64(forged+1)] > 0 && uint64(forged+1) >= b.mark.Number {
				require.Equal(t, protocol.RefusalChainBroken, protocol.RefusalOf(b.take(fork[forged])), "another content under a posted number")
			}
		}
		seen := map[int]bool{}
		for _, i := range arrivals {
			seen[i] = true
		}
		gapless := uint64(0)
		for seen[int(gapless)] {
			gapless++
		}
		require.Equal(t, gapless, b.mark.Number)
		for number, times := range b.posted {
			require.Equal(t, 1, times, "segment %d", number)
			require.True(t, seen[int(number-1)])
		}
		require.Len(t, b.posted, len(seen))
	})
}

func TestSegmentsFarBeyondAGapAreSentAgainLater(t *testing.T) {
	far := heard.Link{Number: heard.MaxAhead + 1, SHA256: make([]byte, 32), Previous: make([]byte, 32)}
	_, err := heard.Mark{}.Place(nil, far)
	require.Equal(t, heard.ReasonOutOfOrder, protocol.RefusalOf(err))
	_, err = heard.Mark{Number: 1, SHA256: make([]byte, 32)}.Place(nil, far)
	require.NoError(t, err)
}
