package state_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
)

// box is a machine with a settable clock.
type box struct {
	rtc  time.Time
	up   time.Duration
	boot string
}

func (b *box) source() state.Source {
	return state.Source{RTC: func() time.Time { return b.rtc }, SinceBoot: func() time.Duration { return b.up }, BootID: b.boot}
}

func (b *box) pass(d time.Duration) { b.rtc, b.up = b.rtc.Add(d), b.up+d }

func TestClockGoesByTheHubAndTheCounterSinceBoot(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	b := &box{rtc: noon.Add(time.Hour), up: time.Minute, boot: "one"}
	c := state.NewClock(s, b.source(), time.Time{})
	require.Equal(t, noon.Add(time.Hour), c.Now(), "without a hub the machine's clock counts")
	c.Sync(noon.Add(2 * time.Hour))
	b.pass(time.Minute)
	b.rtc = b.rtc.Add(-30 * time.Minute)
	require.Equal(t, noon.Add(2*time.Hour+time.Minute), c.Now(), "nobody can set the counter")
	require.Equal(t, c.Now(), c.FromMachine(b.rtc))
	require.NoError(t, s.Beat(meter.Observation{At: c.Now()}, c.Stamp()))
	require.NoError(t, s.Close())

	b.pass(time.Minute)
	s = open(t, dir, m)
	c = state.NewClock(s, b.source(), time.Time{})
	require.Equal(t, noon.Add(2*time.Hour+2*time.Minute), c.Now(), "the same boot: the agent's restart is nothing")
	require.True(t, c.Trusted())
}

func TestClockOf1970StartsFromTheFloor(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	b := &box{rtc: time.Unix(100, 0), boot: "two"}
	built := noon.Add(-time.Hour)
	c := state.NewClock(s, b.source(), built)
	require.Equal(t, noon, c.Now(), "the newest signed document is younger than the build")
	require.False(t, c.Trusted())
	b.pass(time.Minute)
	require.Equal(t, noon.Add(time.Minute), c.Now(), "and time goes on from there")

	require.NoError(t, s.Beat(meter.Observation{At: c.Now()}, state.Stamp{At: noon.Add(24 * time.Hour), BootID: "one", Synced: true}))
	c = state.NewClock(s, b.source(), built)
	require.Equal(t, noon.Add(24*time.Hour), c.Now(), "after a power cut with a dead battery the last stamp counts")
	require.False(t, c.Trusted())
	c.Sync(noon.Add(48 * time.Hour))
	require.True(t, c.Trusted())
	require.Equal(t, noon.Add(48*time.Hour), c.Now())
}

func TestPowerOffCountsByTheMachinesClock(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	require.NoError(t, s.Beat(meter.Observation{At: noon}, state.Stamp{At: noon, BootID: "one", SinceBoot: time.Hour, Synced: true}))
	b := &box{rtc: noon.Add(5 * time.Hour), up: time.Minute, boot: "two"}
	c := state.NewClock(s, b.source(), time.Time{})
	require.Equal(t, noon.Add(5*time.Hour), c.Now())
	require.True(t, c.Trusted())
}
