package meter_test

import (
	"encoding/json"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return noon.Add(time.Duration(seconds * float64(time.Second))) }

func up(run string, started, cpu float64) meter.Run {
	return meter.Run{
		RunID: run, MemberID: "m1", Revision: 1, LeaseNo: 1, StartedAt: at(started), Up: true,
		CPUMicros: int64(cpu * 1e6), MemoryBytes: 1000, Sampled: true,
	}
}

func exited(run string, started, ended float64) meter.Run {
	return meter.Run{RunID: run, MemberID: "m1", Revision: 1, LeaseNo: 1, StartedAt: at(started), ExitedAt: at(ended)}
}

func observation(now float64, runs ...meter.Run) meter.Observation {
	return meter.Observation{At: at(now), Runs: runs, CutEvery: 30 * time.Second}
}

func opened() meter.State {
	return meter.Open(meter.State{}, meter.Intent{RunID: "r1", MemberID: "m1", Revision: 1, LeaseNo: 1}, at(0))
}

// line is a record as the tests read it: meter, seconds since noon, base units.
type line struct {
	meter    string
	from, to float64
	quantity int64
}

func lines(records []*protocol.UsageRecord) []line {
	out := []line{}
	for _, r := range records {
		out = append(out, line{
			r.GetMeter(), r.GetStartedAt().AsTime().Sub(noon).Seconds(), r.GetEndedAt().AsTime().Sub(noon).Seconds(),
			r.GetQuantity(),
		})
	}
	return out
}

func TestIntervalIsCutContiguouslyAndEndsAtContainerdsExitTime(t *testing.T) {
	s := opened()
	s, got := meter.Sample(s, observation(1, up("r1", 0.5, 0)))
	require.Empty(t, got)
	s, got = meter.Sample(s, observation(11, up("r1", 0.5, 3)))
	require.Empty(t, got)
	s, got = meter.Sample(s, observation(31, up("r1", 0.5, 4)))
	require.Equal(t, []line{
		{protocol.MeterSessionSeconds, 0.5, 31, 30_500_000},
		{protocol.MeterCPUSeconds, 0.5, 31, 4_000_000},
		{protocol.MeterMemoryByteSeconds, 0.5, 31, 30_000},
	}, lines(got))
	// The exit lies a moment after the listing began; it is the runtime's word that counts.
	s, got = meter.Sample(s, observation(41, exited("r1", 0.5, 41.25)))
	require.Equal(t, []line{
		{protocol.MeterSessionSeconds, 31, 41.25, 10_250_000},
		{protocol.MeterCPUSeconds, 31, 41.25, 0},
		{protocol.MeterMemoryByteSeconds, 31, 41.25, 0},
	}, lines(got))
	s, got = meter.Sample(s, observation(51, exited("r1", 0.5, 41.25)))
	require.Empty(t, got, "an exit is billed once")

	s, got = meter.Close(s, "m1", at(60))
	require.Len(t, got, 1)
	require.True(t, got[0].GetFinal())
	require.Equal(t, []line{{protocol.MeterSessionSeconds, 41.25, 41.25, 0}}, lines(got))
	require.Equal(t, meter.State{Intervals: []meter.Interval{}, Members: []meter.Member{}}, s)
}

func TestAgentAwayWhileTheContainerRunsLosesNothing(t *testing.T) {
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	_, got := meter.Sample(restart(t, s), observation(500, up("r1", 0.5, 77)))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 500, 499_500_000}, lines(got)[0])
	require.Equal(t, line{protocol.MeterCPUSeconds, 0.5, 500, 77_000_000}, lines(got)[1])
}

func TestContainerThatDiedWhileTheAgentWasAwayEndsAtItsExitTime(t *testing.T) {
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	_, got := meter.Sample(restart(t, s), observation(500, exited("r1", 0.5, 123)))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 123, 122_500_000}, lines(got)[0])
}

