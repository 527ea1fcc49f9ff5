package usagechain_test

import (
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// chainOf seals n segments.
func chainOf(n int, salt string) []usagechain.Link {
	out := make([]usagechain.Link, 0, n)
	var previous []byte
	for i := range n {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %x", salt, i, previous))
		out = append(out, usagechain.Link{Number: uint64(i + 1), SHA256: sum[:], Previous: previous})
		previous = sum[:]
	}
	return out
}

// book is what post does with Check, in memory.
type book struct {
	mark   usagechain.Watermark
	ahead  map[uint64]usagechain.Link
	posted map[uint64]int
}

func (b *book) take(at usagechain.Link) error {
	known, err := b.mark.Check(b.ahead, at)
	if err != nil || known {
		return err
	}
	b.posted[at.Number]++
	b.ahead[at.Number] = at
	b.mark = b.mark.Advance(b.ahead)
	return nil
}

// TestLaw05AnyOrderPostsEachSegmentOnce: whatever is lost, repeated or overtaken on the way, each segment is posted at
// most once, the mark never passes a gap, and what a forger or a damaged store mixes in is never taken beside the true
// chain.
func TestLaw05AnyOrderPostsEachSegmentOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "segments")
		chain, fork := chainOf(n, "true"), chainOf(n, "fork")
		b := &book{ahead: map[uint64]usagechain.Link{}, posted: map[uint64]int{}}
		arrivals := rapid.SliceOf(rapid.IntRange(0, n-1)).Draw(t, "arrivals")
		for _, i := range arrivals {
			require.NoError(t, b.take(chain[i]), "the true chain fits in any order")
			if forged := rapid.IntRange(0, n-1).Draw(t, "forged"); b.posted[uint64(forged+1)] > 0 &&
				uint64(forged+1) >= b.mark.Number {
				require.Equal(t, protocol.Nack_CHAIN_BROKEN, protocol.RefusalOf(b.take(fork[forged])),
					"another content under a posted number")
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
	far := usagechain.Link{Number: usagechain.MaxAhead + 1, SHA256: make([]byte, 32), Previous: make([]byte, 32)}
	_, err := usagechain.Watermark{}.Check(nil, far)
	require.Equal(t, protocol.Nack_OUT_OF_ORDER, protocol.RefusalOf(err))
	_, err = usagechain.Watermark{Number: 1, SHA256: make([]byte, 32)}.Check(nil, far)
	require.NoError(t, err)
}

// numbered are segments of the given first and last record numbers.
func numbered(from uint64, spans ...[2]uint64) map[uint64]usagechain.Link {
	near := map[uint64]usagechain.Link{}
	for i, s := range spans {
		number := from + uint64(i)
		near[number] = usagechain.Link{Number: number, First: s[0], Last: s[1]}
	}
	return near
}

func TestRecordNumbersContinueThoseOfTheNeighbours(t *testing.T) {
	at := func(number, first, last uint64) usagechain.Link {
		return usagechain.Link{Number: number, First: first, Last: last}
	}
	mark := usagechain.Watermark{Number: 4, LastRecord: 40}
	for name, c := range map[string]struct {
		mark usagechain.Watermark
		near map[uint64]usagechain.Link
		at   usagechain.Link
		fits bool
	}{
		"the first segment":                   {usagechain.Watermark{}, nil, at(1, 1, 9), true},
		"the first segment begins late":       {usagechain.Watermark{}, nil, at(1, 2, 9), false},
		"after the mark":                      {mark, nil, at(5, 41, 50), true},
		"a gap after the mark":                {mark, nil, at(5, 42, 50), false},
		"numbers of before":                   {mark, nil, at(5, 40, 50), false},
		"after segments without records":      {usagechain.Watermark{Number: 4}, nil, at(5, 1, 4), true},
		"late after ones without records":     {usagechain.Watermark{Number: 4}, nil, at(5, 77, 80), false},
		"beyond a gap":                        {mark, nil, at(7, 60, 61), true},
		"beyond a gap with numbers of before": {mark, nil, at(7, 30, 61), false},
		"between its neighbours":              {mark, numbered(6, [2]uint64{51, 60}), at(5, 41, 50), true},
		"short of the next":                   {mark, numbered(6, [2]uint64{52, 60}), at(5, 41, 50), false},
		"into the next":                       {mark, numbered(6, [2]uint64{50, 60}), at(5, 41, 50), false},
		"after one that is ahead":             {mark, numbered(6, [2]uint64{51, 60}), at(7, 61, 70), true},
		"a gap after one that is ahead":       {mark, numbered(6, [2]uint64{51, 60}), at(7, 62, 70), false},
		"before one that is ahead":            {mark, numbered(7, [2]uint64{61, 70}), at(6, 51, 60), true},
		"short of one that is ahead":          {mark, numbered(7, [2]uint64{61, 70}), at(6, 51, 59), false},
		"beside segments without records, beyond a gap": {
			mark,
			map[uint64]usagechain.Link{6: {Number: 6}, 8: {Number: 8}},
			at(7, 99, 120), true,
		},
		"no records":                               {mark, numbered(6, [2]uint64{41, 60}), at(5, 0, 0), true},
		"no records where some are due":            {mark, numbered(6, [2]uint64{51, 60}), at(5, 0, 0), false},
		"no records, and nobody knows what is due": {mark, nil, at(9, 0, 0), true},
		"after one without records":                {mark, numbered(6, [2]uint64{51, 50}), at(7, 51, 60), true},
		"a gap after one without records":          {mark, numbered(6, [2]uint64{51, 50}), at(7, 52, 60), false},
	} {
		_, err := c.mark.CheckRecords(c.near, c.at)
		require.Equal(t, c.fits, err == nil, "%s: %v", name, err)
	}
}

// TestSegmentsOfAnHonestNodeAlwaysContinueEachOther: in any order, with any number of records in each, and however
// often the hub is restored to an older watermark.
func TestSegmentsOfAnHonestNodeAlwaysContinueEachOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chain := chainOf(rapid.IntRange(1, 12).Draw(t, "segments"), "true")
		var last uint64
		lastRecords := []uint64{0} // by the number of segments
		for i := range chain {
			chain[i].First = last + 1
			last += rapid.Uint64Range(0, 4).Draw(t, "records")
			if chain[i].Last = last; chain[i].First > last {
				chain[i].First, chain[i].Last = 0, 0
			}
			lastRecords = append(lastRecords, last)
		}
		b := &book{ahead: map[uint64]usagechain.Link{}, posted: map[uint64]int{}}
		backup := usagechain.Watermark{}
		for _, i := range rapid.SliceOf(rapid.IntRange(0, len(chain)-1)).Draw(t, "arrivals") {
			at := chain[i]
			known, err := b.mark.Check(b.ahead, at)
			require.NoError(t, err)
			if !known {
				at, err = b.mark.CheckRecords(b.ahead, at)
				require.NoError(t, err)
				require.NoError(t, b.take(at))
			}
			require.Equal(t, lastRecords[b.mark.Number], b.mark.LastRecord)
			switch rapid.SampledFrom([]string{"", "", "backup", "restore"}).Draw(t, "then") {
			case "backup":
				backup = b.mark
			case "restore":
				b = &book{mark: backup, ahead: map[uint64]usagechain.Link{}, posted: map[uint64]int{}}
			}
		}
	})
}

