package meter_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

// process is a container as it really was, and as the machine's clock told it.
type process struct {
	run                    string
	started, exited        time.Duration // true time; exited is negative while it runs
	startedRTC, exitedRTC  time.Time
	openedNode, startedOwn time.Time // journal: the node's times; startedOwn is zero where the agent died before its note
}

// machine is one node with one member: true time, its clocks, its disk, its agent.
type machine struct {
	rt       *rapid.T
	t        time.Duration // true time
	offset   time.Duration // of the machine's clock
	bootedAt time.Duration
	boot     int
	clock    clock.Clock
	told     *clock.Clock
	// disk
	state meter.State
	stamp clock.Stamp

	runs      []*process
	records   []*protocol.UsageRecord
	sampledAt time.Duration
	// jumped says that the machine's clock was set since the last sample.
	jumped bool
	// lost is the most that may be missing on the bill.
	lost time.Duration
}

func (m *machine) rtc() time.Time { return noon.Add(m.t + m.offset) }

func (m *machine) reading() clock.Reading {
	return clock.Reading{RTC: m.rtc(), SinceBoot: m.t - m.bootedAt, BootID: fmt.Sprint(m.boot)}
}

// startAgent is a start, which samples before anything else.
func (m *machine) startAgent() {
	m.clock, m.told = clock.Start(clock.Known{Last: m.stamp, Certain: noon.AddDate(-1, 0, 0)}, m.reading()), nil
	m.sample()
}

func (m *machine) running() *process {
	if n := len(m.runs); n > 0 && m.runs[n-1].exited < 0 {
		return m.runs[n-1]
	}
	return nil
}

// unseen are those that have started or exited since the last sample.
func (m *machine) unseen() (out []*process) {
	for _, p := range m.runs {
		if p.started >= m.sampledAt || p.exited >= m.sampledAt {
			out = append(out, p)
		}
	}
	return out
}

func (m *machine) sample() {
	if m.jumped {
		for _, p := range m.unseen() {
			m.lost += m.t - max(m.sampledAt, p.started) // start and exit may be taken for something shorter
		}
	}
	r := m.reading()
	o := meter.Observation{At: m.clock.At(r)}
	for _, p := range m.runs {
		run := meter.Run{
			RunID: p.run, MemberID: "m", Up: p.exited < 0, StartedAt: p.startedOwn,
			ExitedAt: m.clock.Exited(p.exitedRTC, m.stamp, r),
		}
		if run.StartedAt.IsZero() {
			run.StartedAt = m.clock.FromMachineTime(p.startedRTC, p.openedNode, m.stamp, r)
			p.startedOwn = run.StartedAt
		}
		o.Runs = append(o.Runs, run)
	}
	m.write(meter.Sample(m.state, o))
	m.stamp, m.sampledAt, m.jumped = m.clock.Stamp(r), m.t, false
	m.setClock()
}

func (m *machine) write(s meter.State, records []*protocol.UsageRecord) {
	m.state, m.records = s, append(m.records, records...)
}

// sync is reconcile.SyncClock: the clock is set with the next sample, which is now if containerd answers.
func (m *machine) sync(hub time.Time, took time.Duration, answers bool) {
	r := m.reading()
	next := m.clock.Sync(hub, took, r)
	if next.At(r).Equal(m.clock.At(r)) {
		m.clock, m.told = next, nil
		return
	}
	if m.told = &next; answers {
		m.sample()
	}
}

func (m *machine) setClock() {
	if m.told == nil {
		return
	}
	r := m.reading()
	from, to := m.clock.At(r), m.told.Stamp(r)
	m.write(meter.ClockStep(m.state, from, to.At))
	for _, p := range m.runs {
		p.openedNode = p.openedNode.Add(to.At.Sub(from))
		if !p.startedOwn.IsZero() {
			p.startedOwn = p.startedOwn.Add(to.At.Sub(from))
		}
	}
	m.stamp, m.clock, m.told = to, *m.told, nil
	m.lost += max(from.Sub(to.At), 0) // what was set back waits
}

// end is an exit; a power cut is one without a record.
func (m *machine) end(seen bool) {
	p := m.running()
	if p == nil {
		return
	}
	p.exited = m.t
	if seen {
		p.exitedRTC = m.rtc()
	}
}

