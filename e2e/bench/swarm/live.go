package swarm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// live has the first nodes measure; the reply has how long each segment took to be acknowledged. A node whose session
// ends meanwhile sends no more.
func (c *fleet) live(ctx context.Context, in Live) (Reply, error) {
	nodes, err := c.first(len(in.Members))
	if err != nil {
		return Reply{}, err
	}
	begin := time.Now()
	until := begin.Add(in.For)
	took, records, errs := make([][]time.Duration, len(nodes)), make([]int, len(nodes)), make([]error, len(nodes))
	var running sync.WaitGroup
	for i, n := range nodes {
		first := begin.Add(in.Every * time.Duration(i+1) / time.Duration(len(nodes)))
		running.Go(func() {
			took[i], records[i], errs[i] = n.measure(ctx, in, in.Members[i], begin, first, until)
		})
	}
	running.Wait()
	r := Reply{Failures: c.outcomes.take(), Seconds: time.Since(begin).Seconds()}
	for i := range nodes {
		if errs[i] != nil {
			r.Broken++
			r.BrokenBy = errs[i].Error()
		}
		r.Records += int64(records[i])
		for _, d := range took[i] {
			r.Millis = append(r.Millis, float64(d.Microseconds())/1000)
		}
	}
	return r, ctx.Err()
}

// measure cuts a segment at first and every in.Every from then on, and sends it while fewer than an agent's window wait
// for their acknowledgement. It returns the time of each from when it was due to its acknowledgement.
func (n *node) measure(ctx context.Context, in Live, members []string, begin, first, until time.Time,
) (took []time.Duration, records int, err error) {
	n.mu.Lock()
	stream := n.usage
	n.mu.Unlock()
	if stream == nil {
		return nil, 0, errors.New("the node has no session")
	}
	defer context.AfterFunc(ctx, stream.Abort)()
	due := make(chan time.Time, hubsession.UsageWindow)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer close(due)
		var err error
		records, err = n.sendLive(ctx, in, members, stream, due, begin, first, until)
		return err
	})
	group.Go(func() error {
		for at := range due {
			ack := &protocol.UsageAck{}
			if err := stream.Receive(ack, protocol.MaxHeaderBytes); err != nil {
				return err
			}
			if reason := ack.GetNackReason(); reason != 0 {
				return fmt.Errorf("a segment is refused: %s", reason.Text())
			}
			took = append(took, time.Since(at))
		}
		return nil
	})
	err = group.Wait()
	return took, records, err
}

// sendLive sends the segments and puts into due when each was due.
func (n *node) sendLive(ctx context.Context, in Live, members []string, stream *link.Stream, due chan<- time.Time,
	begin, first, until time.Time,
) (records int, err error) {
	from := begin
	if n.measuredTo.After(from) {
		from = n.measuredTo
	}
	for at := first; at.Before(until); at = at.Add(in.Every) {
		select {
		case <-ctx.Done():
			return records, ctx.Err()
		case <-time.After(time.Until(at)):
		}
		if !at.After(from) {
			continue // a node that has measured further already
		}
		segments, err := n.cut(members, in.Meters, from, at)
		if err != nil {
			return records, err
		}
		from, n.measuredTo = at, at
		for _, s := range segments {
			select {
			case due <- at:
			case <-ctx.Done():
				return records, ctx.Err()
			}
			if err := stream.Send(s.upload); err != nil {
				return records, err
			}
			records += s.records
		}
	}
	return records, nil
}
