package state_test

import (
	"crypto/sha256"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/agent/spool/spooltest"
	"github.com/gpuaas/gpuaas/protocol"
)

// use makes a container of a run up for the given seconds after noon, one sample each ten seconds.
func use(t testing.TB, s *state.Store, member, run string, seconds int) {
	t.Helper()
	require.NoError(t, s.OpenRun(state.Run{ID: run, MemberID: member, OpenedAt: noon}))
	for at := 0; at <= seconds; at += 10 {
		sample(t, s, noon.Add(time.Duration(at)*time.Second), meter.Run{
			RunID: run, MemberID: member, StartedAt: noon,
			Up: true,
		})
	}
}

func sample(t testing.TB, s *state.Store, at time.Time, runs ...meter.Run) {
	t.Helper()
	require.NoError(t, s.SaveSample(meter.Observation{At: at, Runs: runs}, clock.Stamp{At: at}))
}

// sealedSeconds walks the chain of this incarnation as a hub would.
func sealedSeconds(t testing.TB, s *state.Store, m *mesh) (seconds float64, last *protocol.UsageRecord) {
	t.Helper()
	chain := spool.Chain{NodeID: nodeID, Incarnation: s.Incarnation()}
	for number := s.Spool().Marks.Posted + 1; ; number++ {
		env, err := s.Segment(number)
		require.NoError(t, err)
		if env == nil {
			return seconds, last
		}
		_, err = protocol.VerifySegment(env, pub(m.node))
		require.NoError(t, err)
		seg, next, err := spooltest.VerifyNext(chain, env.GetPayload())
		require.NoError(t, err)
		chain = next
		for _, r := range seg.GetRecords() {
			last = r
			if r.GetMeter() == protocol.MeterSessionSeconds {
				seconds += float64(r.GetQuantity()) / 1e6
			}
		}
	}
}

func TestUsageIsChainedAndPrunedWhenArchived(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	use(t, s, "a", "r1", 120)
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 120, seconds, 0)
	require.EqualValues(t, 120_000_000, s.Consumed("a")[protocol.MeterSessionSeconds])
	require.Positive(t, s.Spool().UnsentBytes)

	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: 2, Archived: 1}))
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: "another-life", Posted: 99, Archived: 99}))
	require.Error(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: 99, Archived: 99}),
		"the hub cannot know more than was sealed")
	env, err := s.Segment(3)
	require.NoError(t, err)
	require.NotNil(t, env)
	_, err = s.Segment(1)
	require.Error(t, err, "archived, so forgotten")
	require.NoError(t, s.Close())

	s = open(t, dir, m)
	require.Equal(t, spool.Marks{Posted: 2, Archived: 1}, s.Spool().Marks)
	before := s.Spool().UnsentBytes
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{
		Incarnation: s.Incarnation(), Posted: s.Spool().LastSegment,
		Archived: s.Spool().LastSegment,
	}))
	require.Positive(t, before)
	require.Zero(t, s.Spool().UnsentBytes)
	env, err = s.Segment(s.Spool().LastSegment + 1)
	require.NoError(t, err)
	require.Nil(t, env)
}

// renew gives the store a new incarnation, and returns what is lost.
func renew(t testing.TB, s *state.Store) []uint64 {
	t.Helper()
	lost, err := s.TakeNewIncarnation(noon.Add(time.Hour))
	require.NoError(t, err)
	return lost
}

// A disk that gives one segment no more keeps no other from the hub.
func TestASegmentThatCannotBeReadIsLeftOut(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	use(t, s, "a", "r1", 120)
	require.EqualValues(t, 4, s.Spool().LastSegment)
	require.NoError(t, s.Lose("segment/"+s.Incarnation(), 1))
	_, err := s.Segment(2)
	require.ErrorIs(t, err, state.ErrUnreadable)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{
		Incarnation: s.Incarnation(), Posted: 2, PostedSHA256: []byte("of what the disk has lost"),
	}))
	require.NoError(t, s.RewindUsage(0))
	require.Equal(t, []uint64{2}, renew(t, s))
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 90, seconds, 0, "without the thirty of the second")
}

