// Package clock derives a node's time from three sources: the machine's clock, which may be wrong and may be set; the
// counter since boot, which cannot be set but restarts with each boot; and the hub's time. Within one boot the time
// advances from an anchor by the counter alone. It is pure: agent/internal/state reads the machine and keeps the
// stamps.
//
// In doubt the earlier time counts: leases last, and nothing is billed that may not have passed.
package clock

import "time"

const (
	// Slack is how much two sources of time may differ before one of them counts as wrong.
	Slack = time.Minute
	// Near is the difference to a hub's time below which the clock is not set.
	Near = time.Second
)

// Reading is one reading of the machine's clocks.
type Reading struct {
	// RTC is the machine's own clock (CLOCK_REALTIME).
	RTC time.Time
	// SinceBoot counts from boot, also while the machine sleeps, and never stops or jumps (CLOCK_BOOTTIME).
	SinceBoot time.Duration
	// BootID is another one after each boot.
	BootID string
}

// Stamp is a time as it was made durable with a sample.
type Stamp struct {
	// At is the node's time then.
	At time.Time `json:"at,omitzero"`
	// BootID and SinceBoot tie it to the counter: with the same boot, the time now is At plus what the counter has moved.
	BootID    string        `json:"boot_id,omitempty"`
	SinceBoot time.Duration `json:"since_boot,omitempty"`
	// RTC is what the machine's own clock said at the same moment.
	RTC time.Time `json:"rtc,omitzero"`
	// Synced says that At comes from a hub, in this boot.
	Synced bool `json:"synced,omitempty"`
	// Doubtful says that At is no more than the earliest that it can be.
	Doubtful bool `json:"doubtful,omitempty"`
}

// Known is what a store remembers of time.
type Known struct {
	// Last is the newest stamp; zero in a new store.
	Last Stamp
	// Certain has passed for sure: the build of the program and the newest trust bundle. Not even a hub sets a clock below
	// it.
	Certain time.Time
	// Signed is the newest time in a document that a hub signed. It has passed, unless that hub's clock ran ahead.
	Signed time.Time
}

// Clock is the node's time. The zero value is no clock: use Start.
type Clock struct {
	anchor Stamp
	floor  time.Time
}

// Start begins the clock of a process. In a boot that the last stamp knows it goes on from there. After another boot it
// goes by the machine's clock, which has counted while the power was off.
func Start(k Known, r Reading) Clock {
	signed := Later(k.Certain, k.Signed)
	if k.Last.At.IsZero() || k.Last.BootID != r.BootID {
		return Clock{anchor: afterBoot(k.Last, Later(signed, k.Last.At), r), floor: k.Certain}
	}
	c := Clock{anchor: k.Last, floor: k.Certain}
	if c.anchor.Synced {
		return c // the hub's time is newer than the build and the documents
	}
	return c.atLeast(signed, r)
}

// afterBoot continues the time after the machine was off, by the machine's clock: its value, or the last stamp plus its
// advance since then, which is right even if the clock is wrong by a constant. The earlier one that is not before
// passed counts; unless both agree, the time is in doubt.
func afterBoot(last Stamp, passed time.Time, r Reading) Stamp {
	at, doubtful := r.RTC, false
	if !last.At.IsZero() {
		moved := last.At.Add(r.RTC.Sub(last.RTC))
		doubtful = moved.Sub(at).Abs() > Slack
		if at.Before(passed) || (moved.Before(at) && !moved.Before(passed)) {
			at = moved
		}
	}
	if at.Before(passed) {
		// How long the power was off is unknown: the rest of each lease counts from here.
		at, doubtful = passed, true
	}
	return Stamp{At: at, BootID: r.BootID, SinceBoot: r.SinceBoot, Doubtful: doubtful}
}

// At is the node's time at a reading of the boot in which the clock was started.
func (c Clock) At(r Reading) time.Time {
	// Without the monotonic reading, which would win over these numbers in comparisons.
	return c.anchor.At.Add(r.SinceBoot - c.anchor.SinceBoot).Round(0).UTC()
}

