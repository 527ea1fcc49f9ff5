package reconcile

import (
	"context"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
)

// prepareVolumes makes the volumes of a service ready for its container.
func (r *Reconciler) prepareVolumes(ctx context.Context, a agent.StartContainer) ([]runtime.Volume, error) {
	var ready []runtime.Volume
	for _, m := range a.Service.Spec.GetVolumes() {
		use := volume.Use{
			MemberID:  a.MemberID,
			Name:      m.GetName(),
			VolumeID:  m.GetVolumeId(),
			ProjectID: a.Workload.ProjectID,
			SizeBytes: m.GetSizeBytes(),
			ReadOnly:  onlyReads(a.Workload, m.GetVolumeId()),
			Revision: volume.Revision{
				No:         a.Revision,
				AppVersion: a.Workload.AppVersion,
				RollsBack:  a.Workload.RollsBack,
				Snapshot:   m.GetSnapshotOnUpgrade(),
			},
		}
		if back := a.Workload.Fallback; back != nil {
			use.Revision.FallbackNo, use.Revision.FallbackVersion = back.Revision, back.AppVersion
		}
		var dir string
		err := onVolumes(ctx, func() (err error) {
			dir, err = r.machine.Volumes.Prepare(ctx, use)
			return err
		})
		if err != nil {
			return nil, err
		}
		ready = append(ready, runtime.Volume{Dir: dir, Path: m.GetPath(), ReadOnly: m.GetReadOnly()})
	}
	return ready, nil
}

// onlyReads reports whether no service of the workload writes to a project's volume.
func onlyReads(w agent.Workload, volumeID string) bool {
	for _, s := range w.Services {
		for _, m := range s.Spec.GetVolumes() {
			if m.GetVolumeId() == volumeID && !m.GetReadOnly() {
				return false
			}
		}
	}
	return true
}

// removeVolumes deletes a member's own volumes and unfinished environments, and lists what is left of them.
func (r *Reconciler) removeVolumes(ctx context.Context, memberID string) (left []string, err error) {
	err = onVolumes(ctx, func() error { return r.machine.Volumes.RemoveMember(ctx, memberID) })
	if err != nil {
		return nil, err
	}
	if err := r.machine.Environments.RemoveMember(ctx, memberID); err != nil {
		return nil, err
	}
	return r.machine.Volumes.Leftovers(memberID)
}