func TestNewIncarnationKeepsWhatIsNotArchived(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	old := s.Incarnation()
	use(t, s, "a", "r1", 120)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: old, Posted: 2, Archived: 1}))
	renew(t, s)
	require.NotEqual(t, old, s.Incarnation())
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 90, seconds, 0, "the first thirty seconds are archived under the old name")
	require.EqualValues(t, 120_000_000, s.Consumed("a")[protocol.MeterSessionSeconds])
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	seconds, _ = sealedSeconds(t, s, m)
	require.InDelta(t, 90, seconds, 0)
	sample(t, s, noon.Add(160*time.Second), meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true})
	seconds, _ = sealedSeconds(t, s, m)
	require.InDelta(t, 130, seconds, 0)
}

// What a node measured in days without the hub is sealed again a segment at a time, and in as few as it was.
func TestANewIncarnationFillsItsSegments(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	const records = 3 // of each run at each sample: its time, processor time and memory
	runs := make([]meter.Run, 500)
	for i := range runs {
		id := fmt.Sprintf("r%d", i)
		runs[i] = meter.Run{RunID: id, MemberID: "m" + id, StartedAt: noon, Up: true}
	}
	for i := range 7 {
		sample(t, s, noon.Add(time.Duration(i)*30*time.Second), runs...)
	}
	require.EqualValues(t, 6, s.Spool().LastSegment)
	renew(t, s)
	require.EqualValues(t, (6*records*len(runs)+spool.MaxSegmentRecords-1)/spool.MaxSegmentRecords, s.Spool().LastSegment)
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, len(runs)*180, seconds, 0)
}

// A copy of the disk is put back after the node has gone on, and goes on itself: it seals other segments under the
// numbers that the hub has posted. It notices by their content, and keeps all that is not posted of its own.
func TestLaw05StoreThatWentOnFromAnOlderCopyNoticesAndKeepsItsUsage(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	run := meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true}
	use(t, s, "a", "r1", 60)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: 1}))
	posted := s.Spool().LastSegment
	require.NoError(t, s.Close())
	copied := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, os.CopyFS(copied, os.DirFS(dir)))

	s = open(t, dir, m)
	sample(t, s, noon.Add(100*time.Second), run)
	hub, err := s.Segment(posted + 1)
	require.NoError(t, err)
	require.NotNil(t, hub)
	said := spool.HubProgress{Incarnation: s.Incarnation(), Posted: posted + 1, PostedSHA256: payloadSum(hub)}
	require.NoError(t, s.AcknowledgeUsage(said))
	require.Equal(t, posted+1, s.Spool().Marks.Posted)

	back := open(t, copied, m)
	for at := 70; at <= 200; at += 10 {
		sample(t, back, noon.Add(time.Duration(at)*time.Second), run)
	}
	require.Greater(t, back.Spool().LastSegment, said.Posted, "it has sealed more than the hub has posted")
	before := back.Spool()
	require.ErrorIs(t, back.AcknowledgeUsage(said), spool.ErrOtherStore)
	require.Equal(t, before, back.Spool(), "nothing counts as posted")
	renew(t, back)
	seconds, _ := sealedSeconds(t, back, m)
	_, last := sealedSeconds(t, back, m)
	require.InDelta(t, last.GetEndedAt().AsTime().Sub(noon).Seconds(), seconds, 0, "all that is not archived: the hub "+
		"bills each second once")
}

func payloadSum(env *protocol.Envelope) []byte {
	sum := sha256.Sum256(env.GetPayload())
	return sum[:]
}

