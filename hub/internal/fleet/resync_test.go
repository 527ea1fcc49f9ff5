package fleet_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
)

// A restored hub neither places on a node nor sends it documents before its upload; usage that it owes stops neither.
func TestLaw16ANodeThatAwaitsResyncTakesNothingNew(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	do := func(fn func(ctx context.Context, tx db.Tx) error) fleet.Node {
		return must(t, d, func(ctx context.Context, tx db.Tx) (fleet.Node, error) {
			if err := fn(ctx, tx); err != nil {
				return fleet.Node{}, err
			}
			return fleet.Get(ctx, tx, n.ID)
		})
	}
	require.True(t, n.TakesNew())
	require.True(t, n.Syncable())
	n = do(func(ctx context.Context, tx db.Tx) error {
		count, err := fleet.AwaitResyncOfAll(ctx, tx)
		require.EqualValues(t, 1, count)
		return err
	})
	require.False(t, n.TakesNew())
	require.False(t, n.Syncable())
	require.Equal(t, []string{n.ID}, must(t, d, fleet.WithoutRenewal))
	n = do(func(ctx context.Context, tx db.Tx) error { return fleet.SetUsageOwed(ctx, tx, n.ID, "i1", 5) })
	require.Equal(t, fleet.Resync{Status: fleet.AwaitingResync, OwedIncarnation: "i1", OwedSegment: 5}, n.Resync)
	n = do(func(ctx context.Context, tx db.Tx) error { return fleet.SetUsageOwed(ctx, tx, n.ID, "i1", 9) })
	require.EqualValues(t, 5, n.Resync.OwedSegment, "what it has sealed since its first hello is not missing")
	n = do(func(ctx context.Context, tx db.Tx) error { return fleet.SetUsageOwed(ctx, tx, n.ID, "i2", 3) })
	require.Equal(t, fleet.Resync{Status: fleet.AwaitingResync, OwedIncarnation: "i2", OwedSegment: 3}, n.Resync)
	n = do(func(ctx context.Context, tx db.Tx) error { return fleet.StateUploaded(ctx, tx, n.ID, now) })
	require.Equal(t, fleet.UsageOwed, n.Resync.Status)
	require.True(t, n.TakesNew())
	require.True(t, n.Syncable())
	require.Len(t, must(t, d, fleet.Resyncing), 1)
	n = do(func(ctx context.Context, tx db.Tx) error { return fleet.UsageComplete(ctx, tx, n.ID) })
	require.Equal(t, fleet.Resync{}, n.Resync)
	require.Empty(t, must(t, d, fleet.Resyncing))
}

// Law 13: a node that will never upload anything holds nothing up, such as the collection of the registry's garbage.
func TestLaw13NobodyWaitsForTheUploadOfANodeThatIsGone(t *testing.T) {
	d := dbtest.New(t)
	for what, end := range map[string]func(context.Context, db.Tx, string) (fleet.Node, bool, error){
		"banned": func(ctx context.Context, tx db.Tx, id string) (fleet.Node, bool, error) {
			return fleet.Ban(ctx, tx, id, "stolen", now)
		},
		"lost": func(ctx context.Context, tx db.Tx, id string) (fleet.Node, bool, error) {
			return fleet.Remove(ctx, tx, id, true, "burnt", now)
		},
		"removed": func(ctx context.Context, tx db.Tx, id string) (fleet.Node, bool, error) {
			return fleet.Remove(ctx, tx, id, false, "sold", now)
		},
	} {
		n := node(t, d)
		got := must(t, d, func(ctx context.Context, tx db.Tx) (fleet.Node, error) {
			if err := fleet.AwaitResync(ctx, tx, n.ID); err != nil {
				return fleet.Node{}, err
			}
			got, done, err := end(ctx, tx, n.ID)
			require.True(t, done, what)
			return got, err
		})
		require.Equal(t, fleet.Resync{}, got.Resync, what)
		require.Empty(t, must(t, d, fleet.Resyncing), what)
	}
}
