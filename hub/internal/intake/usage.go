package intake

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/session"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxAhead bounds how far beyond a gap segments are taken; the node sends those again when the gap is closed.
	maxAhead = 1024
	// documentUsage is the refused document of a node's last_refusal when the hub refused the node's usage.
	documentUsage = "usage"
)

// Reasons for which a segment is not taken, beside protocol's. Only RefusalUnavailable passes by itself.
const (
	// ReasonChainBroken: the segment is not the one that its neighbours in the chain were sealed with.
	ReasonChainBroken = "chain_broken"
	// ReasonOutOfOrder: the segment is over maxAhead beyond the first one that is missing.
	ReasonOutOfOrder = "out_of_order"
)

// Usage takes a sealed segment: it checks it at once and puts it into the next batch of its lane, so that segments are posted
// in the order of the calls. The returned function waits for the commit and gives the acknowledgement. A segment that was
// posted before is acknowledged again and posts nothing.
func (i *Intake) Usage(ctx context.Context, peer session.Peer, upload *protocol.UsageUpload) func() *protocol.UsageAck {
	verified, err := protocol.VerifySegment(upload.GetSegment(), peer.Key)
	var d *delivery
	if err == nil {
		d, err = read(verified, peer.NodeID)
	}
	if err == nil {
		i.lane(peer.NodeID).put(context.WithoutCancel(ctx), d)
	}
	return func() *protocol.UsageAck {
		var reached mark
		if err == nil {
			reached, err = d.wait(ctx)
		}
		return i.acknowledge(ctx, peer.NodeID, verified.Message(), reached, err)
	}
}

func (i *Intake) acknowledge(ctx context.Context, nodeID string, seg *protocol.UsageSegment, reached mark, err error) *protocol.UsageAck {
	ack := &protocol.UsageAck{Incarnation: seg.GetIncarnation()}
	if err == nil {
		failpoint.Hit("hub/usage/committed")
		ack.PostedSegment, ack.ArchivedSegment = reached.number, reached.mayForget()
		i.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "posted")))
		return ack
	}
	ack.Refused = reasonOf(err)
	i.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", ack.GetRefused())))
	if ack.Refused == protocol.RefusalUnavailable {
		i.Log.WarnContext(ctx, "usage not posted", slog.String("node_id", nodeID), slog.Any("error", err))
		return ack
	}
	// A contradiction is for an admin to look at.
	if err := i.refused(ctx, nodeID, fleet.Refusal{
		Document: documentUsage, Generation: seg.GetNumber(), Reason: ack.GetRefused(), Detail: protocol.RefusalDetail(err),
	}); err != nil {
		i.Log.WarnContext(ctx, "refusal not recorded", slog.String("node_id", nodeID), slog.Any("error", err))
	}
	return ack
}

func reasonOf(err error) string {
	if r, ok := errors.AsType[*protocol.RefusalError](err); ok {
		return r.Reason
	}
	if fault.IsPermanent(err) {
		return protocol.RefusalMalformed
	}
	return protocol.RefusalUnavailable
}

func checkSegment(s *protocol.UsageSegment, nodeID string) error {
	switch {
	case s.GetNodeId() != nodeID:
		return protocol.Refuse(protocol.RefusalWrongNode, "the usage segment is of another node")
	case !validIncarnation(s.GetIncarnation()):
		return protocol.Refuse(protocol.RefusalMalformed, "the usage segment names no incarnation")
	case s.GetNumber() == 0 || s.GetNumber() > maxNumber:
		return protocol.Refuse(protocol.RefusalMalformed, "usage segments are numbered from 1")
	case s.GetNumber() == 1 && len(s.GetPreviousSha256()) != 0, s.GetNumber() > 1 && len(s.GetPreviousSha256()) != sha256.Size:
		return protocol.Refuse(protocol.RefusalMalformed, "the usage segment does not name the one before it")
	}
	return nil
}

// link is a segment's place in the chain.
type link struct {
	number   uint64
	sha256   []byte
	previous []byte
}

// mark is how far the chain of one store is posted without a gap, and how far that is in a verified backup, too.
type mark struct {
	number   uint64
	sha256   []byte
	archived uint64
	// backedUp says that there are backups at all.
	backedUp bool
}

// mayForget is up to where the node may forget its segments: what is posted, where no backup is set up (DESIGN §10).
func (m mark) mayForget() uint64 {
	if m.backedUp {
		return m.archived
	}
	return m.number
}

// place decides, purely, whether a segment may be taken at its place in the chain; known is true for one that was posted
// before. Every neighbour that is there must fit, whichever came first.
func place(m mark, ahead map[uint64]link, at link) (known bool, err error) {
	broken := func(format string) error {
		return protocol.Refuse(ReasonChainBroken, format, at.number)
	}
	if at.number < m.number {
		return true, nil
	}
	if at.number == m.number {
		if !bytes.Equal(at.sha256, m.sha256) {
			return false, broken("segment %d was posted with another content")
		}
		return true, nil
	}
	if there, ok := ahead[at.number]; ok {
		if !bytes.Equal(at.sha256, there.sha256) {
			return false, broken("segment %d was posted with another content")
		}
		return true, nil
	}
	if at.number-m.number > maxAhead {
		return false, protocol.Refuse(ReasonOutOfOrder, "segment %d is too far beyond segment %d, which is the last without a gap", at.number, m.number)
	}
	before, ok := ahead[at.number-1]
	if at.number == m.number+1 {
		before, ok = link{sha256: m.sha256}, true
	}
	if ok && !bytes.Equal(at.previous, before.sha256) {
		return false, broken("segment %d does not follow the one that was posted before it")
	}
	if after, ok := ahead[at.number+1]; ok && !bytes.Equal(after.previous, at.sha256) {
		return false, broken("segment %d is not the one that the next was sealed after")
	}
	return false, nil
}