// A spool that is full refuses leases and drops nothing: what runs is measured on, and room comes only from the hub.
func TestLaw05FullSpoolRefusesLeasesAndDropsNothing(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1, MaxUnsentBytes: 1000})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(m.node)))
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 1))))
	use(t, s, "a", "r1", 600)
	require.GreaterOrEqual(t, s.Spool().UnsentBytes, int64(1000))
	err = s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 2)))
	require.Equal(t, protocol.Nack_UNAVAILABLE, protocol.RefusalOf(err))
	require.ErrorContains(t, err, "spool is full")
	require.EqualValues(t, 1, s.Leases()["a"].GetLeaseNo(), "the lease that it has goes on")
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 600, seconds, 0)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: s.Spool().LastSegment}))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 2))))
}

// The agent may be killed after each sample; what it measures is the same as by one that goes on.
func TestLaw05AndLaw17ARestartBetweenSamplesChangesNoUsage(t *testing.T) {
	at := func(seconds int) time.Time { return noon.Add(time.Duration(seconds) * time.Second) }
	up := func(seconds, worked int) meter.Run {
		return meter.Run{
			RunID: "a.1", MemberID: "a", StartedAt: noon, Up: true, NeedsDevice: true, Accelerators: 1, WorkedAt: at(worked),
			Sampled: true, CPUMicros: int64(seconds) * 1e6, MemoryBytes: int64(seconds) << 20,
		}
	}
	failed, silent, exited, lost := up(20, 10), up(20, 15), up(30, 30), up(30, 30)
	failed.NoDevice = true
	silent.Up, silent.Unknown = false, true
	exited.Up, exited.ExitedAt = false, at(25)
	lost.Up, lost.Crashed = false, true
	type step struct {
		seconds int
		run     meter.Run
	}
	for name, test := range map[string]struct {
		steps  []step
		billed int64 // seconds
	}{
		"accelerators that failed work again": {[]step{
			{10, up(10, 10)}, {20, failed}, {3600, up(3600, 20)}, {3610, up(3610, 3605)}, {3700, up(3700, 3700)},
		}, 10 + 100},
		"a silent runtime tells of an exit": {[]step{{10, up(10, 10)}, {20, silent}, {30, exited}}, 10},
		"a power cut after a sample":        {[]step{{10, up(10, 10)}, {20, up(20, 15)}, {30, lost}}, 20},
	} {
		for way, restarts := range map[string]bool{"one agent": false, "restarts": true} {
			t.Run(name+"/"+way, func(t *testing.T) {
				m, dir := newMesh(t), t.TempDir()
				s := open(t, dir, m)
				require.NoError(t, s.OpenRun(state.Run{ID: "a.1", MemberID: "a", OpenedAt: noon}))
				for _, x := range test.steps {
					sample(t, s, at(x.seconds), x.run)
					if restarts {
						require.NoError(t, s.Close())
						s = open(t, dir, m)
					}
				}
				for _, name := range []string{protocol.MeterSessionSeconds, protocol.MeterAcceleratorSeconds} {
					require.Equal(t, test.billed*1e6, s.Consumed("a")[name], name)
				}
			})
		}
	}
}

// What a member has used of a meter stays the largest number once it is there: a negative one would count as unspent
// money of its lease.
func TestWhatAMemberHasUsedNeverTurnsNegative(t *testing.T) {
	s := open(t, t.TempDir(), newMesh(t))
	require.NoError(t, s.OpenRun(state.Run{ID: "r", MemberID: "a", OpenedAt: noon}))
	run := meter.Run{RunID: "r", MemberID: "a", StartedAt: noon, Up: true, Sampled: true, MemoryBytes: math.MaxInt64}
	for minutes := range 4 {
		sample(t, s, noon.Add(time.Duration(minutes)*time.Minute), run)
	}
	require.EqualValues(t, math.MaxInt64, s.Consumed("a")[protocol.MeterMemoryByteSeconds])
	require.Equal(t, (3 * time.Minute).Microseconds(), s.Consumed("a")[protocol.MeterSessionSeconds])
}