func TestTimeWithoutAWorkingAcceleratorIsNotCounted(t *testing.T) {
	faulty := func(r meter.Run) meter.Run { r.NoDevice = true; return r }
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	s, _ = meter.Sample(s, observation(11, up("r1", 0.5, 2)))
	s, got := meter.Sample(s, observation(21, faulty(up("r1", 0.5, 4))))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 11, 10_500_000}, lines(got)[0])
	for _, now := range []float64{31, 41, 71} {
		s, got = meter.Sample(s, observation(now, faulty(up("r1", 0.5, now/5))))
		require.Empty(t, got)
	}
	_, got = meter.Sample(s, observation(75, faulty(exited("r1", 0.5, 74))))
	require.Empty(t, got, "it ended before its accelerator was back")
	s, got = meter.Sample(restart(t, s), observation(81, up("r1", 0.5, 20)))
	require.Empty(t, got, "it works again from here on")
	_, got = meter.Sample(s, observation(91, exited("r1", 0.5, 90)))
	require.Equal(t, line{protocol.MeterSessionSeconds, 81, 90, 9_000_000}, lines(got)[0])
	require.Equal(t, line{protocol.MeterCPUSeconds, 81, 90, 0}, lines(got)[1], "what it computed meanwhile is left out")
	s, _ = meter.Sample(s, observation(91, up("r1", 0.5, 20)))
	_, got = meter.Sample(s, observation(101, exited("r1", 0.5, 100)))
	require.Equal(t, line{protocol.MeterMemoryByteSeconds, 81, 100, 10_000}, lines(got)[2], "memory counts from there")
}

// A scan finds a fault later than it came: what ran since the scan before it is not counted.
func TestTimeSinceTheLastScanCountsOnceAnotherScanFindsTheAcceleratorWorking(t *testing.T) {
	scanned := func(r meter.Run, seconds float64) meter.Run {
		r.NeedsDevice, r.WorkedAt = true, at(seconds)
		return r
	}
	s, _ := meter.Sample(opened(), observation(1, scanned(up("r1", 0.5, 0), 1)))
	s, _ = meter.Sample(s, observation(11, scanned(up("r1", 0.5, 5), 8)))
	s, _ = meter.Sample(s, observation(21, scanned(up("r1", 0.5, 10), 18)))
	found := up("r1", 0.5, 15)
	found.NoDevice = true
	_, got := meter.Sample(restart(t, s), observation(31, scanned(found, 23)))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 11, 10_500_000}, lines(got)[0])
	require.Equal(t, line{protocol.MeterCPUSeconds, 0.5, 11, 5_000_000}, lines(got)[1], "as of that sample")

	end := scanned(exited("r1", 0.5, 27), 23)
	_, got = meter.Sample(s, observation(28, end))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 27, 26_500_000}, lines(got)[0], "it was stopped, or was done")
	end.Crashed = true
	_, got = meter.Sample(s, observation(28, end))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 23, 22_500_000}, lines(got)[0], "perhaps by a fault")

	s, _ = meter.Sample(s, observation(25, scanned(up("r1", 0.5, 12), 18)))
	silent := scanned(up("r1", 0.5, 12), 18)
	silent.Up, silent.Unknown = false, true
	s, _ = meter.Sample(s, observation(26, silent))
	end.WorkedAt = at(18)
	_, got = meter.Sample(restart(t, s), observation(28, end))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 11, 10_500_000}, lines(got)[0], "perhaps by a fault, unseen")
	end.Crashed = false
	_, got = meter.Sample(restart(t, s), observation(28, end))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 25, 24_500_000}, lines(got)[0], "it was stopped, unseen")
}

// The end of one container counts without a scan; what another ran beside it until then is not passed over.
func TestTheEndOfASidecarLosesNoTimeOfTheContainerThatHasTheAccelerators(t *testing.T) {
	scanned := func(r meter.Run, seconds float64) meter.Run {
		r.NeedsDevice, r.WorkedAt = true, at(seconds)
		return r
	}
	s := meter.Open(opened(), meter.Intent{RunID: "r2", MemberID: "m1", Revision: 1, LeaseNo: 1}, at(4))
	s, _ = meter.Sample(s, observation(1, scanned(up("r1", 0.5, 0), 1)))
	s, _ = meter.Sample(s, observation(11, scanned(up("r1", 0.5, 0), 8), scanned(up("r2", 5, 0), 8)))
	s, got := meter.Sample(s, observation(21, scanned(up("r1", 0.5, 0), 8), scanned(exited("r2", 5, 15), 8)))
	broken := up("r1", 0.5, 0)
	broken.NoDevice = true
	for name, c := range map[string]struct {
		run  meter.Run
		want int64
	}{
		"it was stopped":         {scanned(exited("r1", 0.5, 27), 8), 26_500_000},
		"its accelerator failed": {scanned(broken, 8), 500_000},
	} {
		t.Run(name, func(t *testing.T) {
			_, more := meter.Sample(restart(t, s), observation(28, c.run))
			var session int64
			for _, l := range lines(slices.Concat(got, more)) {
				if l.meter == protocol.MeterSessionSeconds {
					session += l.quantity
				}
			}
			require.Equal(t, c.want, session)
		})
	}
}

