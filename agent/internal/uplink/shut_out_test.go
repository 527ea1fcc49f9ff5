package uplink_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// The handshake only says that the certificate is not accepted.
func TestANodeRefusedInTheHandshakeShowsWhyItIsShutOut(t *testing.T) {
	for _, reason := range []string{"node_banned", "node_removed"} {
		t.Run(reason, func(t *testing.T) {
			h, n, s := start(t)
			require.Eventually(t, func() bool { return n.up.Status().Connected }, 20*time.Second, time.Millisecond)
			h.setShutOut(reason)
			require.NoError(t, s.conn.Close(link.CodeOK, ""))
			isShown := func() bool {
				st := n.up.Status()
				return !st.Connected && strings.Contains(st.LastError, reason)
			}
			require.Eventually(t, isShown, 20*time.Second, time.Millisecond)

			n.stop()
			n.run(uplink.Config{DialRetryMax: time.Second})
			require.Eventually(t, isShown, 20*time.Second, time.Millisecond, "also after a restart of the agent")
			h.setShutOut("")
			h.next()
			require.Eventually(t, func() bool { st := n.up.Status(); return st.Connected && st.LastError == "" }, 20*time.Second,
				time.Millisecond)
		})
	}
}
