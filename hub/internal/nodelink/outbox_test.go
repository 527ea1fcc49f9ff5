package nodelink

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestOutboxKeepsTheNewestOfEachKindAndItsOrder(t *testing.T) {
	o := newOutbox()
	for i := range uint64(1000) {
		o.put(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: &protocol.ReportAck{Counter: i}}})
		o.put(pushState(string(rune('a' + i%26))))
		o.put(&protocol.HubMessage{Message: &protocol.HubMessage_PushLeases{PushLeases: &protocol.PushLeases{}}})
	}
	o.put(&protocol.HubMessage{Message: &protocol.HubMessage_PushBundle{PushBundle: &protocol.PushBundle{}}})
	require.Len(t, o.wake, 1, "a thousand wake-ups are one")
	require.NotNil(t, o.next().GetPushBundle(), "keys before what they sign")
	require.Equal(t, string(rune('a'+999%26)), o.next().GetPushState().GetEnvelope().GetPayloadType())
	require.NotNil(t, o.next().GetPushLeases())
	require.Equal(t, uint64(999), o.next().GetReportAck().GetCounter())
	require.Nil(t, o.next())
	o.put(pushState("a"))
	o.put(goAway("shutdown"))
	require.NotNil(t, o.next().GetGoAway(), "GoAway overtakes")
}

func pushState(payloadType string) *protocol.HubMessage {
	return &protocol.HubMessage{Message: &protocol.HubMessage_PushState{
		PushState: &protocol.PushState{Envelope: &protocol.Envelope{PayloadType: payloadType}},
	}}
}
