package reconcile

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/agent/clock"
)

// clockSetMax bounds how long a session waits until the clock is set; while containerd does not answer, a later sample
// sets it.
const clockSetMax = 5 * time.Second

// clockProposal is a time of the hub that differs from the node's. done is closed once the clock is set to it.
type clockProposal struct {
	next clock.Clock
	done chan struct{}
}

// SyncClock sets the clock by the time that a hub sent in an answer that took so long.
func (r *Reconciler) SyncClock(ctx context.Context, hub time.Time, took time.Duration) {
	proposal := r.proposeClock(hub, took)
	if proposal == nil {
		return
	}
	limit := time.NewTimer(clockSetMax)
	defer limit.Stop()
	select {
	case <-proposal.done:
	case <-ctx.Done():
	case <-limit.C:
		r.log.WarnContext(ctx, "the clock is wrong and cannot be set yet")
	}
}

// proposeClock takes a hub's time over at once where it agrees with the node's. Otherwise it returns a proposal: the
// next sample sets the clock, so that all time until the step is measured and nothing of the step is.
func (r *Reconciler) proposeClock(hub time.Time, took time.Duration) *clockProposal {
	r.proposing.Lock()
	defer r.proposing.Unlock()
	next, steps := r.clock.Synced(hub, took)
	if !steps {
		was := r.clock.MachineIsWrong()
		r.pendingClock.Store(nil)
		r.clock.Set(next)
		if r.clock.MachineIsWrong() != was {
			r.Wake()
		}
		return nil
	}
	proposal := &clockProposal{next: next, done: make(chan struct{})}
	r.pendingClock.Store(proposal)
	r.clockDue.Send()
	return proposal
}

// setClock applies the proposal right after a sample. The caller holds clockLock for writing.
func (r *Reconciler) setClock(ctx context.Context) error {
	r.proposing.Lock()
	defer r.proposing.Unlock()
	proposal := r.pendingClock.Load()
	if proposal == nil {
		return nil
	}
	from, to := r.clock.Compare(proposal.next)
	if err := r.store.SetClock(from, to); err != nil {
		return err
	}
	r.clock.Set(proposal.next)
	r.watchedSince.Store(new(r.clock.Now()))
	r.pendingClock.Store(nil)
	close(proposal.done)
	r.log.WarnContext(ctx, "the clock is set by the hub", slog.Time("from", from), slog.Time("to", to.At))
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.retryAfter) // these times may never come
	r.Wake()
	return nil
}

// withClock runs do, which writes a node time into the store, while the clock cannot be set.
func (r *Reconciler) withClock(do func(now time.Time) error) error {
	r.clockLock.RLock()
	defer r.clockLock.RUnlock()
	return do(r.clock.Now())
}
