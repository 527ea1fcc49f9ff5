package meter_test

import (
	"fmt"
	"math"
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
	exitListed             bool      // a sample has seen it ended
	silent                 bool      // the last sample could not tell
	crashed                bool      // its accelerators did not work
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

	runs    []*process
	records []*protocol.UsageRecord
	// accelerators of each container.
	accelerators int64
	sampledAt    time.Duration
	// countedTo is the last sample that a scan has confirmed since, unconfirmedAt one that none has; -1 for none.
	countedTo, unconfirmedAt time.Duration
	// jumped says that the machine's clock was set since the last sample.
	jumped bool
	// broken says that the accelerators do not work, noDevice that the last scan found that, hadNoDevice that the last
	// sample knew it, known that some sample since they broke did.
	broken, noDevice, hadNoDevice, known bool
	// workedAt is the last scan of this agent that found them working; negative for none.
	workedAt time.Duration
	// outages are the times in which they did not work, from and to.
	outages [][2]time.Duration
	// lost is the most that may be missing on the bill.
	lost time.Duration
}

func (m *machine) rtc() time.Time { return noon.Add(m.t + m.offset) }

func (m *machine) reading() clock.Reading {
	return clock.Reading{RTC: m.rtc(), SinceBoot: m.t - m.bootedAt, BootID: fmt.Sprint(m.boot)}
}

// neverScanned lies before every time that a clock which leaps may show.
const neverScanned = -1_000 * time.Hour

