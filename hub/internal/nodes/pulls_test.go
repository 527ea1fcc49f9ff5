package nodes_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 13: the bound is the node's: one that dials again and again, and says each time that its pulls begin, fills the
// events no faster.
func TestLaw13PullsOfANodeLeaveABoundedNumberOfEvents(t *testing.T) {
	h, n, _ := hubtest.NewWithNode(t)
	member, now := h.Launch().Members[0].ID, h.Now()
	svc := nodes.New(nodes.Config{
		DB: h.DB, Keys: h.Keys, Now: func() time.Time { return now }, Log: slog.New(slog.DiscardHandler),
	})
	const burst = 192
	for range burst + 10 {
		require.NoError(t, svc.PullPhases(t.Context(), nodelink.Peer{NodeID: n.ID}, []*protocol.ImagePull{
			{MemberId: member, Phase: protocol.ImagePull_FETCHING},
		}))
	}
	require.Equal(t, burst, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'apps.instance.image_pull'`))
}
