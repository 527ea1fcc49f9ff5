package nodelink

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// An older connection may end after a newer one of its node has begun, or come to register after it.
func TestTheEndOfAnOlderConnectionLeavesTheNewerOne(t *testing.T) {
	s := NewServer(Options{})
	of := func(sessionNo uint64) *connection {
		return &connection{peer: Peer{NodeID: "n"}, acked: AckedState{NodeID: "n", SessionNo: sessionNo}}
	}
	older, newer := of(1), of(2)
	require.True(t, s.register(newer))
	require.False(t, s.register(older))
	s.unregister(older)
	acked, connected := s.Acked("n")
	require.True(t, connected, "the newer connection still counts")
	require.Equal(t, uint64(2), acked.SessionNo)
	s.unregister(newer)
	require.Empty(t, s.Nodes())
}
