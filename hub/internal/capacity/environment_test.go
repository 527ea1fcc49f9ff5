package capacity_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestWhatANodeSaysOfEnvironmentsIsBounded(t *testing.T) {
	w := newWorld(t)
	project, digest := db.NewID(), strings.Repeat("a", 64)
	count := func() (n int) {
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
			return tx.QueryRow(ctx, `SELECT count(*) FROM environments`).Scan(&n)
		}))
		return n
	}
	report := func(list ...*protocol.InstalledEnvironment) {
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
			return capacity.ApplyEnvironments(ctx, tx, map[string][]*protocol.InstalledEnvironment{w.gpu.ID: list})
		}))
	}
	good := &protocol.InstalledEnvironment{
		ProjectId: project, Digest: digest, Image: strings.Repeat("x", 1<<10) + "\x00", Requirements: []string{"numpy"},
		UsedBy: slices.Repeat([]string{db.NewID()}, 100), SizeBytes: 1 << 63,
	}
	report(good, good, &protocol.InstalledEnvironment{ProjectId: "../x", Digest: digest},
		&protocol.InstalledEnvironment{ProjectId: project, Digest: "../x"})
	require.Equal(t, 1, count())
	report(good)
	require.Equal(t, 1, count())
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		list, err := capacity.Environments(ctx, tx, project, db.Page{Limit: 10})
		require.Empty(t, list, "the project has no allocation on the node")
		return err
	}))
	report()
	require.Zero(t, count())
}
