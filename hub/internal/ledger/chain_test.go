package ledger

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// link is the nth segment of a chain in which each has the payload digest of its number.
func link(number, first, last uint64) usagechain.Link {
	l := usagechain.Link{Number: number, SHA256: []byte{byte(number)}, First: first, Last: last}
	if number > 1 {
		l.Previous = []byte{byte(number - 1)}
	}
	return l
}

// Segments that skip numbers are set aside alike, whether they come in one batch or one by one; what follows them goes
// on.
func TestChainAcceptsNoSegmentThatSkipsRecordNumbers(t *testing.T) {
	sent := []usagechain.Link{
		link(1, 1, 1), link(2, 3, 3), link(3, 5, 5), link(4, 6, 9), link(5, 8, 9), link(6, 10, 10),
		link(7, 12, 12),
	}
	together, oneByOne := &chain{ahead: map[uint64]usagechain.Link{}}, &chain{ahead: map[uint64]usagechain.Link{}}
	var refused, aside []uint64
	for _, at := range sent {
		isNew, err := together.accept(at)
		require.Equal(t, err == nil, isNew)
		if err != nil {
			_, isRefusal := errors.AsType[*protocol.RefusalError](err)
			require.False(t, isRefusal, "the hub sets it aside")
			refused = append(refused, at.Number)
		}
		if _, err := oneByOne.accept(at); err != nil {
			oneByOne.misnumbered = nil
			isNew, err = oneByOne.skip(at)
			require.NoError(t, err)
			require.True(t, isNew)
			aside = append(aside, at.Number)
		}
	}
	require.Equal(t, []uint64{2, 3, 5, 7}, refused)
	require.Equal(t, refused, aside)
	require.Equal(t, usagechain.Watermark{Number: 7, SHA256: []byte{7}, LastRecord: 12}, oneByOne.watermark.Watermark)

	require.EqualValues(t, 1, together.watermark.Number, "what is set aside is passed after the batch")
	for _, number := range refused {
		_, err := together.skip(sent[number-1])
		require.NoError(t, err)
	}
	require.Equal(t, oneByOne.watermark.Watermark, together.watermark.Watermark)
	require.Empty(t, together.ahead)
	for _, at := range sent {
		isNew, err := together.accept(at)
		require.NoError(t, err, "what was passed is known")
		require.False(t, isNew)
	}
	isNew, err := together.accept(link(8, 13, 20))
	require.NoError(t, err)
	require.True(t, isNew)
}
