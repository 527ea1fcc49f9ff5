package state

import (
	"maps"
	"math"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// LastStamp is the time that the last sample made durable.
func (s *Store) LastStamp() clock.Stamp {
	return view(s, func(d *data) clock.Stamp { return d.stamp })
}

// known returns the times that the store has.
func (s *Store) known(built time.Time) clock.Known {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := clock.Known{Last: s.d.stamp, Certain: built}
	if b := s.d.bundle(); b.Valid() {
		k.Certain = clock.Later(k.Certain, b.IssuedAt())
	}
	if s.d.state != nil {
		k.Signed = s.d.state.GetIssuedAt().AsTime()
	}
	return k
}

// SetClock stores a step of the clock in one write: the step is not billed, and the times in the journal of runs and
// members move with the clock, so that a minute ago stays a minute ago.
func (s *Store) SetClock(from time.Time, to clock.Stamp) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	metered, records := meter.ClockStep(s.d.meter, from, to.At)
	sealed, err := s.seal(s.d.chain, metered, records, to.At)
	if err != nil {
		return err
	}
	leap := to.At.Sub(from)
	runs, members := map[string]Run{}, map[string]Member{}
	for id, r := range s.d.runs {
		if meter.MoveTimes(leap, &r.OpenedAt, &r.StartedAt, &r.ReadyAt, &r.ExitedAt) {
			runs[id] = r
		}
	}
	for id, m := range s.d.members {
		// The times in a proof of removal stay; there may be thousands of proofs.
		if m.Removal == nil && m.MoveTimes(leap) {
			members[id] = m
		}
	}
	return s.release(func(b *batch) {
		sealed.fill(b)
		b.json(keyStamp, to)
		for id, r := range runs {
			b.json(preRun+id, r)
		}
		for id, m := range members {
			b.json(preMember+id, m)
		}
	}, func(d *data) {
		sealed.apply(d)
		d.stamp = to
		maps.Copy(d.runs, runs)
		maps.Copy(d.members, members)
	})
}

// Source reads the machine's time; clock.Reading describes the fields.
type Source struct {
	RTC       func() time.Time
	SinceBoot func() time.Duration
	BootID    string
}

// MachineTime is the time of this machine.
func MachineTime() (Source, error) {
	id, err := daemon.BootID()
	return Source{RTC: failpoint.Now, SinceBoot: sinceBoot, BootID: failpoint.BootID(id)}, err
}

func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("CLOCK_BOOTTIME is missing: " + err.Error()) // Linux has had it since 2.6.39
	}
	return time.Duration(ts.Nano())
}

// Clock is the node's time. agent/clock holds its rules; Clock reads the machine.
type Clock struct {
	source Source
	store  *Store

	mu sync.Mutex
	is clock.Clock
}

// NewClock starts the clock from what the store remembers. built is when this program was built, zero if unknown.
func NewClock(s *Store, source Source, built time.Time) *Clock {
	c := &Clock{source: source, store: s}
	c.is = clock.Start(s.known(built), c.reading())
	return c
}

// The two clocks are read one after the other; a pause in between would count as a step of the clock.
const (
	readingApart = 200 * time.Microsecond
	readingTries = 20
)

// reading returns the closest of some tries, mostly the first; others are needed when the process is preempted.
func (c *Clock) reading() clock.Reading {
	var out clock.Reading
	best := time.Duration(math.MaxInt64)
	for range readingTries {
		before := c.source.SinceBoot()
		rtc := c.source.RTC()
		after := c.source.SinceBoot()
		if apart := after - before; apart < best {
			best, out = apart, clock.Reading{RTC: rtc, SinceBoot: after, BootID: c.source.BootID}
		}
		if best <= readingApart {
			break
		}
	}
	return out
}

// read is the clock and what the machine says now.
func (c *Clock) read() (clock.Clock, clock.Reading) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.is, c.reading()
}

// SinceBoot is the counter since boot, which no setting of a clock moves and no sleep of the machine stops.
func (c *Clock) SinceBoot() time.Duration { return c.source.SinceBoot() }

// Now is the node's time.
func (c *Clock) Now() time.Time {
	is, r := c.read()
	return is.At(r)
}

// Earliest is the earliest time that it may be; clock.Clock says how that can differ from Now.
func (c *Clock) Earliest() time.Time {
	is, r := c.read()
	return is.Earliest(r)
}

// Synced returns this clock corrected by a hub answer that took the given time, and whether its time steps. Set applies
// it.
func (c *Clock) Synced(hub time.Time, took time.Duration) (next clock.Clock, steps bool) {
	is, r := c.read()
	next = is.Sync(hub, took, r)
	return next, !next.At(r).Equal(is.At(r))
}

// Compare returns the time now by this clock and by another one of this boot.
func (c *Clock) Compare(next clock.Clock) (now time.Time, then clock.Stamp) {
	is, r := c.read()
	return is.At(r), next.Stamp(r)
}

// Set replaces the clock by the next one.
func (c *Clock) Set(next clock.Clock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.is = next
}

// Passed moves the clock to a time that has certainly passed. Call it before anything runs.
func (c *Clock) Passed(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.is = c.is.Passed(t, c.reading())
}

// Trusted is false while the time is no more than the earliest that it can be.
func (c *Clock) Trusted() bool {
	is, _ := c.read()
	return !is.Doubtful()
}

// MachineIsWrong reports that this machine's own clock is wrong, or that the time is in doubt.
func (c *Clock) MachineIsWrong() bool {
	is, r := c.read()
	return is.Wrong(r)
}

// Stamp is what to make durable now.
func (c *Clock) Stamp() clock.Stamp {
	is, r := c.read()
	return is.Stamp(r)
}

// FromMachineTime converts the machine's time, such as the runtime's, of something that happened after the given time
// of the node.
func (c *Clock) FromMachineTime(t, after time.Time) time.Time {
	is, r := c.read()
	return is.FromMachineTime(t, after, c.store.LastStamp(), r)
}

// ToMachineTime converts a time to that of the machine's clock as it stands now.
func (c *Clock) ToMachineTime(t time.Time) time.Time {
	is, r := c.read()
	return is.ToMachineTime(t, r)
}

// Exited converts the machine's time of an exit that no sample has seen yet; zero where it cannot be known.
func (c *Clock) Exited(t time.Time) time.Time {
	is, r := c.read()
	return is.Exited(t, c.store.LastStamp(), r)
}
