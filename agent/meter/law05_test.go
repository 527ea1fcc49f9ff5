package meter_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

// container is a real container, which the meter cannot see directly.
type container struct {
	run      string
	started  time.Time
	exited   time.Time
	exitSeen bool // false: the exit time was lost with the power
	removed  bool
	seenUp   time.Time // by the last sample that could tell, or its start
	unknown  bool      // the last sample could not tell
}

// node is one machine with one member: its containers, its clock and its durable store.
type node struct {
	rt         *rapid.T
	now        time.Time
	runs       []*container
	disk       []byte
	records    []*protocol.UsageRecord
	lostBehind time.Duration // the most time that power cuts and unknown exits may take from the bill
	lastSample time.Time
	next       int
}

func (n *node) load() meter.State {
	var s meter.State
	if n.disk != nil {
		if err := json.Unmarshal(n.disk, &s); err != nil {
			n.rt.Fatal(err)
		}
	}
	return s
}

func (n *node) save(s meter.State, records []*protocol.UsageRecord) {
	b, err := json.Marshal(s)
	if err != nil {
		n.rt.Fatal(err)
	}
	n.disk = b
	n.records = append(n.records, records...)
}

func (n *node) alive() *container {
	if i := slices.IndexFunc(n.runs, func(c *container) bool { return c.exited.IsZero() }); i >= 0 {
		return n.runs[i]
	}
	return nil
}

// sample is one of a runtime that answers.
func (n *node) sample() {
	n.save(meter.Sample(n.load(), n.observe()))
	n.lastSample = n.now
	for _, c := range n.runs {
		if c.unknown && !c.exited.IsZero() {
			n.lostBehind += c.exited.Sub(c.seenUp) // such an exit counts as unseen
		}
		c.seenUp, c.unknown = n.now, false
	}
}

// silentSample is one of a runtime that cannot tell about any container whose exit it has not reported yet.
func (n *node) silentSample() {
	o := n.observe()
	for i, r := range o.Runs {
		c := n.runs[slices.IndexFunc(n.runs, func(c *container) bool { return c.run == r.RunID })]
		if c.exited.IsZero() || c.seenUp.Before(c.exited) {
			o.Runs[i] = meter.Run{RunID: r.RunID, MemberID: "m", StartedAt: r.StartedAt, Unknown: true}
			c.unknown = true
		}
	}
	n.save(meter.Sample(n.load(), o))
}

func (n *node) observe() meter.Observation {
	o := meter.Observation{At: n.now}
	for _, c := range n.runs {
		if c.removed {
			continue
		}
		r := meter.Run{
			RunID: c.run, MemberID: "m", Revision: 1, LeaseNo: 1, StartedAt: c.started, Up: c.exited.IsZero(),
			CPUMicros: n.now.Sub(c.started).Microseconds() / 2, MemoryBytes: 1 << 30, Sampled: c.exited.IsZero(),
		}
		if c.exitSeen {
			r.ExitedAt = c.exited
		}
		o.Runs = append(o.Runs, r)
	}
	return o
}

// TestLaw05NodeBillsASecondOnce drives one member through starts, exits, samples, killed agents and power cuts, and
// holds the records against what ran: contiguous, never before a start, never beyond an exit, never twice, and short
// by no more than one sample for each power cut.
func TestLaw05NodeBillsASecondOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := &node{rt: rt, now: noon}
		pass := func(most time.Duration) {
			n.now = n.now.Add(time.Duration(rapid.Int64Range(1, most.Microseconds()).Draw(rt, "pass")) * time.Microsecond)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"start": func(*rapid.T) {
				if n.alive() != nil {
					return
				}
				n.next++
				id := fmt.Sprintf("r%03d", n.next)
				n.save(meter.Open(n.load(), meter.Intent{RunID: id, MemberID: "m", Revision: 1, LeaseNo: 1}, n.now), nil)
				pass(time.Second)
				n.runs = append(n.runs, &container{run: id, started: n.now, seenUp: n.now})
				n.lastSample = n.now
				pass(time.Second)
			},
			"sample": func(*rapid.T) {
				pass(20 * time.Second)
				n.sample()
			},
			"killed in a sample": func(*rapid.T) {
				pass(20 * time.Second)
				meter.Sample(n.load(), n.observe())
			},
			"agent away": func(*rapid.T) { pass(time.Hour) },
			"runtime silent": func(*rapid.T) {
				pass(20 * time.Second)
				n.silentSample()
			},
			"exit": func(*rapid.T) {
				if c := n.alive(); c != nil {
					pass(10 * time.Second)
					c.exited, c.exitSeen = n.now, true
				}
			},
			"power cut": func(rt *rapid.T) {
				pass(10 * time.Second)
				if c := n.alive(); c != nil {
					c.exited = n.now
					n.lostBehind += n.now.Sub(n.lastSample)
					c.removed = rapid.Bool().Draw(rt, "container removed")
				}
				pass(time.Hour)
			},
			"": func(rt *rapid.T) { n.check(rt, false) },
		})
		if c := n.alive(); c != nil {
			c.exited, c.exitSeen = n.now, true
		}
		pass(time.Second)
		n.sample()
		n.save(meter.Close(n.load(), "m", n.now))
		n.check(rt, true)
	})
}