// A copy that starts beside the one that serves costs nothing until it is alone.
func TestCPUAndMemoryOfACopyBesideAnotherAreNotCounted(t *testing.T) {
	beside := func(r meter.Run) meter.Run { r.Beside = true; return r }
	s := meter.Open(opened(), meter.Intent{RunID: "r2", MemberID: "m1", Revision: 2, LeaseNo: 1}, at(4))
	s, _ = meter.Sample(s, observation(10, up("r1", 0, 10), beside(up("r2", 5, 5))))
	s, _ = meter.Sample(s, observation(20, up("r1", 0, 20), beside(up("r2", 5, 15))))
	s, got := meter.Sample(s, observation(30, exited("r1", 0, 25), up("r2", 5, 25)))
	require.Contains(t, lines(got), line{protocol.MeterCPUSeconds, 0, 25, 20_000_000})
	require.Contains(t, lines(got), line{protocol.MeterMemoryByteSeconds, 0, 25, 10_000})
	s, _ = meter.Sample(s, observation(40, up("r2", 5, 35)))
	_, more := meter.Sample(restart(t, s), observation(50, exited("r2", 5, 45)))

	total := map[string]int64{}
	for _, l := range lines(append(got, more...)) {
		total[l.meter] += l.quantity
	}
	require.Equal(t, map[string]int64{
		protocol.MeterSessionSeconds:    45_000_000, // once
		protocol.MeterCPUSeconds:        (20 + 20) * 1_000_000,
		protocol.MeterMemoryByteSeconds: 10_000 + 10_000,
	}, total)
}

// A process may end while its shim does not answer: that time counts only where the process is seen up afterwards.
func TestSilentRuntimeNeitherExtendsNorEndsAnInterval(t *testing.T) {
	unknown := meter.Run{RunID: "r1", MemberID: "m1", Revision: 1, LeaseNo: 1, StartedAt: at(0.5), Unknown: true}
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	for _, now := range []float64{11, 21, 100} {
		var got []*protocol.UsageRecord
		s, got = meter.Sample(s, observation(now, unknown))
		require.Empty(t, got)
	}
	for name, c := range map[string]struct {
		run meter.Run
		to  float64
	}{
		"it runs":              {up("r1", 0.5, 0), 110},
		"it ended":             {exited("r1", 0.5, 105), 1},
		"nothing saw its exit": {meter.Run{RunID: "r1", MemberID: "m1", StartedAt: at(0.5)}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			_, got := meter.Sample(restart(t, s), observation(110, c.run))
			require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, c.to, int64((c.to - 0.5) * 1e6)}, lines(got)[0])
		})
	}
}

func TestDaemonKilledBetweenOpenAndFirstSampleLosesNothing(t *testing.T) {
	_, got := meter.Sample(restart(t, opened()), observation(500, exited("r1", 0.5, 123)))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 123, 122_500_000}, lines(got)[0])
}

func TestPowerCutEndsAtTheLastSample(t *testing.T) {
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	s, _ = meter.Sample(s, observation(11, up("r1", 0.5, 2)))
	for name, run := range map[string][]meter.Run{
		"container gone":         nil,
		"exit time never noted":  {{RunID: "r1", MemberID: "m1", StartedAt: at(0.5)}},
		"started anew unnoticed": {up("r1", 100, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			_, got := meter.Sample(restart(t, s), observation(130, run...))
			require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 11, 10_500_000}, lines(got)[0])
			require.Len(t, got, 3)
		})
	}
}

func TestStartUnderWayWaitsAndAnEventualFailureIsForgotten(t *testing.T) {
	s, got := meter.Sample(opened(), observation(1, meter.Run{RunID: "r1", MemberID: "m1"}))
	require.Empty(t, got)
	require.Len(t, s.Intervals, 1, "created, not started yet")
	s, got = meter.Sample(s, observation(2))
	require.Empty(t, got)
	require.Len(t, s.Intervals, 1, "not created yet")
	require.Empty(t, meter.Cancel(s, "r1").Intervals)
	s, got = meter.Sample(s, observation(meter.PendingFor.Seconds()+1))
	require.Empty(t, got)
	require.Empty(t, s.Intervals)
}

func TestStartThatIsTriedAgainWhileItsContainerIsUpLosesNothing(t *testing.T) {
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	s, got := meter.Sample(s, observation(11, meter.Run{RunID: "r1", MemberID: "m1"}))
	require.Empty(t, got, "its start is tried again and finds it up")
	_, got = meter.Sample(s, observation(31, up("r1", 0.5, 4)))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 31, 30_500_000}, lines(got)[0])
}

