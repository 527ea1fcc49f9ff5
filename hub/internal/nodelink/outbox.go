package nodelink

import (
	"sync"

	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

// outbox holds the messages for a node's control stream: at most one of each kind, the newest. So it is
// bounded by its shape, and a node that reads slowly gets the latest of everything instead of a backlog.
type outbox struct {
	mu       sync.Mutex
	messages [messageKinds]*protocol.HubMessage // by priority
	wake     notify.Signal
}

// messageKinds is the number of priorities.
const messageKinds = 5

// priority orders the kinds of messages: GoAway overtakes all, and a bundle goes before what its keys sign.
func priority(m *protocol.HubMessage) int {
	switch m.GetMessage().(type) {
	case *protocol.HubMessage_GoAway:
		return 0
	case *protocol.HubMessage_PushBundle:
		return 1
	case *protocol.HubMessage_PushState:
		return 2
	case *protocol.HubMessage_PushLeases:
		return 3
	default: // ReportAck
		return messageKinds - 1
	}
}

func newOutbox() *outbox { return &outbox{wake: notify.NewSignal()} }

func (o *outbox) put(m *protocol.HubMessage) {
	o.mu.Lock()
	o.messages[priority(m)] = m
	o.mu.Unlock()
	o.wake.Send()
}

// next removes and returns the message with the highest priority; nil when there is none.
func (o *outbox) next() *protocol.HubMessage {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, m := range o.messages {
		if m != nil {
			o.messages[i] = nil
			return m
		}
	}
	return nil
}
