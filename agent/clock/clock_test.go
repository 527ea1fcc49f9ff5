package clock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent/clock"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

// machine is one with a settable clock.
type machine struct{ clock.Reading }

func newMachine(rtc time.Time, boot string) *machine {
	return &machine{clock.Reading{RTC: rtc, SinceBoot: time.Minute, BootID: boot}}
}

func (m *machine) pass(d time.Duration) { m.RTC, m.SinceBoot = m.RTC.Add(d), m.SinceBoot+d }

// stampAt is the stamp of a machine that a hub told the time a minute before noon in boot one, and whose clock was off
// by that.
func stampAt(off time.Duration) clock.Stamp {
	m := newMachine(noon.Add(off-time.Minute), "one")
	c := clock.Start(clock.Known{}, m.Reading).Sync(noon.Add(-time.Minute), 0, m.Reading)
	m.pass(time.Minute)
	return c.Stamp(m.Reading)
}

func TestWithinABootTheTimeGoesOnWhateverTheMachinesClockIsSetTo(t *testing.T) {
	for name, synced := range map[string]bool{"told by a hub": true, "never told": false} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(noon, "one")
			c := clock.Start(clock.Known{}, m.Reading)
			require.Equal(t, noon, c.At(m.Reading), "without a hub the machine's clock says where to begin")
			if synced {
				c = c.Sync(noon, 0, m.Reading)
			}
			for _, jump := range []time.Duration{day, -3 * day, 500 * day} {
				m.RTC = m.RTC.Add(jump)
				m.pass(time.Hour)
			}
			require.Equal(t, noon.Add(3*time.Hour), c.At(m.Reading))
			require.True(t, c.Wrong(m.Reading))
			require.False(t, c.Doubtful())

			again := clock.Start(clock.Known{Last: c.Stamp(m.Reading)}, m.Reading)
			m.RTC = time.Unix(0, 0)
			m.pass(time.Hour)
			require.Equal(t, noon.Add(4*time.Hour), again.At(m.Reading), "the agent's restart is nothing")
			require.Equal(t, synced, again.Stamp(m.Reading).Synced)
		})
	}
}

func TestAfterABootTheEarlierOfTwoPlausibleTimesCounts(t *testing.T) {
	for name, c := range map[string]struct {
		last     clock.Stamp
		rtc      time.Time
		signed   time.Time
		want     time.Time
		doubtful bool
	}{
		"right all the time": {
			last: stampAt(0), rtc: noon.Add(5 * time.Hour),
			want: noon.Add(5 * time.Hour),
		},
		"a day ahead all the time": {
			last: stampAt(day), rtc: noon.Add(day + 5*time.Hour),
			want: noon.Add(5 * time.Hour), doubtful: true,
		},
		"a day behind all the time": {
			last: stampAt(-day), rtc: noon.Add(-day + 5*time.Hour),
			want: noon.Add(5 * time.Hour), doubtful: true,
		},
		"it was a day ahead and has been set": {
			last: stampAt(day), rtc: noon.Add(5 * time.Hour),
			want: noon.Add(5 * time.Hour), doubtful: true,
		},
		"it was a day behind and has been set": {
			last: stampAt(-day), rtc: noon.Add(5 * time.Hour),
			want: noon.Add(5 * time.Hour), doubtful: true,
		},
		"1970": {last: stampAt(0), rtc: time.Unix(100, 0), want: noon, doubtful: true},
		"1970, and never anything else": {
			last: stampAt(-noon.Sub(time.Unix(100, 0))), rtc: time.Unix(50, 0),
			want: noon, doubtful: true,
		},
		"a new store":                        {rtc: noon.Add(-time.Hour), want: noon.Add(-time.Hour)},
		"a new store, a document is younger": {rtc: time.Unix(9, 0), signed: noon, want: noon, doubtful: true},
		"a document is younger than the stamp": {
			last: stampAt(0), rtc: time.Unix(9, 0), signed: noon.Add(time.Hour),
			want: noon.Add(time.Hour), doubtful: true,
		},
		"behind by less than is worth a thought": {
			last: stampAt(-10 * time.Second), rtc: noon.Add(5 * time.Hour),
			want: noon.Add(5 * time.Hour),
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(c.rtc, "two")
			got := clock.Start(clock.Known{Last: c.last, Signed: c.signed}, m.Reading)
			require.Equal(t, c.want, got.At(m.Reading))
			require.Equal(t, c.doubtful, got.Doubtful())
			m.pass(time.Minute)
			require.Equal(t, c.want.Add(time.Minute), got.At(m.Reading), "and time goes on from there")
			again := clock.Start(clock.Known{Last: got.Stamp(m.Reading)}, m.Reading)
			require.Equal(t, c.doubtful, again.Doubtful(), "the agent's restart does away with no doubt")
		})
	}
}

