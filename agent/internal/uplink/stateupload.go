package uplink

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// What a hub asks for that was restored from a backup.

// rewind sends usage again that the hub has forgotten. What is not here any more either is lost with the hub's rows;
// the rest goes under a new name, because the old one's numbers have a gap now.
func (s *session) rewind(ctx context.Context, posted uint64) error {
	before := s.u.store.Spool().Marks
	if err := s.u.store.RewindUsage(posted); err != nil {
		s.u.log.WarnContext(ctx, "the hub has forgotten usage that is not kept here either: this store takes a new "+
			"incarnation", slog.Any("error", err))
		if err := s.u.store.TakeNewIncarnation(s.u.clock.Now()); err != nil {
			return err
		}
		return errRedial
	}
	s.u.log.WarnContext(ctx, "the hub was restored: usage is sent again", slog.Uint64("from_segment", posted+1),
		slog.Uint64("to_segment", before.Posted))
	return nil
}

// uploadState sends all documents that this node has accepted, in as many messages as it takes.
func (s *session) uploadState(ctx context.Context) error {
	state, leases := s.u.store.Signed()
	documents, err := s.u.store.Documents()
	if err != nil {
		return err
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
