package state_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
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
	return state.Source{
		RTC: func() time.Time { return b.rtc }, SinceBoot: func() time.Duration { return b.up },
		BootID: b.boot,
	}
}

func (b *box) pass(d time.Duration) { b.rtc, b.up = b.rtc.Add(d), b.up+d }

func TestClockIsCarriedOverByTheStore(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	b := &box{rtc: noon.Add(time.Hour), up: time.Minute, boot: "one"}
	c := state.NewClock(s, b.source(), time.Time{})
	require.Equal(t, noon.Add(time.Hour), c.Now(), "without a hub the machine's clock counts")
	next, leaps := c.Synced(noon.Add(2*time.Hour), 0)
	require.True(t, leaps)
	require.Equal(t, noon.Add(time.Hour), c.Now(), "told is not set")
	c.Set(next)
	b.pass(time.Minute)
	b.rtc = b.rtc.Add(-30 * time.Minute)
	require.Equal(t, noon.Add(2*time.Hour+time.Minute), c.Now(), "nobody can set the counter")
	require.True(t, c.MachineIsWrong())
	require.NoError(t, s.SaveSample(meter.Observation{At: c.Now()}, c.Stamp()))
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
	require.NoError(t, s.SaveSample(meter.Observation{At: c.Now()}, clock.Stamp{
		At: noon.Add(24 * time.Hour), RTC: noon.Add(24 * time.Hour), BootID: "one",
		Synced: true,
	}))
	c = state.NewClock(s, b.source(), built)
	require.Equal(t, noon.Add(24*time.Hour), c.Now(), "after a power cut with a dead battery the last stamp counts")
	require.False(t, c.Trusted())
	require.True(t, c.MachineIsWrong())
}

// A day's leap, either way: what is open goes on from the new time, and every time in the journal is as long ago as it
// was.
func TestSettingTheClockMovesTheJournalAndBillsNothing(t *testing.T) {
	for name, by := range map[string]time.Duration{"ahead": 24 * time.Hour, "back": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			m, dir := newMesh(t), t.TempDir()
			s := open(t, dir, m)
			from := noon.Add(time.Minute)
			require.NoError(t, s.OpenRun(state.Run{ID: "a.1", MemberID: "a", OpenedAt: noon}))
			require.NoError(t, s.UpdateRun("a.1", func(r *state.Run) { r.StartedAt, r.ReadyAt = noon, noon.Add(time.Second) }))
			require.NoError(t, s.UpdateMember("a", func(x *state.Member) {
				x.RetryAt = noon.Add(time.Hour)
				x.Services = map[string]agent.ServiceRecord{"db": {Tries: agent.Tries{RetryAt: noon.Add(time.Minute)}}}
			}))
			up := meter.Run{RunID: "a.1", MemberID: "a", StartedAt: noon, Up: true}
			require.NoError(t, s.SaveSample(meter.Observation{At: from, Runs: []meter.Run{up}, CutEvery: time.Hour},
				clock.Stamp{At: from}))
			require.NoError(t, s.SetClock(from, clock.Stamp{At: from.Add(by), Synced: true}))

			require.NoError(t, s.Close())
			s = open(t, dir, m)
			run := s.Runs()["a.1"]
			require.Equal(t, []time.Time{noon.Add(by), noon.Add(by), noon.Add(by + time.Second)}, []time.Time{
				run.OpenedAt,
				run.StartedAt, run.ReadyAt,
			})
			require.Equal(t, noon.Add(by+time.Hour), s.Members()["a"].RetryAt)
			require.Equal(t, noon.Add(by+time.Minute), s.Members()["a"].Services["db"].RetryAt, "a service pauses no longer")
			require.True(t, s.LastStamp().Synced)
			up.StartedAt = run.StartedAt
			end := from.Add(by + 10*time.Second)
			require.NoError(t, s.SaveSample(meter.Observation{At: end, Runs: []meter.Run{up}, CutEvery: time.Second},
				clock.Stamp{At: end}))
			billed := s.Consumed("a")["session_seconds"]
			if by > 0 {
				require.EqualValues(t, 70_000_000, billed)
			} else {
				require.EqualValues(t, 60_000_000, billed, "what was recorded ahead is not recorded again")
			}
		})
	}
}