// What nobody has posted yet must still fit both of its neighbours: a forger cannot fill a gap.
func TestLaw05AForgedLinkInsideAGapIsRefused(t *testing.T) {
	chain, fork := chainOf(6, "true"), chainOf(6, "fork")
	posted := func(numbers ...int) (b *book) {
		b = &book{ahead: map[uint64]usagechain.Link{}, posted: map[uint64]int{}}
		for _, n := range numbers {
			require.NoError(t, b.take(chain[n-1]))
		}
		return b
	}
	relinked := fork[2]
	relinked.Previous = chain[1].SHA256
	for name, c := range map[string]struct {
		has  []int
		link usagechain.Link
	}{
		"after the watermark":                         {[]int{1}, fork[1]},
		"after one beyond a gap":                      {[]int{1, 3}, fork[3]},
		"before one beyond a gap":                     {[]int{1, 4}, fork[2]},
		"between two, continuing the one before it":   {[]int{1, 2, 4}, relinked},
		"inside a gap, continuing the one before it":  {[]int{2, 4}, relinked},
		"the first, before one that is posted":        {[]int{2}, fork[0]},
		"beyond the newest, under a number that fits": {[]int{1, 2, 5}, fork[5]},
	} {
		b := posted(c.has...)
		require.Equal(t, protocol.Nack_CHAIN_BROKEN, protocol.RefusalOf(b.take(c.link)), name)
		require.NoError(t, b.take(chain[c.link.Number-1]), "%s: the true one is taken", name)
	}
}