func (n *node) check(rt *rapid.T, closed bool) {
	var billed time.Duration
	ends := map[string]time.Time{}
	for _, r := range n.records {
		if r.GetFinal() {
			continue
		}
		from, to := r.GetStartedAt().AsTime(), r.GetEndedAt().AsTime()
		i := slices.IndexFunc(n.runs, func(c *container) bool { return c.run == r.GetRunId() })
		c := n.runs[i]
		key := r.GetMeter() + r.GetRunId()
		start, known := ends[key]
		if !known {
			start = c.started
		}
		switch {
		case !from.Equal(start):
			rt.Fatalf("gap or overlap in %s of %s: %s instead of %s", r.GetMeter(), c.run, from, start)
		case !to.After(from) || r.GetQuantity() < 0:
			rt.Fatalf("empty or negative: %v", r)
		case !c.exited.IsZero() && to.After(c.exited):
			rt.Fatalf("billed beyond the exit: %v", r)
		}
		ends[key] = to
		if r.GetMeter() == protocol.MeterSessionSeconds {
			if r.GetQuantity() != to.Sub(from).Microseconds() {
				rt.Fatalf("quantity is not the length: %v", r)
			}
			billed += to.Sub(from)
		}
	}
	if !closed {
		return
	}
	var ran time.Duration
	for _, c := range n.runs {
		ran += c.exited.Sub(c.started)
	}
	if billed > ran || billed < ran-n.lostBehind {
		rt.Fatalf("billed %s of %s, allowed to lose %s", billed, ran, n.lostBehind)
	}
}

// TestLaw05ClockSetBackNeverOverlaps lets the node's clock jump either way: records of a member stay ordered, disjoint
// and positive, also over several containers and starts.
func TestLaw05ClockSetBackNeverOverlaps(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		now, s, next := noon, meter.State{}, 0
		runs := map[string]meter.Run{}
		var records []*protocol.UsageRecord
		sample := func() {
			o := meter.Observation{At: now}
			for _, id := range slices.Sorted(maps.Keys(runs)) {
				o.Runs = append(o.Runs, runs[id])
			}
			var got []*protocol.UsageRecord
			s, got = meter.Sample(s, o)
			records = append(records, got...)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"clock": func(rt *rapid.T) {
				now = now.Add(time.Duration(rapid.Int64Range(-7200, 7200).Draw(rt, "seconds")) * time.Second)
			},
			"start": func(rt *rapid.T) {
				next++
				id := fmt.Sprintf("r%03d", next)
				s = meter.Open(s, meter.Intent{RunID: id, MemberID: "m"}, now)
				if rapid.Bool().Draw(rt, "came up") {
					runs[id] = meter.Run{
						RunID: id, MemberID: "m", StartedAt: now, Up: true, Sampled: true, CPUMicros: 1,
						MemoryBytes: 5,
					}
				}
			},
			"exit": func(rt *rapid.T) {
				if len(runs) == 0 {
					return
				}
				id := rapid.SampledFrom(slices.Sorted(maps.Keys(runs))).Draw(rt, "which")
				r := runs[id]
				r.Up, r.ExitedAt = false, now
				runs[id] = r
			},
			"vanish": func(rt *rapid.T) {
				if len(runs) > 0 {
					delete(runs, rapid.SampledFrom(slices.Sorted(maps.Keys(runs))).Draw(rt, "which"))
				}
			},
			"sample": func(*rapid.T) { sample() },
			"": func(rt *rapid.T) {
				until := map[string]time.Time{}
				for _, r := range records {
					key := r.GetMeter()
					if key != protocol.MeterSessionSeconds {
						key += r.GetRunId()
					}
					from, to := r.GetStartedAt().AsTime(), r.GetEndedAt().AsTime()
					if from.Before(until[key]) || !to.After(from) || r.GetQuantity() < 0 {
						rt.Fatalf("overlap, reversal or negative quantity: %v after %s", r, until[key])
					}
					until[key] = to
				}
			},
		})
	})
}
