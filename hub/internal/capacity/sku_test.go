package capacity_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) createSKU(s capacity.SKU) (made capacity.SKU, err error) {
	err = w.try(func(ctx context.Context, tx db.Tx) (err error) {
		made, err = capacity.CreateSKU(ctx, tx, s, w.now())
		return err
	})
	return made, err
}

func (w *world) suggested(nodes ...capacity.Node) (slugs []string, all []capacity.SKU) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
		all, err = capacity.SuggestSKUs(ctx, tx, nodes)
		return err
	}))
	for _, s := range all {
		slugs = append(slugs, s.Slug)
	}
	return slugs, all
}

func TestASKUIsSoldUntilItIsRetired(t *testing.T) {
	w := newWorld(t)
	h200 := capacity.SKU{
		Slug: "h200-x1", Shape: capacity.GPUSlice, AcceleratorModel: "H200", AcceleratorCount: 1, CPUCores: 4,
		MemoryMiB: 16384,
	}
	made, err := w.createSKU(h200)
	require.NoError(t, err)
	again, err := w.createSKU(h200)
	require.NoError(t, err)
	require.Equal(t, made, again, "the same once more is the same")
	larger := h200
	larger.CPUCores = 8
	_, err = w.createSKU(larger)
	require.Equal(t, "sku_exists", code(err))
	_, err = w.createSKU(capacity.SKU{Slug: "cpu-9", Shape: capacity.GPUSlice, AcceleratorModel: "H200", CPUCores: 1})
	require.Equal(t, "sku_invalid", code(err), "a model without accelerators")

	ask := func(n *capacity.NewAllocation) {
		n.SKU, n.AcceleratorCount, n.CPUCores, n.MemoryMiB = h200.Slug, 1, 4, 16384
	}
	a, err := w.create(ask)
	require.NoError(t, err)
	require.Equal(t, "H200", a.AcceleratorModel)
	for range 2 {
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
			_, after, err := capacity.RetireSKU(ctx, tx, h200.Slug, w.now())
			require.False(t, after.RetiredAt.IsZero())
			return err
		}))
	}
	_, err = w.create(ask)
	require.Equal(t, "sku_retired", code(err))
	_, err = w.createSKU(h200)
	require.Equal(t, "sku_exists", code(err), "bills name it")
	require.Equal(t, "not_found", code(w.try(func(ctx context.Context, tx db.Tx) error {
		_, _, err := capacity.RetireSKU(ctx, tx, "nothing", w.now())
		return err
	})))
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		first, err := capacity.ListSKUs(ctx, tx, db.Page{Limit: 3})
		require.NoError(t, err)
		rest, err := capacity.ListSKUs(ctx, tx, db.Page{After: first[2].Slug})
		require.Len(t, first, 3)
		require.Equal(t, h200.Slug, rest[0].Slug)
		return err
	}))
}

func TestSKUsAreSuggestedForWhatNodesReport(t *testing.T) {
	w := newWorld(t)
	small := capacity.Node{ID: db.NewID(), CPUCores: 8, MemoryBytes: 48 << 30}
	mixed := capacity.Node{ID: db.NewID(), CPUCores: 8, MemoryBytes: 48 << 30}
	report := func(n capacity.Node, list ...*protocol.Accelerator) {
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
			_, err := capacity.ApplyInventory(ctx, tx, n.ID, list, w.now())
			return err
		}))
	}
	report(small, gpus(2)...)
	other := gpus(1)
	other[0].Id, other[0].Model = "GPU-9", "AMD Instinct MI300X (OAM)"
	report(mixed, append(gpus(1), other...)...)

	twin := capacity.Node{ID: db.NewID(), CPUCores: 8, MemoryBytes: 48<<30 + 5<<20}
	report(twin, gpus(2)...)
	slugs, all := w.suggested(w.gpu, w.cpu, small, twin, mixed)
	require.Equal(t, []string{"h200-node-x2-8c-48g", "h200-node-x4-16c-64g", "h200-x1", "h200-x2", "h200-x4"}, slugs)
	require.Equal(t, capacity.SKU{
		Slug: "h200-x2", Shape: capacity.GPUSlice, AcceleratorModel: "H200", AcceleratorCount: 2, CPUCores: 8,
		MemoryMiB: 32768,
	}, all[3], "four cores and 16 GiB each: what every node can give")
	for _, s := range all {
		_, err := w.createSKU(s)
		require.NoError(t, err)
	}
	slugs, _ = w.suggested(w.gpu, small)
	require.Equal(t, int64(48<<10), all[0].MemoryMiB, "the smaller of two nodes that are almost the same")
	require.Empty(t, slugs, "they are sold")

	report(mixed, other...)
	slugs, _ = w.suggested(mixed)
	require.Equal(t, []string{"amd-instinct-mi300x-oam-node-x1-8c-48g", "amd-instinct-mi300x-oam-x1"}, slugs)
}
