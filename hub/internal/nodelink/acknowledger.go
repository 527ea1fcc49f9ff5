package nodelink

import (
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// acknowledger answers the segments of one usage stream in their order, each when it is committed. It works only while
// something waits: thousands of quiet nodes cost no goroutine for it.
type acknowledger struct {
	stream *link.Stream
	// room has a place for each segment that may wait; whoever puts takes one first.
	room    chan struct{}
	working sync.WaitGroup

	mu      sync.Mutex
	waiting []func() *protocol.UsageAck
	busy    bool
}

func (a *acknowledger) put(wait func() *protocol.UsageAck) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = append(a.waiting, wait)
	if !a.busy {
		a.busy = true
		a.working.Go(a.work)
	}
}

func (a *acknowledger) next() func() *protocol.UsageAck {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting) == 0 {
		a.waiting, a.busy = nil, false
		return nil
	}
	wait := a.waiting[0]
	a.waiting = a.waiting[1:]
	return wait
}

func (a *acknowledger) work() {
	for wait := a.next(); wait != nil; wait = a.next() {
		ack := wait() // before the deadline is set: a commit may take its time
		_ = a.stream.SetWriteDeadline(time.Now().Add(writeTimeout))
		if err := a.stream.Send(ack); err != nil {
			// The node will hear nothing more of this stream; it sends what was not acknowledged again on the next.
			a.stream.Abort()
		}
		failpoint.Hit("hub/usage/acknowledged")
		<-a.room
	}
}