// Earliest is the earliest time that it can be. Until a hub has sent the time in this boot, At rests on the machine's
// clock alone; if that clock was set back since, only the certain times have passed for sure.
func (c Clock) Earliest(r Reading) time.Time {
	at := c.At(r)
	if c.anchor.Synced || !r.RTC.Before(at) {
		return at
	}
	return Later(r.RTC, c.floor).Round(0).UTC()
}

// Sync sets the clock by a hub's answer that took so long: the time is between hub and hub + took. A clock within that
// interval, or Near it, is left as it is. Any other is set to hub: an answer that took long mostly waited in the hub,
// before the hub read its clock.
func (c Clock) Sync(hub time.Time, took time.Duration, r Reading) Clock {
	at := c.At(r)
	if at.Before(hub.Add(-Near)) || at.After(hub.Add(took+Near)) {
		at = hub
	}
	c.anchor = Stamp{At: Later(at, c.floor).Round(0).UTC(), BootID: r.BootID, SinceBoot: r.SinceBoot, Synced: true}
	return c
}

// Passed moves the clock to a time that has certainly passed.
func (c Clock) Passed(t time.Time, r Reading) Clock {
	c.floor = Later(c.floor, t)
	return c.atLeast(t, r)
}

func (c Clock) atLeast(t time.Time, r Reading) Clock {
	if c.At(r).Before(t) {
		c.anchor = Stamp{At: t.Round(0).UTC(), BootID: r.BootID, SinceBoot: r.SinceBoot, Doubtful: true}
	}
	return c
}

// Doubtful is true while the time is no more than the earliest that it can be.
func (c Clock) Doubtful() bool { return c.anchor.Doubtful }

// Wrong reports whether the machine's own clock cannot be what it should be: the time is in doubt, or that clock tells
// another one.
func (c Clock) Wrong(r Reading) bool {
	return c.Doubtful() || c.At(r).Sub(r.RTC).Abs() > Slack
}

// Stamp is what to make durable.
func (c Clock) Stamp(r Reading) Stamp {
	return Stamp{
		At: c.At(r), BootID: r.BootID, SinceBoot: r.SinceBoot, RTC: r.RTC.Round(0).UTC(),
		Synced: c.anchor.Synced, Doubtful: c.anchor.Doubtful,
	}
}

// FromMachineTime converts the machine's time of an event, such as a start, that happened between after and the
// reading. The machine's clock may have been set since the last stamp: of the two candidates the later one between
// after and the reading counts, and the reading's time if neither is. Zero stays zero.
func (c Clock) FromMachineTime(t, after time.Time, last Stamp, r Reading) time.Time {
	if t.IsZero() {
		return t
	}
	var found time.Time
	for _, at := range c.candidates(t, last, r) {
		if !at.Before(after) && !at.After(c.At(r)) {
			found = Later(found, at)
		}
	}
	if found.IsZero() {
		return c.At(r)
	}
	return found
}

// ToMachineTime converts a time to that of the machine's clock as it stands now, to the second: clocks that agree
// differ by less.
func (c Clock) ToMachineTime(t time.Time, r Reading) time.Time {
	return t.Add(r.RTC.Sub(c.At(r)).Round(time.Second))
}

// Exited converts the machine's time of an exit that happened after the last stamp, like FromMachineTime, but takes the
// earlier one when both lie in between. When neither does, the exit counts as unseen: it returns zero.
func (c Clock) Exited(t time.Time, last Stamp, r Reading) time.Time {
	if t.IsZero() {
		return t
	}
	var found time.Time
	for _, at := range c.candidates(t, last, r) {
		if !at.Before(last.At) && !at.After(c.At(r)) && (found.IsZero() || at.Before(found)) {
			found = at
		}
	}
	return found
}

// candidates are what a time of the machine's clock can have meant: by how that clock stood at the last stamp, and by
// how it stands now.
func (c Clock) candidates(t time.Time, last Stamp, r Reading) []time.Time {
	out := []time.Time{t.Add(c.At(r).Sub(r.RTC)).Round(0).UTC()}
	if !last.At.IsZero() {
		out = append(out, t.Add(last.At.Sub(last.RTC)).Round(0).UTC())
	}
	return out
}

// Later returns the later of two times.
func Later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
