package command_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// reportHealth is a report of the node with its one accelerator, which the instance has.
func (w *world) reportHealth(health, cause string, status *protocol.WorkloadStatus, later time.Duration) {
	w.T.Helper()
	w.Counter++
	w.Now = w.Now.Add(later)
	r := w.NodeReport(1, status)
	r.Accelerators = []*protocol.Accelerator{{
		Id: "GPU-0", Vendor: "nvidia", Model: "H200", Health: health, HealthReason: cause,
	}}
	w.Tx(func(ctx context.Context, tx db.Tx) error { return nodes.ApplyReport(ctx, tx, r, w.Now) })
}

// Each step of the health ladder is an event for the operator and for the tenant; while the node repairs the
// accelerator the instance waits, and what is not ok is placed nowhere.
func TestStepsOfAnAcceleratorsHealthAreEvents(t *testing.T) {
	w := newWorld(t)
	doc := strings.Replace(commandtest.Manifest(), `accelerator: none, image_ref: "`+commandtest.Image+`"}]`,
		`accelerator: none, image_ref: "`+commandtest.Image+`"},
      {name: gpu, accelerator: nvidia, models: ["H200"], image_ref: "`+commandtest.Image+`"}]`, 1)
	verified, env := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: 3.0.0", 1))
	w.PublishVersion("3.0.0", verified, env)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := capacity.ApplyInventory(ctx, tx, w.Node, []*protocol.Accelerator{
			{Id: "GPU-0", Vendor: "nvidia", Model: "H200", Health: "ok"},
		}, w.Now)
		return err
	})
	allocation := w.AllocationInput()
	allocation.AcceleratorCount = 1
	_, err := w.Commands().CreateAllocation(t.Context(), w.Meta("gpu"), allocation)
	require.NoError(t, err)
	in := w.InstanceInput()
	in.Version, in.Resources = "3.0.0", manifest.Choice{CPUMillis: 100, MemoryMiB: 64, AcceleratorModel: "H200"}
	traced := telemetry.Continue(t.Context(), "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01")
	i, err := w.Commands().CreateInstance(traced, w.Meta("create"), in)
	require.NoError(t, err)
	w.reportHealth("ok", "", w.Says(i, protocol.WorkloadStatus_READY), time.Second)
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)

	faulty := w.Says(i, protocol.WorkloadStatus_FAILED)
	faulty.Reason = protocol.WorkloadStatus_DEVICE_FAULT
	for _, step := range []struct{ health, cause string }{
		{"needs_reset", "Xid 95"}, {"needs_reset", "Xid 95"}, {"testing", "Xid 95"},
	} {
		w.reportHealth(step.health, step.cause, faulty, time.Minute)
		require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status, "the node repairs it")
	}
	w.reportHealth("ok", "", w.Says(i, protocol.WorkloadStatus_READY), time.Minute)
	w.reportHealth("quarantined", "Xid 79", faulty, time.Minute)
	for _, typ := range []string{"apps.instance.accelerator_health", "fleet.node.accelerator_health"} {
		for health, cause := range map[string]string{"needs_reset": "Xid 95", "testing": "Xid 95", "quarantined": "Xid 79"} {
			require.Equal(t, 1, w.Count(`SELECT count(*) FROM events WHERE type = $1 AND data->>'accelerator_id' = 'GPU-0'
				AND data->>'health' = $2 AND data->>'cause' = $3`, typ, health, cause), "%s %s", typ, health)
		}
	}
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM events WHERE type = 'apps.instance.accelerator_health'
		AND subject = $1 AND data->>'health' = 'ok' AND data->>'member_id' = $2
		AND traceparent LIKE '00-0af7651916cd43dd8448eb211c80319c-%'`, i.ID, i.Members[0].ID))

	require.Zero(t, w.Count(`SELECT count(*) - count(DISTINCT resource_version) FROM events WHERE subject = $1`, i.ID),
		"each event of a resource has a number of its own")
	require.GreaterOrEqual(t, w.Get(i.ID).ResourceVersion, int64(w.Count(`SELECT max(resource_version) FROM events
		WHERE subject = $1`, i.ID)))

	w.reportHealth("quarantined", "Xid 79", faulty, 16*time.Minute)
	after := w.Get(i.ID).Lifecycle
	require.Equal(t, lifecycle.Running, after.Status, "a running instance is the tenant's to end")
	require.Equal(t, lifecycle.HealthUnhealthy, after.Health)
	require.Equal(t, protocol.WorkloadStatus_DEVICE_FAULT, after.Reason)
}
