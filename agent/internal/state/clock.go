package state

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Stamp is the time as it was made durable with the last beat.
type Stamp struct {
	// At is the node's time then.
	At time.Time `json:"at,omitzero"`
	// BootID and SinceBoot tie it to the counter that no one can set: with the same boot, the time now is At plus what the
	// counter has moved.
	BootID    string        `json:"boot_id,omitempty"`
	SinceBoot time.Duration `json:"since_boot,omitempty"`
	// Synced says that At comes from a hub, not from this machine's own clock.
	Synced bool `json:"synced,omitempty"`
}

// LastStamp is the time that the last beat made durable.
func (s *Store) LastStamp() Stamp {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.d.stamp
}

// floorTime is the newest time that something signed has told this store.
func (s *Store) floorTime() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	var floor time.Time
	if s.d.bundle.Valid() {
		floor = s.d.bundle.Message().GetIssuedAt().AsTime()
	}
	if s.d.state != nil {
		floor = later(floor, s.d.state.GetIssuedAt().AsTime())
	}
	return floor
}

// Source is where the machine's time comes from.
type Source struct {
	// RTC is the machine's clock, which may be wrong.
	RTC func() time.Time
	// SinceBoot counts from boot and never stops or jumps (CLOCK_BOOTTIME).
	SinceBoot func() time.Duration
	// BootID is another one after each boot.
	BootID string
}

// MachineTime is the time of this machine.
func MachineTime() (Source, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Source{}, fmt.Errorf("state: boot id: %w", err)
	}
	return Source{RTC: time.Now, SinceBoot: sinceBoot, BootID: strings.TrimSpace(string(id))}, nil
}

func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("CLOCK_BOOTTIME is missing: " + err.Error()) // Linux has had it since 2.6.39
	}
	return time.Duration(ts.Nano())
}

// Clock is the node's time: what a hub last told it, carried on by the counter since boot. Without a hub it goes by the
// machine's clock, and never below what is known to have passed: the last durable stamp, the newest signed document and the
// build of this program.
type Clock struct {
	source Source

	mu     sync.Mutex
	anchor Stamp
	floor  time.Time
	// behind is set when the machine's clock was below the floor at the start.
	behind bool
}

// NewClock starts the clock from what the store remembers. built is when this program was built, zero if unknown.
func NewClock(s *Store, source Source, built time.Time) *Clock {
	c := &Clock{source: source, floor: later(s.floorTime(), built)}
	last := s.LastStamp()
	c.floor = later(c.floor, last.At)
	switch {
	case last.Synced && last.BootID == source.BootID:
		c.anchor = last
	case source.RTC().Before(c.floor):
		// The remaining time of leases counts from there; how long the power was off, nobody knows.
		c.behind = true
		c.anchor = Stamp{At: c.floor, BootID: source.BootID, SinceBoot: source.SinceBoot()}
	}
	return c
}

// Now is the node's time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now()
}

func (c *Clock) now() time.Time {
	t := c.source.RTC()
	if !c.anchor.At.IsZero() {
		t = c.anchor.At.Add(c.source.SinceBoot() - c.anchor.SinceBoot)
	}
	if t.Before(c.floor) {
		t = c.floor
	}
	// Without the monotonic reading, which would win over these numbers in comparisons.
	return t.Round(0).UTC()
}

// Sync takes over a hub's time.
func (c *Clock) Sync(hub time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.anchor = Stamp{At: hub, BootID: c.source.BootID, SinceBoot: c.source.SinceBoot(), Synced: true}
	c.behind = false
}

// Passed raises the floor to a time that something signed proves to have passed.
func (c *Clock) Passed(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now().Before(t) {
		c.behind = true
		c.anchor = Stamp{At: t, BootID: c.source.BootID, SinceBoot: c.source.SinceBoot()}
	}
	c.floor = later(c.floor, t)
}

// Trusted is false while nothing but a clock that is known to be wrong says what time it is.
func (c *Clock) Trusted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.behind
}

// Stamp is what to make durable now.
func (c *Clock) Stamp() Stamp {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Stamp{At: c.now(), BootID: c.source.BootID, SinceBoot: c.source.SinceBoot(), Synced: c.anchor.Synced}
}

// FromMachine converts a time of the machine's clock, such as the runtime's, to the node's.
func (c *Clock) FromMachine(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return t.Add(c.now().Sub(c.source.RTC())).Round(0).UTC()
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
