package chaos_test

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// workOnVolume makes a volume of the project, snapshots, restores, resizes and deletes it. It can be repeated from its
// start: each request has a key of its own.
func (k *killTest) workOnVolume() func(context.Context, api.RequestEditorFn) error {
	project, name := k.Tenant.Project.ID, "v-"+scenario.NewID()
	keys := map[string]string{"create": scenario.NewID(), "snapshot": scenario.NewID(), "restore": scenario.NewID()}
	once := func(what string) api.RequestEditorFn {
		return func(_ context.Context, r *http.Request) error {
			r.Header.Set("X-Idempotency-Key", keys[what])
			return nil
		}
	}
	return func(ctx context.Context, _ api.RequestEditorFn) error {
		v, err := api.Read[api.Volume](k.Operator.CreateVolume(ctx, project, api.VolumeCreate{Name: name, SizeMib: 16},
			once("create")))
		if err != nil {
			return err
		}
		await := func(want api.VolumeStatus) error {
			return pollUntil(ctx, func() error {
				now, err := api.Read[api.Volume](k.Operator.GetVolume(ctx, project, v.ID, nil))
				gone := now.Status == api.VolumeStatusDeleting || now.Status == api.VolumeStatusDeleted
				return harness.Pending(err, now.Status == want || want == api.VolumeStatusReady && gone)
			})
		}
		if err := await(api.VolumeStatusReady); err != nil {
			return err
		}
		s, err := api.Read[api.VolumeSnapshot](k.Operator.CreateVolumeSnapshot(ctx, project, v.ID,
			api.VolumeSnapshotCreate{}, once("snapshot")))
		if err != nil {
			return err
		}
		if err := pollUntil(ctx, func() error {
			now, err := api.Read[api.VolumeSnapshot](k.Operator.GetVolumeSnapshot(ctx, project, v.ID, s.ID, nil))
			return harness.Pending(err, now.Status != api.VolumeSnapshotStatusPending)
		}); err != nil {
			return err
		}
		if _, err := api.Read[api.Volume](k.Operator.RestoreVolume(ctx, project, v.ID,
			api.VolumeRestore{SnapshotID: s.ID}, once("restore"))); err != nil {
			return err
		}
		if err := await(api.VolumeStatusReady); err != nil {
			return err
		}
		now, err := api.Read[api.Volume](k.Operator.GetVolume(ctx, project, v.ID, nil))
		if err == nil && now.Status == api.VolumeStatusReady {
			_, err = api.Read[api.Volume](k.Operator.ResizeVolume(ctx, project, v.ID, api.VolumeResize{SizeMib: 32}))
		}
		if err != nil {
			return err
		}
		if err := await(api.VolumeStatusReady); err != nil {
			return err
		}
		if _, err := api.Read[api.Volume](k.Operator.DeleteVolume(ctx, project, v.ID)); err != nil {
			return err
		}
		return await(api.VolumeStatusDeleted)
	}
}

// pollUntil repeats the condition while it is pending.
func pollUntil(ctx context.Context, condition func() error) error {
	for {
		if err := condition(); !errors.Is(err, harness.ErrPending) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}