func TestCancelLeavesAnIntervalThatHasBegun(t *testing.T) {
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	require.Len(t, meter.Cancel(s, "r1").Intervals, 1)
}

func TestContainerOfALostStoreCountsFromWhenItIsSeen(t *testing.T) {
	s, got := meter.Sample(meter.State{}, observation(100, up("r1", 0.5, 90)))
	require.Empty(t, got)
	_, got = meter.Sample(s, observation(130, up("r1", 0.5, 95)))
	require.Equal(t, []line{
		{protocol.MeterSessionSeconds, 100, 130, 30_000_000},
		{protocol.MeterCPUSeconds, 100, 130, 5_000_000},
		{protocol.MeterMemoryByteSeconds, 100, 130, 30_000},
	}, lines(got))
}

// Law 5: the processor time that a container used before its store was lost may be billed already, also where its shim
// does not tell it at first.
func TestLaw05ContainerOfALostStoreBillsNoProcessorTimeAgain(t *testing.T) {
	silent := up("r1", 0.5, 0)
	silent.Sampled = false
	s, _ := meter.Sample(meter.State{}, observation(100, silent))
	s, _ = meter.Sample(restart(t, s), observation(110, up("r1", 0.5, 92)))
	_, got := meter.Sample(s, observation(130, up("r1", 0.5, 95)))
	require.Contains(t, lines(got), line{protocol.MeterCPUSeconds, 100, 130, 3_000_000})
}

func TestNewLeaseCutsTheInterval(t *testing.T) {
	s, _ := meter.Sample(opened(), observation(1, up("r1", 0.5, 0)))
	renewed := up("r1", 0.5, 1)
	renewed.LeaseNo = 2
	s, got := meter.Sample(s, observation(11, renewed))
	require.Equal(t, line{protocol.MeterSessionSeconds, 0.5, 11, 10_500_000}, lines(got)[0])
	require.EqualValues(t, 1, got[0].GetLeaseNo())
	renewed.ExitedAt, renewed.Up = at(15), false
	_, got = meter.Sample(s, observation(21, renewed))
	require.Equal(t, line{protocol.MeterSessionSeconds, 11, 15, 4_000_000}, lines(got)[0])
	require.EqualValues(t, 2, got[0].GetLeaseNo())
}

func TestSecondContainerOfAMemberAddsNoSessionTime(t *testing.T) {
	s := meter.Open(opened(), meter.Intent{RunID: "r2", MemberID: "m1", Revision: 1, LeaseNo: 1}, at(0))
	s, _ = meter.Sample(s, observation(10, up("r1", 0, 1), up("r2", 5, 1)))
	_, got := meter.Sample(s, observation(25, up("r1", 0, 1), exited("r2", 5, 20)))
	var session int64
	for _, r := range got {
		if r.GetMeter() == protocol.MeterSessionSeconds {
			session += r.GetQuantity()
		}
	}
	require.EqualValues(t, 25_000_000, session)
}

func TestAcceleratorsCountForEachAndOnceForTheirMember(t *testing.T) {
	with := func(r meter.Run, n int64) meter.Run { r.Accelerators = n; return r }
	s, _ := meter.Sample(opened(), observation(1, with(up("r1", 0.5, 0), 2), up("sidecar", 0.5, 0)))
	// The next container of the member has begun before the first one's end was seen.
	_, got := meter.Sample(s, observation(31, with(exited("r1", 0.5, 20), 2), with(up("r2", 19, 0), 1),
		up("sidecar", 0.5, 0)))
	var accelerators []line
	for _, l := range lines(got) {
		if l.meter == protocol.MeterAcceleratorSeconds {
			accelerators = append(accelerators, l)
		}
	}
	require.Equal(t, []line{{protocol.MeterAcceleratorSeconds, 0.5, 20, 39_000_000}}, accelerators)
}

func TestMemoryOfATerabyteDoesNotOverflow(t *testing.T) {
	r := up("r1", 0, 0)
	r.MemoryBytes = 1 << 40
	s, _ := meter.Sample(opened(), meter.Observation{At: at(0), Runs: []meter.Run{r}})
	_, got := meter.Sample(s, meter.Observation{At: at(86_400.5), Runs: []meter.Run{r}})
	require.Equal(t, int64(1<<40)*86_400+1<<39, got[2].GetQuantity())
}

