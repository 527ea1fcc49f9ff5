package hubtest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// TryReport reports without waiting for the answer, which a quarantined node does not get.
func (l *Session) TryReport(generation uint64, statuses ...*protocol.WorkloadStatus) {
	l.T.Helper()
	l.sendReport(1, generation, statuses)
}

func (l *Session) sendReport(epoch, generation uint64, statuses []*protocol.WorkloadStatus) {
	l.T.Helper()
	l.Counter++
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: l.Counter, At: timestamppb.Now(), Epoch: epoch, Generation: generation, Workloads: statuses,
	}}})
}

// UploadState sends a state upload.
func (l *Session) UploadState(b *protocol.StateUpload) {
	l.T.Helper()
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_StateUpload{StateUpload: b}})
}

// ReportState reports under the state's own epoch and waits until the hub has committed the report.
func (l *Session) ReportState(s *protocol.DesiredState, statuses ...*protocol.WorkloadStatus) {
	l.T.Helper()
	l.sendReport(s.GetEpoch(), s.GetGeneration(), statuses)
	Next(l, func(m *protocol.HubMessage) (bool, bool) { return true, m.GetReportAck().GetCounter() == l.Counter })
}

// Session is a node's open session with the hub.
type Session struct {
	// LastLeases is the last received batch. It may overtake the state that it belongs to.
	LastLeases *protocol.HubMessage
	T          *testing.T
	Node       *Node
	Conn       *link.Conn
	Control    *link.Stream
	Welcome    *protocol.Welcome
	// Received has the messages of the control stream; closed with it.
	Received chan *protocol.HubMessage
	Counter  uint64
}

// ExpectLeases returns the newest leases since LastLeases was cleared; they may have overtaken their state.
func (l *Session) ExpectLeases() *protocol.LeaseBatch {
	l.T.Helper()
	m := l.LastLeases
	if m == nil {
		m = Next(l, func(m *protocol.HubMessage) (*protocol.HubMessage, bool) { return m, m.GetPushLeases() != nil })
	}
	v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), l.Node.Bundle, l.Node.Identity)
	require.NoError(l.T, err)
	return v.Message()
}

// Next waits for a message that pick accepts and drops the others.
func Next[T any](l *Session, pick func(*protocol.HubMessage) (T, bool)) T {
	l.T.Helper()
	for {
		select {
		case m, open := <-l.Received:
			require.True(l.T, open, "the session ended")
			if m.GetPushLeases() != nil {
				l.LastLeases = m
			}
			if v, ok := pick(m); ok {
				return v
			}
		case <-time.After(Bound):
			require.FailNow(l.T, "nothing came down the control stream")
		}
	}
}

// ExpectState waits for a desired state with the number of parts, checks it as a node would, and accepts it.
func (l *Session) ExpectState(parts int) (*protocol.DesiredState, *protocol.PushState) {
	l.T.Helper()
	return l.expect(func(s *protocol.DesiredState) bool { return len(s.GetParts()) == parts })
}

// ExpectSSHKeys is ExpectState for the number of SSH keys.
func (l *Session) ExpectSSHKeys(keys int) (*protocol.DesiredState, *protocol.PushState) {
	l.T.Helper()
	return l.expect(func(s *protocol.DesiredState) bool { return len(s.GetSshKeys()) == keys })
}

// ExpectVolumes is ExpectState for the number of volumes.
func (l *Session) ExpectVolumes(volumes int) (*protocol.DesiredState, *protocol.PushState) {
	l.T.Helper()
	return l.expect(func(s *protocol.DesiredState) bool { return len(s.GetVolumes()) == volumes })
}

func (l *Session) expect(is func(*protocol.DesiredState) bool) (*protocol.DesiredState, *protocol.PushState) {
	l.T.Helper()
	push := Next(l, func(m *protocol.HubMessage) (*protocol.PushState, bool) {
		if m.GetPushState() == nil {
			return nil, false
		}
		v, err := protocol.VerifyState(m.GetPushState().GetEnvelope(), l.Node.Bundle, l.Node.Identity)
		require.NoError(l.T, err)
		return m.GetPushState(), is(v.Message())
	})
	v, err := protocol.VerifyState(push.GetEnvelope(), l.Node.Bundle, l.Node.Identity)
	require.NoError(l.T, err)
	for _, part := range push.GetParts() {
		_, err := protocol.VerifyPart(v, part)
		require.NoError(l.T, err)
	}
	l.Ack(protocol.Envelope_STATE, v.Message().GetEpoch(), v.Message().GetGeneration())
	return v.Message(), push
}

// Ack acknowledges a document.
func (l *Session) Ack(document protocol.Envelope_Kind, epoch, generation uint64) {
	l.T.Helper()
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{Ack: &protocol.Ack{
		Document: document,
		Epoch:    epoch, Generation: generation,
	}}})
}

// Send sends one message.
func (l *Session) Send(m *protocol.NodeMessage) {
	l.T.Helper()
	require.NoError(l.T, l.Control.Send(m))
}

// Report is ReportState for a state of epoch 1.
func (l *Session) Report(generation uint64, statuses ...*protocol.WorkloadStatus) {
	l.T.Helper()
	l.ReportState(&protocol.DesiredState{Epoch: 1, Generation: generation}, statuses...)
}

// ReportVolume reports where a volume is, and no member.
func (l *Session) ReportVolume(under *protocol.DesiredState, s *protocol.VolumeStatus) {
	l.T.Helper()
	l.Counter++
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: l.Counter, At: timestamppb.Now(), Epoch: under.GetEpoch(), Generation: under.GetGeneration(),
		Volumes: []*protocol.VolumeStatus{s},
	}}})
	Next(l, func(m *protocol.HubMessage) (bool, bool) { return true, m.GetReportAck().GetCounter() == l.Counter })
}

// Fetch sends one fetch request.
func (l *Session) Fetch(request *protocol.FetchRequest) *protocol.FetchResponse {
	l.T.Helper()
	stream, err := l.Conn.Open(l.T.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_FETCH})
	require.NoError(l.T, err)
	defer func() { _ = stream.Close() }()
	require.NoError(l.T, stream.Send(request))
	response := &protocol.FetchResponse{}
	require.NoError(l.T, stream.Receive(response, protocol.MaxFetchBytes))
	return response
}

// OpenUsage is an open usage stream.
func (l *Session) OpenUsage() *link.Stream {
	l.T.Helper()
	stream, err := l.Conn.Open(l.T.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_USAGE})
	require.NoError(l.T, err)
	return stream
}

// Upload sends a segment and returns its acknowledgement.
func Upload(t *testing.T, stream *link.Stream, env *protocol.Envelope) *protocol.UsageAck {
	t.Helper()
	require.NoError(t, stream.Send(&protocol.UsageUpload{Segment: env}))
	ack := &protocol.UsageAck{}
	require.NoError(t, stream.Receive(ack, protocol.MaxControlBytes))
	return ack
}
