package nodes

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/groupcommit"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxInFlight is how many segments of one stream may wait for their commit: a node that catches up sends several.
const maxInFlight = 16

// ServeUsage posts the segments of a usage stream and acknowledges each in the order of the stream, once it is
// committed. Up to maxInFlight segments are posted while the next is received, so that they share commits. A segment
// that was posted before is acknowledged again and posts nothing.
//
// A session carries the segments of one store, the one of its hello: a store that takes a new incarnation seals again
// what is not posted.
func (svc *Service) ServeUsage(ctx context.Context, peer nodelink.Peer, incarnation string, stream nodelink.UsageStream,
) error {
	slots := make(chan struct{}, maxInFlight)
	acks := groupcommit.New(groupcommit.All, func(_ context.Context, segments []*queuedSegment) {
		for _, d := range segments {
			stream.Send(svc.ack(ctx, d)) // where that fails, Receive fails, too
			failpoint.Hit("hub/usage/acknowledged")
			<-slots
		}
	})
	defer func() {
		for range maxInFlight {
			slots <- struct{}{} // until each segment is acknowledged, or given up because ctx ended
		}
	}()
	for {
		upload, err := stream.Receive()
		if err != nil {
			return err
		}
		slots <- struct{}{}
		acks.Put(ctx, svc.enqueue(ctx, upload, peer, incarnation))
	}
}

// enqueue verifies a segment and adds it to the next batch. A segment that is refused is done at once.
func (svc *Service) enqueue(ctx context.Context, upload *protocol.UsageUpload, peer nodelink.Peer, incarnation string,
) *queuedSegment {
	verified, err := protocol.VerifySegment(upload.GetSegment(), peer.Key)
	d := &queuedSegment{from: originOf(peer), done: make(chan struct{})}
	d.Store = billing.Store{NodeID: peer.NodeID, Incarnation: incarnation}
	if err == nil {
		err = d.parse(verified)
	}
	if err == nil {
		err = svc.usage.put(ctx, d)
	}
	if err != nil {
		d.err = err
		close(d.done)
	}
	return d
}

// ack waits for a segment's commit and returns its acknowledgement. A refusal is recorded for admins.
func (svc *Service) ack(ctx context.Context, d *queuedSegment) *protocol.UsageAck {
	ack := &protocol.UsageAck{Incarnation: d.incarnation}
	var err error
	select {
	case <-d.done:
		err = d.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err == nil {
		failpoint.Hit("hub/usage/committed")
		ack.PostedSegment, ack.ArchivedSegment, ack.PostedSha256 = d.posted.Number, d.posted.Prunable(), d.posted.SHA256
		svc.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "posted")))
		return ack
	}
	ack.NackReason = nackReason(err)
	svc.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", ack.GetNackReason().Text())))
	if ack.NackReason == protocol.Nack_UNAVAILABLE {
		svc.Log.WarnContext(ctx, "usage not posted", slog.String("node_id", d.Store.NodeID), slog.Any("error", err))
		return ack
	}
	if err := svc.recordRefusal(ctx, d.from, fleet.Refusal{
		Document: protocol.Envelope_USAGE.Text(), Generation: d.Link.Number, Reason: ack.GetNackReason().Text(),
		Detail: protocol.RefusalDetail(err),
	}); err != nil {
		svc.Log.WarnContext(ctx, "refusal not recorded", slog.String("node_id", d.Store.NodeID), slog.Any("error", err))
	}
	return ack
}

func nackReason(err error) protocol.Nack_Reason {
	if r, ok := errors.AsType[*protocol.RefusalError](err); ok {
		return r.Reason
	}
	if fault.IsPermanent(err) {
		return protocol.Nack_MALFORMED
	}
	return protocol.Nack_UNAVAILABLE
}

func checkSegment(s *protocol.UsageSegment, of billing.Store) error {
	switch {
	case s.GetNodeId() != of.NodeID:
		return protocol.Refuse(protocol.Nack_WRONG_NODE, "the usage segment is of another node")
	case s.GetIncarnation() != of.Incarnation:
		return protocol.Refuse(protocol.Nack_MALFORMED, "the usage segment is of another incarnation than the session")
	case s.GetNumber() == 0 || s.GetNumber() > maxNumber:
		return protocol.Refuse(protocol.Nack_MALFORMED, "usage segments are numbered from 1")
	case s.GetNumber() == 1 && len(s.GetPreviousSha256()) != 0, s.GetNumber() > 1 &&
		len(s.GetPreviousSha256()) != sha256.Size:
		return protocol.Refuse(protocol.Nack_MALFORMED, "the usage segment does not name the one before it")
	}
	return nil
}
