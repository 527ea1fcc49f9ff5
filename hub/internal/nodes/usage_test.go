package nodes

import (
	"crypto/sha256"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestSegmentIsCheckedBeforeItIsPosted(t *testing.T) {
	sum := make([]byte, sha256.Size)
	good := func() *protocol.UsageSegment {
		return &protocol.UsageSegment{NodeId: "n1", Incarnation: "i1", Number: 2, PreviousSha256: sum}
	}
	require.NoError(t, checkSegment(good(), billing.Store{NodeID: "n1", Incarnation: "i1"}))
	for name, c := range map[string]struct {
		change func(*protocol.UsageSegment)
		reason protocol.Nack_Reason
	}{
		"another node":             {func(s *protocol.UsageSegment) { s.NodeId = "n2" }, protocol.Nack_WRONG_NODE},
		"no incarnation":           {func(s *protocol.UsageSegment) { s.Incarnation = "" }, protocol.Nack_MALFORMED},
		"another incarnation":      {func(s *protocol.UsageSegment) { s.Incarnation = "i2" }, protocol.Nack_MALFORMED},
		"number zero":              {func(s *protocol.UsageSegment) { s.Number = 0 }, protocol.Nack_MALFORMED},
		"number beyond the column": {func(s *protocol.UsageSegment) { s.Number = 1 << 63 }, protocol.Nack_MALFORMED},
		"first with a predecessor": {func(s *protocol.UsageSegment) { s.Number = 1 }, protocol.Nack_MALFORMED},
		"second without":           {func(s *protocol.UsageSegment) { s.PreviousSha256 = nil }, protocol.Nack_MALFORMED},
		"predecessor of wrong size": {func(s *protocol.UsageSegment) {
			s.PreviousSha256 = sum[:5]
		}, protocol.Nack_MALFORMED},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.change(s)
			require.Equal(t, c.reason, protocol.RefusalOf(checkSegment(s, billing.Store{NodeID: "n1", Incarnation: "i1"})))
		})
	}
}
