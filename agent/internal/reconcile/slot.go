package reconcile

import (
	"context"
	"sync"
	"time"
)

// maxSlotOnVolume is how long an action keeps its slot while it works on a volume.
const maxSlotOnVolume = time.Second

// actionSlot is the slot of one action among those of all actions. The action gives it back while it works on a volume
// for longer than maxSlotOnVolume: copies of large volumes in all slots would delay every other member for hours.
type actionSlot struct {
	slots chan struct{}

	// mu is held while a step waits for the slot, until the action's context ends at the latest.
	mu    sync.Mutex
	taken bool
	// outside counts the parallel steps that have given the slot back and still work on a volume.
	outside int
}

type slotKey struct{}

// takeSlot waits for a slot for an action, which runs with the returned context and then calls giveBack.
func takeSlot(ctx context.Context, slots chan struct{}) (acting context.Context, giveBack func(), err error) {
	s := &actionSlot{slots: slots}
	if err := s.take(ctx); err != nil {
		return ctx, nil, err
	}
	return context.WithValue(ctx, slotKey{}, s), s.giveBack, nil
}

// onVolumes does a step's work on volumes, without the slot of the action of ctx once the work takes long.
func onVolumes(ctx context.Context, work func() error) error {
	s, has := ctx.Value(slotKey{}).(*actionSlot)
	if !has {
		return work()
	}
	var ended, left bool // mu guards them
	timer := time.AfterFunc(maxSlotOnVolume, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !ended {
			left = true
			s.outside++
			s.giveBack()
		}
	})
	err := work()
	timer.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	if ended = true; left {
		s.outside--
	}
	if s.outside > 0 || err != nil {
		return err
	}
	return s.take(ctx)
}

// take waits for the slot unless the action has it. The caller of take and giveBack holds mu, or no step runs.
func (s *actionSlot) take(ctx context.Context) error {
	if s.taken {
		return nil
	}
	select {
	case s.slots <- struct{}{}:
		s.taken = true
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *actionSlot) giveBack() {
	if s.taken {
		<-s.slots
		s.taken = false
	}
}
