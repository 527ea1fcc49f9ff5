package nodelink

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestPhasesOfPullsAreHandedOnOnce(t *testing.T) {
	var p pulls
	say := func(phase protocol.ImagePull_Phase, members ...string) int {
		m := &protocol.PullProgress{}
		for _, id := range members {
			m.Pulls = append(m.Pulls, &protocol.ImagePull{MemberId: id, Phase: phase})
		}
		return len(p.replace(m))
	}
	require.Equal(t, 1, say(protocol.ImagePull_FETCHING, "a"))
	require.Equal(t, 0, say(protocol.ImagePull_FETCHING, "a"))
	require.Equal(t, 1, say(protocol.ImagePull_FETCHING, "a", "b"))
	require.Equal(t, 2, say(protocol.ImagePull_UNPACKING, "a", "b"))

	var many []string
	for k := range 2 * maxPulls {
		many = append(many, strconv.Itoa(k))
	}
	require.Equal(t, maxPulls, say(protocol.ImagePull_FETCHING, many...))
	require.Len(t, p.byMember, maxPulls, "no message is kept beyond its bound")
}
