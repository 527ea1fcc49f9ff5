package sim

import "slices"

// window is a span of true time, from inclusive to exclusive.
type window struct{ from, to instant }

// doubt is when faults explain that time of a node's members was not billed, or was set aside: the node did not know
// the time, or its disk had forgotten what it had measured and what it may run.
type doubt struct {
	closed []window
	from   instant
	// clock: since it was wrong, the node has not learned the hub's time. state and leases: since the disk was put back,
	// the node has accepted none.
	clock, state, leases bool
}

func (d *doubt) isOpen() bool { return d.clock || d.state || d.leases }

// begin adds reasons for a doubt since a time; the open doubt may reach further back.
func (d *doubt) begin(since instant, reasons ...*bool) {
	if !d.isOpen() || since < d.from {
		d.from = since
	}
	for _, reason := range reasons {
		*reason = true
	}
}

// end takes a reason away, and with the last one the doubt ends.
func (d *doubt) end(reason *bool, now instant) {
	if !*reason {
		return
	}
	*reason = false
	if !d.isOpen() {
		d.closed = append(d.closed, window{d.from, now})
	}
}

// clockWrong begins a doubt of the node's time. What happened since the last sample is dated by it, too.
func (n *node) clockWrong() { n.doubt.begin(min(n.lastSample, n.w.now), &n.doubt.clock) }

func (n *node) clockRight() { n.doubt.end(&n.doubt.clock, n.w.now) }

// explained is how much of the windows the doubt and more windows explain, each moment once.
func (d *doubt) explained(ran, more []window, now instant) (total instant) {
	doubts := slices.Concat(d.closed, more)
	if d.isOpen() {
		doubts = append(doubts, window{d.from, now})
	}
	for _, r := range ran {
		total += covered(r, doubts)
	}
	return total
}

// within reports whether some of the doubt lies in a window.
func (d *doubt) within(w window) bool {
	overlaps := func(o window) bool { return o.from < w.to && o.to > w.from }
	return d.isOpen() && d.from < w.to || slices.ContainsFunc(d.closed, overlaps)
}

// covered is how much of a window others cover.
func covered(w window, others []window) (total instant) {
	at := w.from
	for at < w.to {
		next, end := w.to, instant(-1)
		for _, o := range others {
			switch {
			case o.from <= at && o.to > at:
				end = max(end, min(o.to, w.to))
			case o.from > at:
				next = min(next, o.from)
			}
		}
		if end > at {
			total += end - at
			at = end
		} else {
			at = next
		}
	}
	return total
}
