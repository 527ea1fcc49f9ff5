package swarm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealed is a signed segment.
type sealed struct {
	number  uint64
	records int
	upload  *protocol.UsageUpload
}

// repeats reports whether a segment is sent twice.
func repeats(number uint64, every int) bool { return every > 0 && number%uint64(every) == 0 }

func (c *fleet) seal(in Seal) (Reply, error) {
	nodes, err := c.first(len(in.Members))
	if err != nil {
		return Reply{}, err
	}
	var group errgroup.Group
	group.SetLimit(enrolling)
	for i, n := range nodes {
		group.Go(func() error { return n.seal(in, in.Members[i]) })
	}
	if err := group.Wait(); err != nil {
		return Reply{}, err
	}
	var r Reply
	for _, n := range nodes {
		for _, s := range n.sealed {
			r.Records += int64(s.records)
		}
	}
	return r, nil
}

func (n *node) seal(in Seal, members []string) error {
	for cut := range in.Cuts {
		from := in.From.Add(time.Duration(cut) * in.Cut)
		segments, err := n.cut(members, in.Meters, from, from.Add(in.Cut))
		if err != nil {
			return err
		}
		n.sealed = append(n.sealed, segments...)
	}
	return nil
}

// cut seals and signs a record of each meter for each member. A node has one goroutine that does.
func (n *node) cut(members, meters []string, from, to time.Time) (out []sealed, err error) {
	var records []*protocol.UsageRecord
	for _, member := range members {
		for _, meter := range meters {
			records = append(records, &protocol.UsageRecord{
				MemberId: member, Revision: 1, Meter: meter, Quantity: quantity(meter, to.Sub(from)),
				RunId: member + ".runtime.1", LeaseNo: 1, StartedAt: timestamppb.New(from), EndedAt: timestamppb.New(to),
			})
		}
	}
	n.mu.Lock()
	chain := n.chain
	n.mu.Unlock()
	for len(records) > 0 {
		var s spool.Sealed
		if s, chain, records, err = spool.Seal(chain, records, to); err != nil {
			return nil, err
		}
		env, err := protocol.Sign(protocol.PayloadSegment, s.Payload, protocol.NewEd25519Signer(n.key))
		if err != nil {
			return nil, err
		}
		out = append(out, sealed{
			s.Segment.GetNumber(), len(s.Segment.GetRecords()),
			&protocol.UsageUpload{Segment: env},
		})
	}
	n.mu.Lock()
	n.chain = chain
	n.mu.Unlock()
	return out, nil
}

// quantity is a member's usage of one record, within the limits of the app: a twentieth of a core, 16 MiB.
func quantity(meter string, d time.Duration) int64 {
	switch meter {
	case protocol.MeterCPUSeconds:
		return d.Microseconds() / 20
	case protocol.MeterMemoryByteSeconds:
		return int64(d.Seconds() * (16 << 20))
	default:
		return d.Microseconds()
	}
}

// sendUsage sends all sealed segments and waits for their acknowledgements, in a window as large as an agent's.
func (n *node) sendUsage(ctx context.Context, repeatEvery int) error {
	n.mu.Lock()
	stream := n.usage
	n.mu.Unlock()
	if stream == nil {
		return errors.New("the node has no session")
	}
	defer context.AfterFunc(ctx, stream.Abort)()
	var queue []*protocol.UsageUpload
	for _, s := range n.sealed {
		queue = append(queue, s.upload)
		if repeats(s.number, repeatEvery) {
			queue = append(queue, s.upload)
		}
	}
	var posted uint64
	for sent, acked := 0, 0; acked < len(queue); acked++ {
		for ; sent < len(queue) && sent-acked < hubsession.UsageWindow; sent++ {
			if err := stream.Send(queue[sent]); err != nil {
				return err
			}
		}
		ack := &protocol.UsageAck{}
		if err := stream.Receive(ack, protocol.MaxHeaderBytes); err != nil {
			return err
		}
		if ack.GetNackReason() != 0 {
			return fmt.Errorf("segment after %d refused: %s", posted, ack.GetNackReason().Text())
		}
		posted = max(posted, ack.GetPostedSegment())
	}
	if want := n.sealed[len(n.sealed)-1].number; posted != want {
		return fmt.Errorf("%d of %d segments are posted", posted, want)
	}
	return nil
}
