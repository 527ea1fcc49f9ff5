package nodes

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// documentUsage is the refused document of a node's last_refusal when the hub refused the node's usage.
const documentUsage = "usage"

// Usage checks a sealed segment and puts it into the next batch, so that segments are posted in the order of the calls.
// The returned function waits for the commit and gives the acknowledgement. A segment that was posted before is
// acknowledged again and posts nothing.
//
// A session carries the segments of one store, the one of its hello: a store that takes another name seals again what
// is not posted.
func (svc *Service) Usage(ctx context.Context, peer nodelink.Peer, incarnation string,
	upload *protocol.UsageUpload,
) func() *protocol.UsageAck {
	verified, err := protocol.VerifySegment(upload.GetSegment(), peer.Key)
	var d *queuedSegment
	if err == nil {
		d, err = parseSegment(verified, store{peer.NodeID, incarnation})
	}
	if err == nil {
		err = svc.usage.put(ctx, d)
	}
	return func() *protocol.UsageAck {
		var reached watermark
		if err == nil {
			reached, err = d.wait(ctx)
		}
		return svc.acknowledge(ctx, peer.NodeID, verified.Message(), reached, err)
	}
}

func (svc *Service) acknowledge(ctx context.Context, nodeID string, seg *protocol.UsageSegment, reached watermark,
	err error,
) *protocol.UsageAck {
	ack := &protocol.UsageAck{Incarnation: seg.GetIncarnation()}
	if err == nil {
		failpoint.Hit("hub/usage/committed")
		ack.PostedSegment, ack.ArchivedSegment, ack.PostedSha256 = reached.Number, reached.prunable(), reached.SHA256
		svc.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "posted")))
		return ack
	}
	ack.NackReason = nackReason(err)
	svc.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", ack.GetNackReason())))
	if ack.NackReason == protocol.RefusalUnavailable {
		svc.Log.WarnContext(ctx, "usage not posted", slog.String("node_id", nodeID), slog.Any("error", err))
		return ack
	}
	// A contradiction is for an admin.
	if err := svc.recordRefusal(ctx, nodeID, fleet.Refusal{
		Document: documentUsage, Generation: seg.GetNumber(), Reason: ack.GetNackReason(),
		Detail: protocol.RefusalDetail(err),
	}); err != nil {
		svc.Log.WarnContext(ctx, "refusal not recorded", slog.String("node_id", nodeID), slog.Any("error", err))
	}
	return ack
}

func nackReason(err error) string {
	if r, ok := errors.AsType[*protocol.RefusalError](err); ok {
		return r.Reason
	}
	if fault.IsPermanent(err) {
		return protocol.RefusalMalformed
	}
	return protocol.RefusalUnavailable
}

func checkSegment(s *protocol.UsageSegment, of store) error {
	switch {
	case s.GetNodeId() != of.nodeID:
		return protocol.Refuse(protocol.RefusalWrongNode, "the usage segment is of another node")
	case s.GetIncarnation() != of.incarnation:
		return protocol.Refuse(protocol.RefusalMalformed, "the usage segment is of another incarnation than the session")
	case s.GetNumber() == 0 || s.GetNumber() > maxNumber:
		return protocol.Refuse(protocol.RefusalMalformed, "usage segments are numbered from 1")
	case s.GetNumber() == 1 && len(s.GetPreviousSha256()) != 0, s.GetNumber() > 1 &&
		len(s.GetPreviousSha256()) != sha256.Size:
		return protocol.Refuse(protocol.RefusalMalformed, "the usage segment does not name the one before it")
	}
	return nil
}

// watermark is how far the chain of one store is posted without a gap, and how far that is in a verified backup.
type watermark struct {
	usagechain.Watermark
	archived uint64
	// backedUp says that there are backups at all.
	backedUp bool
}

// prunable is the last segment that the node may delete: the last posted one where no backup is set up
// (docs/design/metering.md).
func (m watermark) prunable() uint64 {
	if m.backedUp {
		return m.archived
	}
	return m.Number
}
