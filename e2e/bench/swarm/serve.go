package swarm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// maxCommandBytes bounds one command: thousands of tokens fit.
	maxCommandBytes = 8 << 20
	// enrolling is how many nodes enroll at once.
	enrolling = 8
	// patience bounds how long a command waits for the nodes.
	patience = 20 * time.Minute
	poll     = 20 * time.Millisecond
)

// fleet holds the nodes of the process.
type fleet struct {
	//nolint:containedctx // sessions outlive the command that started them
	ctx   context.Context
	nodes []*node
	dials atomic.Int64
	rtt   atomic.Int64
	// dialsTaken are those that were returned already.
	dialsTaken int64
	sessions   sync.WaitGroup
	outcomes   outcomes
}

// outcomes counts the reasons why sessions ended.
type outcomes struct {
	mu       sync.Mutex
	failures map[string]int64
}

// ended counts the end of a session, or of a dial.
func (n *outcomes) ended(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failures == nil {
		n.failures = map[string]int64{}
	}
	n.failures[reason(err)]++
}

// take returns the counts since the last call.
func (n *outcomes) take() map[string]int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	taken := n.failures
	n.failures = nil
	return taken
}

// reason is the last part of an error's text; the parts before it name addresses.
func reason(err error) string {
	if err == nil {
		return "none"
	}
	text := err.Error()
	return strings.TrimSpace(text[strings.LastIndex(text, ": ")+1:])
}

// Serve carries out commands until in ends.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &fleet{ctx: ctx}
	defer c.sessions.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		if closer, ok := in.(io.Closer); ok {
			_ = closer.Close()
		}
	})
	defer stop()
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxCommandBytes)
	answers := json.NewEncoder(out)
	for lines.Scan() {
		var cmd Command
		if err := json.Unmarshal(lines.Bytes(), &cmd); err != nil {
			return err
		}
		start := time.Now()
		r, err := c.do(ctx, cmd)
		if r.Seconds == 0 {
			r.Seconds = time.Since(start).Seconds()
		}
		if err != nil {
			r.Error = err.Error()
		}
		if err := answers.Encode(r); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (c *fleet) do(ctx context.Context, cmd Command) (Reply, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	switch {
	case cmd.Enroll != nil:
		return c.enroll(ctx, *cmd.Enroll)
	case cmd.Connect != nil:
		return c.connect(ctx, *cmd.Connect)
	case cmd.Back != nil:
		return c.back(ctx, *cmd.Back)
	case cmd.Seal != nil:
		return c.seal(*cmd.Seal)
	case cmd.Upload != nil:
		return c.upload(ctx, *cmd.Upload)
	case cmd.Live != nil:
		return c.live(ctx, *cmd.Live)
	}
	return Reply{}, errors.New("no command")
}

func (c *fleet) enroll(ctx context.Context, in Enroll) (Reply, error) {
	enroller, err := newEnroller(ctx, in)
	if err != nil {
		return Reply{}, err
	}
	fresh := make([]*node, len(in.Tokens))
	var group errgroup.Group
	group.SetLimit(enrolling)
	for i, token := range in.Tokens {
		group.Go(func() (err error) {
			fresh[i], err = enroller.enroll(ctx, len(c.nodes)+i, token, &c.rtt)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return Reply{}, fmt.Errorf("enroll: %w", err)
	}
	c.nodes = append(c.nodes, fresh...)
	var r Reply
	for _, n := range c.nodes {
		r.NodeIDs = append(r.NodeIDs, n.id)
	}
	return r, nil
}

// first returns the first n nodes.
func (c *fleet) first(n int) ([]*node, error) {
	if n > len(c.nodes) {
		return nil, fmt.Errorf("%d nodes of %d", n, len(c.nodes))
	}
	return c.nodes[:n], nil
}

func (c *fleet) connect(ctx context.Context, in Connect) (Reply, error) {
	nodes, err := c.first(in.Nodes)
	if err != nil {
		return Reply{}, err
	}
	c.rtt.Store(int64(in.RTT))
	c.newDials()
	c.outcomes.take()
	for _, n := range nodes {
		c.begin(n)
	}
	for _, n := range c.nodes[len(nodes):] {
		n.end()
	}
	err = await(ctx, nodes, "accepted a state", func(n *node) bool { return n.runs(in.Workloads) })
	// The next reconnect starts as after sessions of hours, with the shortest backoff.
	for _, n := range nodes {
		n.resetBackoff()
	}
	return Reply{Dials: c.newDials(), Failures: c.outcomes.take()}, err
}

// begin has a node dial, and keep its session, until end.
func (c *fleet) begin(n *node) {
	if n.stop != nil {
		return
	}
	ctx, stop := context.WithCancel(c.ctx)
	n.stop, n.stopped = stop, make(chan struct{})
	c.sessions.Go(func() {
		defer close(n.stopped)
		n.run(ctx, c)
	})
}

// end ends the session of a node that began.
func (n *node) end() {
	if n.stop != nil {
		n.stop()
		<-n.stopped
		n.stop = nil
	}
}

// newDials returns how often nodes have dialled since the last call.
func (c *fleet) newDials() int64 {
	now := c.dials.Load()
	before := c.dialsTaken
	c.dialsTaken = now
	return now - before
}

func (c *fleet) back(ctx context.Context, in Back) (Reply, error) {
	nodes, err := c.first(in.Nodes)
	if err != nil {
		return Reply{}, err
	}
	err = await(ctx, nodes, "come back", func(n *node) bool { return n.welcomed().After(in.Since) })
	r := Reply{Dials: c.newDials(), Failures: c.outcomes.take()}
	for _, n := range nodes {
		r.Millis = append(r.Millis, float64(n.welcomed().Sub(in.Since).Microseconds())/1000)
	}
	return r, err
}

// await polls until the condition has held once for each node. Nodes that passed are not polled again, because polling
// takes CPU time from what is measured.
func await(ctx context.Context, nodes []*node, what string, is func(*node) bool) error {
	missing := slices.Clone(nodes)
	for {
		missing = slices.DeleteFunc(missing, is)
		if len(missing) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d nodes have not %s: %w; one of them says: %w", len(missing), len(nodes), what, ctx.Err(),
				missing[0].lastError())
		case <-time.After(poll):
		}
	}
}

func (c *fleet) upload(ctx context.Context, in Upload) (Reply, error) {
	group, ctx := errgroup.WithContext(ctx)
	var r Reply
	start := time.Now()
	for _, n := range c.nodes {
		if len(n.sealed) == 0 {
			continue
		}
		for _, s := range n.sealed {
			r.Records += int64(s.records)
			if repeats(s.number, in.RepeatEvery) {
				r.Repeated += int64(s.records)
			}
		}
		group.Go(func() error { return n.sendUsage(ctx, in.RepeatEvery) })
	}
	err := group.Wait()
	r.Seconds = time.Since(start).Seconds()
	return r, err
}