// Byte-microseconds that make no whole byte-second are kept for the next sample.
func TestMemoryOfPartsOfASecondAddsUp(t *testing.T) {
	r := up("r1", 0, 0)
	r.MemoryBytes = 3
	s, _ := meter.Sample(opened(), meter.Observation{At: at(0), Runs: []meter.Run{r}, CutEvery: 30 * time.Second})
	var got []*protocol.UsageRecord
	for _, now := range []float64{0.25, 0.5, 0.75, 1} {
		require.Empty(t, got)
		end := meter.Observation{At: at(now), Runs: []meter.Run{r}, CutEvery: time.Second}
		s, got = meter.Sample(restart(t, s), end)
	}
	require.Equal(t, int64(3), got[2].GetQuantity())
}

func TestMemoryBeyondTheLargestQuantityIsTheLargest(t *testing.T) {
	for name, seconds := range map[string][]float64{
		"the product": {4}, "the byte-seconds": {1.5}, "the sum": {0.75, 1.5}, "the sum with what is too much": {0.5, 2.25},
	} {
		t.Run(name, func(t *testing.T) {
			r := up("r1", 0, 0)
			r.MemoryBytes = math.MaxInt64
			s, _ := meter.Sample(opened(), meter.Observation{At: at(0), Runs: []meter.Run{r}, CutEvery: time.Minute})
			for _, now := range seconds {
				s, _ = meter.Sample(s, meter.Observation{At: at(now), Runs: []meter.Run{r}, CutEvery: time.Minute})
			}
			_, got := meter.Sample(s, meter.Observation{
				At: at(60), Runs: []meter.Run{exited("r1", 0, seconds[len(seconds)-1])}, CutEvery: time.Minute,
			})
			require.Equal(t, int64(math.MaxInt64), got[2].GetQuantity())
		})
	}
}

// The last record is under the newest lease and revision of any container of the member.
func TestTheLastRecordNamesTheNewestLease(t *testing.T) {
	for _, leases := range [][2]uint64{{1, 2}, {2, 1}} {
		s := meter.Open(meter.State{}, meter.Intent{RunID: "r1", MemberID: "m1", Revision: 3 - leases[0], LeaseNo: leases[0]},
			at(0))
		s = meter.Open(s, meter.Intent{RunID: "r2", MemberID: "m1", Revision: 3 - leases[1], LeaseNo: leases[1]}, at(0))
		_, got := meter.Close(s, "m1", at(9))
		last := got[len(got)-1]
		require.True(t, last.GetFinal())
		require.EqualValues(t, 2, last.GetLeaseNo())
		require.EqualValues(t, 2, last.GetRevision())
	}
}

func TestCloseOfAMemberThatNeverRanSaysSo(t *testing.T) {
	_, got := meter.Close(opened(), "m1", at(9))
	require.Equal(t, []line{{protocol.MeterSessionSeconds, 9, 9, 0}}, lines(got))
	require.True(t, got[0].GetFinal())
}

// restart gives the state as the next process reads it.
func restart(t testing.TB, s meter.State) meter.State {
	t.Helper()
	b, err := json.Marshal(s)
	require.NoError(t, err)
	var back meter.State
	require.NoError(t, json.Unmarshal(b, &back))
	return back
}

// Members that were started at different times come to be cut at the same samples: a segment has the records of all of
// them.
func TestMembersAreCutAtTheSameSamples(t *testing.T) {
	started := map[string]float64{"r1": 0, "r2": 4, "r3": 11, "r4": 17, "r5": 26}
	var s meter.State
	cuts := map[float64]map[string]bool{}
	for now := 1.0; now <= 200; now++ {
		var runs []meter.Run
		for run, from := range started {
			if now > from {
				r := up(run, from, now-from)
				r.MemberID = "m" + run
				runs = append(runs, r)
			}
		}
		var records []*protocol.UsageRecord
		s, records = meter.Sample(s, observation(now, runs...))
		for _, r := range records {
			require.LessOrEqual(t, r.GetEndedAt().AsTime().Sub(r.GetStartedAt().AsTime()), 30*time.Second)
			if cuts[now] == nil {
				cuts[now] = map[string]bool{}
			}
			cuts[now][r.GetMemberId()] = true
		}
	}
	apart := 0
	for now, members := range cuts {
		if now > 60 {
			require.Len(t, members, len(started), "second %v", now)
		} else {
			apart++
		}
	}
	require.LessOrEqual(t, apart, 4)
	require.Len(t, cuts, apart+5, "a cut every 30 s")
}
