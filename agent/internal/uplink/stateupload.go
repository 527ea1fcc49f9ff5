package uplink

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// uploadState sends all documents that this node has accepted, in as many messages as needed. A hub that was restored
// from a backup requests it.
func (s *session) uploadState(ctx context.Context) error {
	state, leases := s.u.store.Signed()
	documents, unreadable, err := s.u.store.Documents()
	if err != nil {
		return err
	}
	for _, err := range unreadable {
		s.u.log.WarnContext(ctx, "a stored document is left out of the upload", slog.Any("error", err))
	}
	messages := stateUploads(state, documents, leases)
	last := messages[len(messages)-1]
	last.Last, last.Bundle = true, s.u.store.Bundle().Envelope()
	for _, m := range messages {
		if err := s.control.SetDeadline(time.Now().Add(sendTimeout)); err != nil {
			return err
		}
		if err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_StateUpload{StateUpload: m}}); err != nil {
			return err
		}
	}
	s.u.log.WarnContext(ctx, "the hub was restored: uploaded the accepted state",
		slog.Uint64("epoch", s.u.store.Accepted().Epoch),
		slog.Uint64("generation", s.u.store.Accepted().Generation), slog.Int("documents", len(documents)))
	return nil
}

// stateUploads spreads documents over messages that each stay below the limit of the control stream; there is at least
// one message, and the leases are in the last.
func stateUploads(state *protocol.Envelope, documents [][]byte, leases []*protocol.Envelope) []*protocol.StateUpload {
	out := []*protocol.StateUpload{{State: state}}
	size := 0
	for _, d := range documents {
		if size+len(d) > protocol.MaxPushPartsBytes && size > 0 {
			out, size = append(out, &protocol.StateUpload{State: state}), 0
		}
		m := out[len(out)-1]
		m.Parts = append(m.Parts, d)
		size += len(d)
	}
	leased := 0
	for _, l := range leases {
		leased += proto.Size(l)
	}
	if size+leased > protocol.MaxPushPartsBytes && size > 0 {
		out = append(out, &protocol.StateUpload{State: state})
	}
	out[len(out)-1].Leases = leases
	return out
}