// A hub whose clock ran ahead has signed a document of a time to come; another one has told the right time since. A
// leap of a restarted agent to that document would be billed, and would end leases.
func TestLaw17ARestartDoesNotLeapToADocumentThatWasSignedAhead(t *testing.T) {
	m := newMachine(noon, "one")
	never := clock.Start(clock.Known{}, m.Reading)
	told := never.Sync(noon, 0, m.Reading)
	m.pass(time.Hour)
	again := clock.Start(clock.Known{Last: told.Stamp(m.Reading), Signed: noon.Add(day)}, m.Reading)
	require.Equal(t, noon.Add(time.Hour), again.At(m.Reading))
	require.False(t, again.Doubtful())

	again = clock.Start(clock.Known{Last: never.Stamp(m.Reading), Signed: noon.Add(day)}, m.Reading)
	require.Equal(t, noon.Add(day), again.At(m.Reading), "without a hub's time in this boot the document tells more")
	require.True(t, again.Doubtful())
}

func TestAHubsTimeSetsTheClockOnlyAsFarAsItMust(t *testing.T) {
	const took = 10 * time.Second
	for name, c := range map[string]struct{ at, want time.Duration }{
		"within the answer's time": {4 * time.Second, 4 * time.Second},
		"near its beginning":       {-900 * time.Millisecond, -900 * time.Millisecond},
		"near its end":             {took + 900*time.Millisecond, took + 900*time.Millisecond},
		"behind":                   {-day, 0},
		"ahead":                    {day, 0},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(noon.Add(c.at), "one")
			got := clock.Start(clock.Known{}, m.Reading).Sync(noon, took, m.Reading)
			require.Equal(t, noon.Add(c.want), got.At(m.Reading))
			require.False(t, got.Doubtful())
		})
	}
}

func TestAClockInDoubtIsWrongEvenIfTheMachinesOwnAgrees(t *testing.T) {
	m := newMachine(noon, "one")
	c := clock.Start(clock.Known{}, m.Reading)
	require.False(t, c.Wrong(m.Reading))
	last := c.Stamp(m.Reading)
	m = newMachine(noon.Add(-clock.Slack/2), "two")
	c = clock.Start(clock.Known{Last: last}, m.Reading)
	require.True(t, c.Doubtful())
	require.Less(t, c.At(m.Reading).Sub(m.RTC), clock.Slack)
	require.True(t, c.Wrong(m.Reading))
}

func TestAClockThatRanAheadDoesNotStandStillAfterTheHubsTime(t *testing.T) {
	m := newMachine(noon.Add(day), "one")
	c := clock.Start(clock.Known{}, m.Reading)
	last := c.Stamp(m.Reading)
	m.BootID, m.RTC = "two", noon
	c = clock.Start(clock.Known{Last: last}, m.Reading)
	require.Equal(t, noon.Add(day), c.At(m.Reading), "what was written down has passed, as far as anybody knows")
	c = c.Sync(noon, 0, m.Reading)
	m.pass(time.Hour)
	require.Equal(t, noon.Add(time.Hour), c.At(m.Reading))
	require.False(t, c.Wrong(m.Reading))
}

// A clock that ran ahead was set right: the node goes on by the later time, but knows that it may be as early as that
// clock says.
func TestATimeThatOnlyTheMachinesClockHasToldMayBeAsEarlyAsItTellsNow(t *testing.T) {
	m := newMachine(noon.Add(400*day), "one")
	c := clock.Start(clock.Known{Certain: noon.Add(-day)}, m.Reading)
	require.Equal(t, noon.Add(400*day), c.Earliest(m.Reading))
	m.RTC = noon
	require.Equal(t, noon, c.Earliest(m.Reading))
	require.Equal(t, noon.Add(400*day), c.At(m.Reading))
	last := c.Stamp(m.Reading)
	for _, boot := range []string{"one", "two"} {
		m.BootID = boot
		again := clock.Start(clock.Known{Last: last, Certain: noon.Add(-day)}, m.Reading)
		require.Equal(t, noon, again.Earliest(m.Reading), "boot %s", boot)
	}
	m.BootID, m.RTC = "one", time.Unix(9, 0)
	require.Equal(t, noon.Add(-day), c.Earliest(m.Reading), "but not before what has passed for sure")
	c = c.Sync(noon.Add(time.Hour), 0, m.Reading)
	require.Equal(t, noon.Add(time.Hour), c.Earliest(m.Reading), "a hub's time is no matter of the machine's clock")
}

func TestAMachinesClockThatIsSetAheadDoesNotMakeTheEarliestTimeLater(t *testing.T) {
	m := newMachine(noon, "one")
	c := clock.Start(clock.Known{}, m.Reading)
	m.RTC = noon.Add(day)
	require.Equal(t, noon, c.Earliest(m.Reading))
}

