package reconcile

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxVolumeWork bounds how many volumes of one project are made, copied or deleted at the same time.
const maxVolumeWork = 2

// projectVolumes is the work on the volumes of projects. The reconciler's mu guards it.
type projectVolumes struct {
	busy     map[string]bool
	statuses map[string]*protocol.VolumeStatus
}

// applyVolumes starts the work on each volume that the state names, but for those on which it goes on already: a copy
// of a large one delays no other volume.
func (r *Reconciler) applyVolumes(ctx context.Context) error {
	desired := r.store.Volumes()
	named := map[string]bool{}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, v := range desired {
		named[v.GetId()] = true
		if r.volumes.busy[v.GetId()] {
			continue
		}
		r.volumes.busy[v.GetId()] = true
		r.running.Go(func() { r.applyVolume(ctx, v) })
	}
	maps.DeleteFunc(r.volumes.statuses, func(id string, _ *protocol.VolumeStatus) bool { return !named[id] })
	return nil
}

func (r *Reconciler) applyVolume(ctx context.Context, v *protocol.ProjectVolume) {
	var status *protocol.VolumeStatus
	if unlock, err := r.volumeWork.Lock(ctx, v.GetProjectId()); err == nil {
		status = r.machine.Volumes.Apply(ctx, v, func(memberID string) bool { return r.mayUse(ctx, memberID, v.GetId()) })
		unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.volumes.busy, v.GetId())
	if ctx.Err() != nil {
		return
	}
	if !proto.Equal(status, r.volumes.statuses[v.GetId()]) {
		r.volumes.statuses[v.GetId()] = status
		r.notifySubscribers()
		r.loop.Wake() // a container may wait for the volume
	}
	// The state may describe the volume otherwise by now.
	if !slices.ContainsFunc(r.store.Volumes(), func(now *protocol.ProjectVolume) bool { return proto.Equal(now, v) }) {
		r.volumeLoop.Wake()
	}
}

// volumeStatuses are sorted by id. The caller holds mu.
func (r *Reconciler) volumeStatuses() []*protocol.VolumeStatus {
	return slices.SortedFunc(maps.Values(r.volumes.statuses), func(a, b *protocol.VolumeStatus) int {
		return cmp.Compare(a.GetId(), b.GetId())
	})
}

// mayUse reports whether a member may have a container with a project's volume: its workload or the fallback mounts it,
// an action on the member is under way, or a container is of neither. One that is not in the state keeps its volumes
// until nothing of it is left.
func (r *Reconciler) mayUse(ctx context.Context, memberID, volumeID string) bool {
	var services []agent.Service
	for _, w := range r.acceptedWorkloads() {
		if w.MemberID == memberID {
			services = w.Services
			if w.Fallback != nil {
				services = slices.Concat(services, w.Fallback.Services)
			}
		}
	}
	mounts := func(s agent.Service) bool {
		return slices.ContainsFunc(s.Spec.GetVolumes(), func(m *protocol.VolumeMount) bool {
			return m.GetVolumeId() == volumeID
		})
	}
	r.mu.Lock()
	busy := len(r.busy[memberID]) > 0
	r.mu.Unlock()
	if busy || len(services) == 0 || slices.ContainsFunc(services, mounts) {
		return true
	}
	all, err := r.list(ctx)
	return err != nil || slices.ContainsFunc(all, func(c agent.Listed) bool {
		return c.MemberID == memberID && !slices.ContainsFunc(services, func(s agent.Service) bool {
			return s.SpecDigest == c.SpecDigest
		})
	})
}
