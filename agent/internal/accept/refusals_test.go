package accept_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/protocol"
)

// A session sends the oldest refusal while others are queued, which may push that one out of a full queue.
func TestARefusalThatWasSentTakesNoOtherAlong(t *testing.T) {
	a := accept.New(accept.Config{})
	refuse := func(n int) { a.RefuseUnread(protocol.Refuse(protocol.Nack_MALFORMED, "document %d", n)) }
	require.Nil(t, a.NextRefusal())
	refuse(0)
	sending := a.NextRefusal()
	require.Equal(t, "document 0", sending.GetDetail())
	last := 0
	for a.NextRefusal() == sending {
		last++
		refuse(last)
	}
	a.RefusalSent(sending)
	for n := 1; n <= last; n++ {
		next := a.NextRefusal()
		require.Equal(t, fmt.Sprintf("document %d", n), next.GetDetail())
		a.RefusalSent(next)
	}
	require.Nil(t, a.NextRefusal())
	require.Contains(t, a.LastRefusal(), fmt.Sprintf("document %d", last))
}