func TestNoHubSetsTheClockBelowWhatHasPassedForSure(t *testing.T) {
	m := newMachine(noon, "one")
	c := clock.Start(clock.Known{Certain: noon}, m.Reading)
	require.Equal(t, noon, c.Sync(noon.Add(-time.Hour), 0, m.Reading).At(m.Reading))
	c = c.Passed(noon.Add(time.Minute), m.Reading)
	require.True(t, c.Doubtful())
	require.Equal(t, noon.Add(time.Minute), c.Sync(noon, 0, m.Reading).At(m.Reading))
}

// The runtime reports exits by the machine's clock, which may be set between exit and sample.
func TestExitTimesAreConvertedByTheClockThatToldThem(t *testing.T) {
	const off = -7 * time.Hour
	last := stampAt(off)
	exitRTC := func(after time.Duration) time.Time { return noon.Add(off + after) }
	for name, c := range map[string]struct {
		exit time.Time
		jump time.Duration
		want time.Duration
		none bool
	}{
		"nobody set it":                  {exit: exitRTC(3 * time.Second), want: 3 * time.Second},
		"set ahead after the exit":       {exit: exitRTC(3 * time.Second), jump: day, want: 3 * time.Second},
		"set back after the exit":        {exit: exitRTC(3 * time.Second), jump: -day, want: 3 * time.Second},
		"set ahead before the exit":      {exit: exitRTC(3 * time.Second).Add(day), jump: day, want: 3 * time.Second},
		"set by a little after the exit": {exit: exitRTC(3 * time.Second), jump: 2 * time.Second, want: time.Second},
		"before the last look":           {exit: exitRTC(-time.Second), none: true},
		"after this look":                {exit: exitRTC(11 * time.Second), none: true},
		"set twice":                      {exit: exitRTC(3 * time.Second).Add(day), jump: 2 * day, none: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(last.RTC, "one")
			m.SinceBoot = last.SinceBoot
			clk := clock.Start(clock.Known{Last: last}, m.Reading)
			m.pass(10 * time.Second)
			m.RTC = m.RTC.Add(c.jump)
			got := clk.Exited(c.exit, last, m.Reading)
			if c.none {
				require.Zero(t, got)
				return
			}
			require.Equal(t, noon.Add(c.want), got)
			if c.jump == 0 {
				require.Equal(t, got, clk.FromMachineTime(c.exit, noon, last, m.Reading))
			}
		})
	}
	m := newMachine(last.RTC, "one")
	m.SinceBoot = last.SinceBoot
	clk := clock.Start(clock.Known{Last: last}, m.Reading)
	require.Zero(t, clk.Exited(time.Time{}, last, m.Reading))
	require.Zero(t, clk.FromMachineTime(time.Time{}, noon, last, m.Reading))
	require.Equal(t, noon, clk.FromMachineTime(noon, noon, last, m.Reading), "what cannot be is taken for now")
}

// TestTimeNeverStandsStillOrRunsByItself holds any history of boots, hubs and settings of the machine's clock against
// the counter.
func TestTimeNeverStandsStillOrRunsByItself(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		span := func(name string, least, most time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(int64(least), int64(most)).Draw(rt, name))
		}
		m := newMachine(noon.Add(span("offset", -400*day, 400*day)), "boot 0")
		known, boots := clock.Known{Certain: noon.Add(-day)}, 0
		c := clock.Start(known, m.Reading)
		rt.Repeat(map[string]func(*rapid.T){
			"set":   func(*rapid.T) { m.RTC = m.RTC.Add(span("by", -3*day, 3*day)) },
			"stamp": func(*rapid.T) { known.Last = c.Stamp(m.Reading) },
			"agent restarts": func(*rapid.T) {
				known.Last = c.Stamp(m.Reading)
				before := c.At(m.Reading)
				c = clock.Start(known, m.Reading)
				require.Equal(rt, before, c.At(m.Reading))
			},
			"boot": func(*rapid.T) {
				boots++
				m.BootID, m.SinceBoot = "boot "+string(rune('a'+boots%26))+time.Duration(boots).String(), time.Second
				m.RTC = m.RTC.Add(span("off", 0, day))
				c = clock.Start(known, m.Reading)
				require.False(rt, c.At(m.Reading).Before(known.Last.At))
			},
			"hub": func(*rapid.T) {
				hub, took := noon.Add(span("hub", 0, 900*day)), span("took", 0, 15*time.Second)
				c = c.Sync(hub, took, m.Reading)
				require.WithinRange(rt, c.At(m.Reading), hub.Add(-clock.Near), hub.Add(took+clock.Near))
			},
			"": func(*rapid.T) {
				before := c.At(m.Reading)
				m.pass(time.Second)
				require.Equal(rt, before.Add(time.Second), c.At(m.Reading))
				require.False(rt, before.Before(known.Certain.Add(-clock.Near)))
			},
		})
	})
}