func (m *machine) check(final bool) {
	var billed, ran time.Duration
	var until time.Time
	for _, r := range m.records {
		if r.GetMeter() != protocol.MeterSessionSeconds || r.GetFinal() {
			continue
		}
		if r.GetStartedAt().AsTime().Before(until) {
			m.rt.Fatalf("records overlap: %v begins before %s", r, until)
		}
		until = r.GetEndedAt().AsTime()
		billed += time.Duration(r.GetQuantity()) * time.Microsecond
	}
	for _, p := range m.runs {
		end := p.exited
		if end < 0 {
			end = m.t
		}
		ran += end - p.started
	}
	if billed > ran {
		m.rt.Fatalf("measured %s, ran %s", billed, ran)
	}
	if final && billed < ran-m.lost {
		m.rt.Fatalf("measured %s of %s, may lose %s", billed, ran, m.lost)
	}
}

// TestLaw17NodeNeverMeasuresMoreThanPhysicalTime sets the machine's clock at any moment, tells the node the hub's time
// late, kills the agent and cuts the power: what is measured never exceeds what really ran, and what the clock itself
// has not taken away is measured.
func TestLaw17NodeNeverMeasuresMoreThanPhysicalTime(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &machine{rt: rt, boot: 1}
		span := func(name string, least, most time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(least.Microseconds(), most.Microseconds()).Draw(rt, name)) * time.Microsecond
		}
		pass := func(most time.Duration) { m.t += span("pass", time.Microsecond, most) }
		jump := func() {
			if m.jumped {
				m.sample() // a clock that is set twice between two samples leaves no trace
			}
			m.offset, m.jumped = span("offset", -48*time.Hour, 48*time.Hour), true
		}
		m.offset = span("offset at first", -48*time.Hour, 48*time.Hour)
		m.startAgent()
		rt.Repeat(map[string]func(*rapid.T){
			"sample":     func(*rapid.T) { pass(20 * time.Second); m.sample() },
			"clock set":  func(*rapid.T) { pass(10 * time.Second); jump() },
			"agent died": func(*rapid.T) { pass(10 * time.Second); m.t += span("away", 0, 3*time.Hour); m.startAgent() },
			"hub's time": func(rt *rapid.T) {
				took := span("took", 0, 15*time.Second)
				told := noon.Add(m.t + span("until told", 0, took))
				m.t += took
				m.sync(told, took, rapid.Bool().Draw(rt, "containerd answers"))
			},
			"start": func(rt *rapid.T) {
				if m.running() != nil {
					return
				}
				run := fmt.Sprintf("r%04d", len(m.runs))
				opened := m.clock.At(m.reading())
				m.state = meter.Open(m.state, meter.Intent{RunID: run, MemberID: "m"}, opened)
				pass(time.Second)
				p := &process{run: run, started: m.t, exited: -1, startedRTC: m.rtc(), openedNode: opened}
				m.runs = append(m.runs, p)
				pass(time.Second)
				if rapid.Bool().Draw(rt, "noted") {
					p.startedOwn = m.clock.FromMachineTime(p.startedRTC, opened, m.stamp, m.reading())
				}
			},
			"exit": func(*rapid.T) { pass(10 * time.Second); m.end(true) },
			"power cut": func(rt *rapid.T) {
				pass(10 * time.Second)
				m.end(false)
				for _, p := range m.unseen() {
					m.lost += p.exited - max(m.sampledAt, p.started)
				}
				for _, p := range m.runs {
					p.exitedRTC = time.Time{} // who knew of it has died, too
				}
				m.t += span("off", 0, 10*time.Hour)
				m.boot, m.bootedAt = m.boot+1, m.t
				if rapid.Bool().Draw(rt, "clock lost") {
					m.offset, m.jumped = -noon.Add(m.t).Sub(time.Unix(0, 0)), true
				}
				m.startAgent()
			},
			"": func(*rapid.T) { m.check(false) },
		})
		pass(10 * time.Second)
		m.end(true)
		pass(time.Second)
		m.sample()
		m.check(true)
	})
}
