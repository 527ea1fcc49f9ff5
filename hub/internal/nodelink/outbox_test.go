package nodelink

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestOutboxKeepsTheNewestOfEachKindAndItsOrder(t *testing.T) {
	o := newOutbox()
	for i := range uint64(1000) {
		o.put(func(o *outbox) { o.ack = &protocol.ReportAck{Counter: i} })
		o.put(func(o *outbox) {
			o.state = &protocol.PushState{Envelope: &protocol.Envelope{PayloadType: string(rune('a' + i%26))}}
		})
		o.put(func(o *outbox) { o.leases = &protocol.PushLeases{} })
	}
	o.put(func(o *outbox) { o.bundle = &protocol.PushBundle{} })
	require.Len(t, o.wake, 1, "a thousand wake-ups are one")
	require.NotNil(t, o.next().GetPushBundle(), "keys before what they sign")
	require.Equal(t, string(rune('a'+999%26)), o.next().GetPushState().GetEnvelope().GetPayloadType())
	require.NotNil(t, o.next().GetPushLeases())
	require.Equal(t, uint64(999), o.next().GetReportAck().GetCounter())
	require.Nil(t, o.next())
	o.put(func(o *outbox) { o.state = &protocol.PushState{}; o.goAway = &protocol.GoAway{} })
	require.NotNil(t, o.next().GetGoAway(), "a farewell overtakes")
}
