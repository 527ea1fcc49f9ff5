package intake

import (
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/protocol"
)

// chainOf seals n segments.
func chainOf(n int, salt string) []link {
	out := make([]link, 0, n)
	var previous []byte
	for i := range n {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %x", salt, i, previous))
		out = append(out, link{number: uint64(i + 1), sha256: sum[:], previous: previous})
		previous = sum[:]
	}
	return out
}

// book is what post does with place, in memory.
type book struct {
	mark   mark
	ahead  map[uint64]link
	posted map[uint64]int
}

func (b *book) take(at link) error {
	known, err := place(b.mark, b.ahead, at)
	if err != nil || known {
		return err
	}
	b.posted[at.number]++
	b.ahead[at.number] = at
	for next, ok := b.ahead[b.mark.number+1]; ok; next, ok = b.ahead[b.mark.number+1] {
		b.mark.number, b.mark.sha256 = next.number, next.sha256
		delete(b.ahead, next.number)
	}
	return nil
}

// TestLaw05AnyOrderPostsEachSegmentOnce: whatever is lost, repeated or overtaken on the way, each segment is posted at most
// once, the mark never passes a gap, and what a forger or a damaged store mixes in is never taken beside the true chain.
func TestLaw05AnyOrderPostsEachSegmentOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "segments")
		chain, fork := chainOf(n, "true"), chainOf(n, "fork")
		b := &book{ahead: map[uint64]link{}, posted: map[uint64]int{}}
		arrivals := rapid.SliceOf(rapid.IntRange(0, n-1)).Draw(t, "arrivals")
		for _, i := range arrivals {
			require.NoError(t, b.take(chain[i]), "the true chain fits in any order")
			if forged := rapid.IntRange(0, n-1).Draw(t, "forged"); b.posted[uint64(forged+1)] > 0 && uint64(forged+1) >= b.mark.number {
				require.Equal(t, ReasonChainBroken, protocol.RefusalOf(b.take(fork[forged])), "another content under a posted number")
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
		require.Equal(t, gapless, b.mark.number)
		for number, times := range b.posted {
			require.Equal(t, 1, times, "segment %d", number)
			require.True(t, seen[int(number-1)])
		}
		require.Len(t, b.posted, len(seen))
	})
}

func TestSegmentsFarBeyondAGapAreSentAgainLater(t *testing.T) {
	far := link{number: maxAhead + 1, sha256: make([]byte, 32), previous: make([]byte, 32)}
	_, err := place(mark{}, nil, far)
	require.Equal(t, ReasonOutOfOrder, protocol.RefusalOf(err))
	_, err = place(mark{number: 1, sha256: make([]byte, 32)}, nil, far)
	require.NoError(t, err)
}

func TestSegmentIsCheckedBeforeItIsPosted(t *testing.T) {
	sum := make([]byte, sha256.Size)
	good := func() *protocol.UsageSegment {
		return &protocol.UsageSegment{NodeId: "n1", Incarnation: "i1", Number: 2, PreviousSha256: sum}
	}
	require.NoError(t, checkSegment(good(), "n1"))
	for name, c := range map[string]struct {
		change func(*protocol.UsageSegment)
		reason string
	}{
		"another node":              {func(s *protocol.UsageSegment) { s.NodeId = "n2" }, protocol.RefusalWrongNode},
		"no incarnation":            {func(s *protocol.UsageSegment) { s.Incarnation = "" }, protocol.RefusalMalformed},
		"incarnation with a line":   {func(s *protocol.UsageSegment) { s.Incarnation = "a\nb" }, protocol.RefusalMalformed},
		"number zero":               {func(s *protocol.UsageSegment) { s.Number = 0 }, protocol.RefusalMalformed},
		"number beyond the column":  {func(s *protocol.UsageSegment) { s.Number = 1 << 63 }, protocol.RefusalMalformed},
		"first with a predecessor":  {func(s *protocol.UsageSegment) { s.Number = 1 }, protocol.RefusalMalformed},
		"second without":            {func(s *protocol.UsageSegment) { s.PreviousSha256 = nil }, protocol.RefusalMalformed},
		"predecessor of wrong size": {func(s *protocol.UsageSegment) { s.PreviousSha256 = sum[:5] }, protocol.RefusalMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.change(s)
			require.Equal(t, c.reason, protocol.RefusalOf(checkSegment(s, "n1")))
		})
	}
}