// startAgent is a start, which samples before anything else.
func (m *machine) startAgent() {
	m.clock, m.told = clock.Start(clock.Known{Last: m.stamp, Certain: noon.AddDate(-1, 0, 0)}, m.reading()), nil
	m.noDevice, m.workedAt = false, neverScanned
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

func (m *machine) sample() { m.list(false) }

// breakOrRepair has the accelerators fail, or work again once a sample knew that they did not.
func (m *machine) breakOrRepair() {
	switch {
	case m.accelerators == 0 || m.broken && (!m.known || !m.hadNoDevice):
	case m.broken:
		m.broken, m.outages[len(m.outages)-1][1] = false, m.t
	default:
		m.known = false
		m.broken, m.outages = true, append(m.outages, [2]time.Duration{m.t, math.MaxInt64})
	}
}

// mayStart reports whether the accelerators work as far as the agent knows, once a sample knows it too.
func (m *machine) mayStart() bool {
	if m.accelerators > 0 && (m.noDevice || m.workedAt < 0) {
		return false
	}
	if m.hadNoDevice {
		m.sample() // what it knows belongs to the processes before
	}
	return true
}

func (m *machine) scan() {
	if m.noDevice = m.broken; !m.broken {
		m.workedAt = m.t
	}
}

// noteCounted is what a sample that can tell has counted.
func (m *machine) noteCounted() {
	m.sampledAt = m.t
	if m.unconfirmedAt >= 0 && m.unconfirmedAt <= m.workedAt {
		m.countedTo, m.unconfirmedAt = m.unconfirmedAt, -1
	}
	switch {
	case m.accelerators == 0 || m.noDevice || m.hadNoDevice || m.workedAt == m.t:
		m.countedTo, m.unconfirmedAt = m.t, -1
	case m.unconfirmedAt < 0:
		m.unconfirmedAt = m.t
	}
	m.hadNoDevice, m.known = m.noDevice, m.known || m.noDevice
}

// list is a sample; where the runtime is silent, it cannot tell about any process whose end it has not reported yet.
func (m *machine) list(silent bool) {
	if m.jumped {
		for _, p := range m.unseen() {
			m.lost += m.t - max(m.countedTo, p.started) // start and exit may be taken for something shorter
		}
	}
	if !silent && (m.noDevice || m.hadNoDevice) {
		for _, p := range m.runs {
			if !p.exitListed {
				m.lost += m.t - max(m.countedTo, p.started)
			}
		}
	}
	r := m.reading()
	o := meter.Observation{At: m.clock.At(r)}
	for _, p := range m.runs {
		run := meter.Run{
			RunID: p.run, MemberID: "m", NoDevice: m.noDevice, Up: p.exited < 0, StartedAt: p.startedOwn,
			Accelerators: m.accelerators, NeedsDevice: m.accelerators > 0, WorkedAt: o.At.Add(m.workedAt - m.t),
			ExitedAt: m.clock.Exited(p.exitedRTC, m.stamp, r), Crashed: p.crashed || p.exitedRTC.IsZero(),
		}
		if run.StartedAt.IsZero() {
			run.StartedAt = m.clock.FromMachineTime(p.startedRTC, p.openedNode, m.stamp, r)
			p.startedOwn = run.StartedAt
		}
		if silent && !p.exitListed {
			run.Up, run.Unknown, run.ExitedAt = false, true, time.Time{}
			p.silent = true
		} else {
			if p.silent && p.exited >= 0 && !p.exitListed {
				seen := m.sampledAt // such an exit counts as unseen
				if p.crashed {
					seen = m.countedTo
				}
				m.lost += p.exited - max(seen, p.started)
			}
			p.silent, p.exitListed = false, p.exited >= 0
		}
		o.Runs = append(o.Runs, run)
	}
	m.write(meter.Sample(m.state, o))
	m.stamp, m.jumped = m.clock.Stamp(r), false
	if !silent {
		m.noteCounted()
	}
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
	for _, p := range m.runs {
		if !p.exitListed {
			m.lost += m.t - max(m.countedTo, p.started) // what a silent runtime has not told yet is not counted
		}
	}
}

// end is an exit; a power cut is one without a record.
func (m *machine) end(seen bool) {
	p := m.running()
	if p == nil {
		return
	}
	p.exited, p.crashed = m.t, m.broken
	if p.crashed {
		m.lost += p.exited - max(m.countedTo, p.started)
	}
	if seen {
		p.exitedRTC = m.rtc()
	}
}

func (m *machine) check(final bool) {
	m.checkMeter(protocol.MeterSessionSeconds, 1, final)
	if m.accelerators > 0 {
		m.checkMeter(protocol.MeterAcceleratorSeconds, time.Duration(m.accelerators), final)
	}
}

// checkMeter checks one whose quantity is so many times the running time.
func (m *machine) checkMeter(name string, times time.Duration, final bool) {
	var billed, ran time.Duration
	var until time.Time
	for _, r := range m.records {
		if r.GetMeter() != name || r.GetFinal() {
			continue
		}
		if r.GetStartedAt().AsTime().Before(until) {
			m.rt.Fatalf("records overlap: %v begins before %s", r, until)
		}
		until = r.GetEndedAt().AsTime()
		billed += time.Duration(r.GetQuantity()) * time.Microsecond
	}
	billed /= times
	for _, p := range m.runs {
		end := p.exited
		if end < 0 {
			end = m.t
		}
		ran += m.worked(p.started, end)
	}
	if billed > ran {
		m.rt.Fatalf("%s: measured %s, ran %s", name, billed, ran)
	}
	if final && billed < ran-m.lost {
		m.rt.Fatalf("%s: measured %s of %s, may lose %s", name, billed, ran, m.lost)
	}
}

// worked is how long of a time the accelerators worked.
func (m *machine) worked(from, to time.Duration) time.Duration {
	worked := to - from
	for _, o := range m.outages {
		worked -= max(min(o[1], to)-max(o[0], from), 0)
	}
	return worked
}

// TestLaw17NodeNeverMeasuresMoreThanPhysicalTime sets the machine's clock at any moment, tells the node the hub's time
// late, kills the agent, cuts the power and breaks accelerators: what is measured never exceeds what really ran with
// accelerators that work, and what the clock itself has not taken away is measured.
func TestLaw17NodeNeverMeasuresMoreThanPhysicalTime(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &machine{rt: rt, boot: 1, accelerators: rapid.SampledFrom([]int64{0, 3}).Draw(rt, "accelerators")}
		m.unconfirmedAt = -1
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
			"silent":     func(*rapid.T) { pass(20 * time.Second); m.list(true) },
			"device":     func(*rapid.T) { pass(10 * time.Second); m.breakOrRepair() },
			"scan":       func(*rapid.T) { pass(5 * time.Second); m.scan() },
			"clock set":  func(*rapid.T) { pass(10 * time.Second); jump() },
			"agent died": func(*rapid.T) { pass(10 * time.Second); m.t += span("away", 0, 3*time.Hour); m.startAgent() },
			"hub's time": func(rt *rapid.T) {
				took := span("took", 0, 15*time.Second)
				told := noon.Add(m.t + span("until told", 0, took))
				m.t += took
				m.sync(told, took, rapid.Bool().Draw(rt, "containerd answers"))
			},
			"start": func(rt *rapid.T) {
				if m.running() != nil || !m.mayStart() {
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
					m.lost += p.exited - max(m.countedTo, p.started)
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
