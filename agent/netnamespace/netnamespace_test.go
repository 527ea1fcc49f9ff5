package netnamespace

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func TestAListingThatChangedMeanwhileIsAskedForAgain(t *testing.T) {
	asked := 0
	got, err := List(func() ([]int, error) {
		if asked++; asked < 3 {
			return []int{1}, netlink.ErrDumpInterrupted
		}
		return []int{1, 2}, nil
	})
	require.NoError(t, err)
	require.Equal(t, []int{1, 2}, got)

	asked = 0
	_, err = List(func() ([]int, error) { asked++; return nil, netlink.ErrDumpInterrupted })
	require.ErrorIs(t, err, netlink.ErrDumpInterrupted)
	require.Equal(t, maxDumps, asked)

	asked = 0
	broken := errors.New("broken")
	_, err = List(func() ([]int, error) { asked++; return nil, broken })
	require.ErrorIs(t, err, broken)
	require.Equal(t, 1, asked)
}
