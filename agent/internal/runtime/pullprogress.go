package runtime

import "sync/atomic"

// PullPhase is what a pull does now.
type PullPhase int32

// The phases of a pull, in their order.
const (
	// PullResolving reads manifest and configuration.
	PullResolving PullPhase = iota
	// PullFetching fetches the layers that are missing, and unpacks each meanwhile.
	PullFetching
	// PullUnpacking unpacks what was fetched last.
	PullUnpacking
)

// PullProgress says how far a pull is, in bytes of the compressed layers that were missing when it began.
type PullProgress struct {
	Phase                 PullPhase
	DoneBytes, TotalBytes int64
}

// pullState is the progress of a pull under way.
type pullState struct {
	phase       atomic.Int32
	done, total atomic.Int64
}

func (p *pullState) enter(phase PullPhase) { p.phase.Store(int32(phase)) }

// fetching begins the phase with the bytes that it will fetch.
func (p *pullState) fetching(total int64) {
	p.total.Store(total)
	p.enter(PullFetching)
}

// PullProgress returns how far the pull of an image is, and false where none is under way.
func (r *Runtime) PullProgress(image string) (PullProgress, bool) {
	found, pulling := r.pulling.Load(image)
	p, _ := found.(*pullState)
	if !pulling {
		return PullProgress{}, false
	}
	now := PullProgress{Phase: PullPhase(p.phase.Load()), DoneBytes: p.done.Load(), TotalBytes: p.total.Load()}
	if now.Phase == PullFetching && now.DoneBytes >= now.TotalBytes {
		now.Phase = PullUnpacking
	}
	return now, true
}
