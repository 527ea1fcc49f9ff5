package sim

import (
	"strconv"
	"time"

	"github.com/gpuaas/gpuaas/agent/clock"
)

// rtc is what the machine's own clock shows at a true time.
func (n *node) rtc(t instant) time.Time {
	if n.rtcDead {
		return time.Unix(0, 0).UTC().Add((t - n.bootedAt).dur())
	}
	return t.time().Add(n.rtcOffset)
}

// reading is what the machine says at a true time.
func (n *node) reading(t instant) clock.Reading {
	return clock.Reading{RTC: n.rtc(t), SinceBoot: (t - n.bootedAt).dur(), BootID: strconv.Itoa(n.bootID)}
}

// startClock is what the agent's start does.
func (n *node) startClock() {
	k := clock.Known{Last: n.store.Stamp, Certain: built(), Signed: n.store.State.GetIssuedAt().AsTime()}
	n.clock = clock.Start(k, n.reading(n.w.now))
	n.clockFaulty = n.clock.Doubtful() || !n.stamp(n.w.now).Synced && n.rtcOffset != 0
	if n.clockFaulty {
		n.clockWrong()
	} else {
		n.clockRight()
	}
}

// built is when the agent's program was.
func built() time.Time { return genesis().Add(-24 * time.Hour) }

// now is the node's time.
func (n *node) now() time.Time { return n.clock.At(n.reading(n.w.now)) }

func (n *node) stamp(t instant) clock.Stamp { return n.clock.Stamp(n.reading(t)) }

// machineTime converts times of the machine's clock to the node's, by how both stand now.
type machineTime struct {
	n   *node
	now clock.Reading
}

// at is the conversion as of a true time. The next call changes it.
func (n *node) at(t instant) *machineTime {
	n.times = machineTime{n, n.reading(t)}
	return &n.times
}

// FromMachineTime implements agent.MachineTime.
func (m *machineTime) FromMachineTime(t, after time.Time) time.Time {
	return m.n.clock.FromMachineTime(t, after, m.n.store.Stamp, m.now)
}

// Exited implements agent.MachineTime.
func (m *machineTime) Exited(t time.Time) time.Time {
	return m.n.clock.Exited(t, m.n.store.Stamp, m.now)
}

// syncClock takes over the hub's time, told in an answer that took so long, as reconcile.SyncClock does.
func (n *node) syncClock(hub time.Time, took instant) {
	r := n.reading(n.w.now)
	next := n.clock.Sync(hub, took.dur(), r)
	if from, to := n.clock.At(r), next.Stamp(r); !to.At.Equal(from) {
		// After a step back, the meter waits until the time that it has recorded comes again.
		if ahead := since(from); ahead > n.w.now {
			n.doubt.closed = append(n.doubt.closed, window{n.w.now, ahead})
		}
		n.sample(n.w.now)
		if n.w.breaks(BreakClock) {
			n.store.Stamp = to
		} else if err := n.store.SetClock(from, to); err != nil {
			n.w.fail(5, "clock of %s: %v", n.id, err)
		}
		clear(n.hold)
		n.watchedSince = to.At
	}
	n.clock = next
	n.clockFaulty = false
	n.clockRight()
}
