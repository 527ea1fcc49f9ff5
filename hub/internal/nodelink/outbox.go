package nodelink

import (
	"sync"

	"github.com/gpuaas/gpuaas/protocol"
)

// outbox holds the messages for a node's control stream: at most one of each kind, of which the newest wins. So it is
// bounded by its shape, and a node that reads slowly gets the latest of everything instead of a backlog.
type outbox struct {
	mu     sync.Mutex
	bundle *protocol.PushBundle
	state  *protocol.PushState
	leases *protocol.PushLeases
	ack    *protocol.ReportAck
	goAway *protocol.GoAway
	// wake carries no data.
	wake chan struct{}
}

func newOutbox() *outbox { return &outbox{wake: make(chan struct{}, 1)} }

func (o *outbox) put(set func(*outbox)) {
	o.mu.Lock()
	set(o)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// next returns the next message, nil for none. GoAway overtakes everything; a bundle goes before what is signed by its
// keys.
func (o *outbox) next() *protocol.HubMessage {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.goAway != nil:
		m := o.goAway
		o.goAway = nil
		return &protocol.HubMessage{Message: &protocol.HubMessage_GoAway{GoAway: m}}
	case o.bundle != nil:
		m := o.bundle
		o.bundle = nil
		return &protocol.HubMessage{Message: &protocol.HubMessage_PushBundle{PushBundle: m}}
	case o.state != nil:
		m := o.state
		o.state = nil
		return &protocol.HubMessage{Message: &protocol.HubMessage_PushState{PushState: m}}
	case o.leases != nil:
		m := o.leases
		o.leases = nil
		return &protocol.HubMessage{Message: &protocol.HubMessage_PushLeases{PushLeases: m}}
	case o.ack != nil:
		m := o.ack
		o.ack = nil
		return &protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: m}}
	}
	return nil
}
