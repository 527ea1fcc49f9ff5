package reconcile

import (
	"maps"
	"slices"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

// notePull records that a member waits for an image, until the returned function is called.
func (r *Reconciler) notePull(a agent.PullImage) (ended func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pulling[a.MemberID] = a.Image
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.pulling[a.MemberID] == a.Image {
			delete(r.pulling, a.MemberID)
		}
	}
}

// Pulls returns how far the images are for which members wait, by member id.
func (r *Reconciler) Pulls() []*protocol.ImagePull {
	r.mu.Lock()
	waiting := maps.Clone(r.pulling)
	r.mu.Unlock()
	var out []*protocol.ImagePull
	for _, member := range slices.Sorted(maps.Keys(waiting)) {
		p, pulling := r.machine.Images.PullProgress(waiting[member])
		if !pulling {
			continue
		}
		one := &protocol.ImagePull{
			MemberId: member, Phase: protocol.ImagePull_FETCHING,
			DoneBytes: uint64(max(p.DoneBytes, 0)), TotalBytes: uint64(max(p.TotalBytes, 0)),
		}
		switch p.Phase {
		case runtime.PullResolving:
			one.Phase = protocol.ImagePull_RESOLVING
		case runtime.PullUnpacking:
			one.Phase = protocol.ImagePull_UNPACKING
		case runtime.PullFetching:
		}
		out = append(out, one)
	}
	return out
}
