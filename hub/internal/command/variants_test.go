package command_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// An instance on an H200 gets another image than one on an A100, and neither gets an accelerator that no image is for.
func TestAcceleratorChoosesTheImage(t *testing.T) {
	w := newWorld(t)
	doc := strings.Replace(commandtest.Manifest(), `accelerator: none, image_ref: "`+commandtest.Image+`"}]`,
		`accelerator: none, image_ref: "`+commandtest.Image+`"},
      {name: hopper, accelerator: nvidia, models: ["H?00*"], driver: {min: "570"}, image_ref: "`+commandtest.Image+`"},
      {name: large, accelerator: nvidia, min_memory_mib: 80000, image_ref: "`+commandtest.Image+`"}]`, 1)
	verified, env := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: 3.0.0", 1))
	w.PublishVersion("3.0.0", verified, env)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		gpu := func(id, model, driver string, memory uint64) *protocol.Accelerator {
			return &protocol.Accelerator{
				Id: id, Vendor: "nvidia", Model: model, Health: "ok", DriverVersion: driver, MemoryBytes: memory << 30,
			}
		}
		_, err := capacity.ApplyInventory(ctx, tx, w.Node, []*protocol.Accelerator{
			gpu("GPU-0", "A100", "570.86.15", 80), gpu("GPU-1", "H200", "570.86.15", 141), gpu("GPU-2", "L4", "570.86.15", 24),
		}, w.Now)
		return err
	})
	in := w.AllocationInput()
	in.AcceleratorCount = 3
	_, err := (&command.Service{DB: w.DB}).CreateAllocation(t.Context(), w.Meta("gpus"), in)
	require.NoError(t, err)
	create := func(model string) (instance.Instance, error) {
		in := w.InstanceInput()
		in.Version, in.Resources = "3.0.0", manifest.Choice{CPUMillis: 100, MemoryMiB: 64, AcceleratorModel: model}
		return w.Commands().CreateInstance(t.Context(), w.Meta("of "+model), in)
	}
	for model, variant := range map[string]string{"H200": "hopper", "A100": "large"} {
		i, err := create(model)
		require.NoError(t, err)
		require.Equal(t, 1, w.Count(`SELECT accelerators FROM subjects WHERE id = $1`, i.Members[0].ID))
		_, services := w.free(i)
		require.Equal(t, variant, services[0].GetImageVariant(), model)
	}
	_, err = create("L4")
	require.Error(t, err, "no image is for it")
}
