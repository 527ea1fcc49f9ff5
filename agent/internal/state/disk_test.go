package state_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const minFree = state.DefaultMinFreeBytes

// smallDisk is a store on a file system of its own.
type smallDisk struct {
	t       *testing.T
	m       *mesh
	dir     string
	options state.Options
}

func newSmallDisk(t *testing.T) *smallDisk {
	t.Helper()
	skip.Root(t, "mounts")
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	return &smallDisk{t: t, m: newMesh(t), dir: dir, options: state.Options{
		MinFreeBytes: minFree,
		CopyDir:      filepath.Join(t.TempDir(), "copy"),
	}}
}

// openWithoutReserve opens a store on a disk that never had space for the reserve file; little space is left.
func (d *smallDisk) openWithoutReserve() *state.Store {
	d.t.Helper()
	first, err := state.Open(filepath.Join(d.dir, "state"), d.options)
	require.NoError(d.t, err)
	require.NoError(d.t, first.Close())
	require.NoError(d.t, os.Remove(filepath.Join(d.dir, "state", "reserve")))
	d.fill(minFree + 1<<20)
	return d.open()
}

func (d *smallDisk) open() *state.Store {
	d.t.Helper()
	s, err := state.Open(filepath.Join(d.dir, "state"), d.options)
	require.NoError(d.t, err)
	d.t.Cleanup(func() { require.NoError(d.t, s.Close()) })
	require.NoError(d.t, d.m.resume(s))
	require.NoError(d.t, s.Identify(nodeID, protocol.NewEd25519Signer(d.m.node)))
	if !s.Bundle().Valid() {
		require.NoError(d.t, s.InitBundle(d.m.bundle))
	}
	return s
}

// fill leaves this many bytes free.
func (d *smallDisk) fill(left uint64) {
	d.t.Helper()
	var fs unix.Statfs_t
	require.NoError(d.t, unix.Statfs(d.dir, &fs))
	ballast, err := os.Create(d.ballast())
	require.NoError(d.t, err)
	require.NoError(d.t, unix.Fallocate(int(ballast.Fd()), 0, 0, int64(fs.Bavail*uint64(fs.Bsize)-left)))
	require.NoError(d.t, ballast.Close())
}

func (d *smallDisk) ballast() string { return filepath.Join(d.dir, "ballast") }

func (d *smallDisk) free() { require.NoError(d.t, os.Remove(d.ballast())) }

func stopped(member string, revision uint64) *protocol.Workload {
	w := workload(member, revision)
	w.Stopped = true
	return w
}

// A process that is killed on a full disk leaves the copy of its store in memory. The next one that finds space removes
// it.
func TestTheCopyOfAStoreGoesOnceThereIsSpace(t *testing.T) {
	d := newSmallDisk(t)
	require.NoError(t, d.open().Close())
	d.fill(0)
	require.NoError(t, d.open().Close())
	require.DirExists(t, d.options.CopyDir)
	d.free()
	d.open()
	require.NoDirExists(t, d.options.CopyDir)
}

func TestFullDiskTakesNothingNewAndLosesNothing(t *testing.T) {
	d := newSmallDisk(t)
	s := d.open()
	use(t, s, "a", "r1", 60)
	d.fill(0)
	require.ErrorContains(t, s.Full(), "Free some space")
	up := meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true}
	sample(t, s, noon.Add(2*time.Minute), up)
	require.ErrorContains(t, s.OpenRun(state.Run{ID: "r2", MemberID: "a", OpenedAt: noon}), "disk_full")
	require.ErrorContains(t, s.AcceptLeases(d.m.leases(s.Incarnation(), lease("a", 1))), "disk_full")
	v, parts := d.m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.Nil(t, s.Accepted().Parts[0].Workload, "its document is fetched once there is space")
	require.ErrorContains(t, s.AcceptPart(parts[0]), "disk_full")
	_, err := state.Open(filepath.Join(d.dir, "other"), d.options)
	require.True(t, fault.Is(err, fault.Unavailable))
	require.ErrorContains(t, err, "Free some space")

	d.free()
	require.NoError(t, s.AcceptPart(parts[0]))
	sample(t, s, noon.Add(3*time.Minute), up)
	seconds, _ := sealedSeconds(t, s, d.m)
	require.InDelta(t, 180, seconds, 0)
	require.NoError(t, s.Close())
	s = d.open()
	seconds, _ = sealedSeconds(t, s, d.m)
	require.InDelta(t, 180, seconds, 0, "what was measured on the full disk is durable")
}

// A disk without inodes takes nothing new, either; what runs is measured and may end.
func TestDiskWithoutInodesTakesNothingNewAndLosesNothing(t *testing.T) {
	d := newSmallDisk(t)
	require.NoError(t, unix.Mount("tmpfs", d.dir, "tmpfs", unix.MS_REMOUNT, "size=256m,nr_inodes=2048"))
	s := d.open()
	use(t, s, "a", "r1", 60)
	require.NoError(t, s.Full())
	many := filepath.Join(d.dir, "many")
	require.NoError(t, os.Mkdir(many, 0o700))
	for i := range 1200 {
		require.NoError(t, os.WriteFile(filepath.Join(many, strconv.Itoa(i)), nil, 0o600))
	}
	require.ErrorContains(t, s.Full(), "free inodes")
	require.ErrorContains(t, s.OpenRun(state.Run{ID: "r2", MemberID: "a", OpenedAt: noon}), "disk_full")
	sample(t, s, noon.Add(2*time.Minute), meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true})
	require.NoError(t, s.UpdateRun("r1", func(r *state.Run) { r.StopRequested = true }))
	require.NoError(t, os.RemoveAll(many))
	require.NoError(t, s.OpenRun(state.Run{ID: "r2", MemberID: "a", OpenedAt: noon}))
	seconds, _ := sealedSeconds(t, s, d.m)
	require.InDelta(t, 120, seconds, 0)
}

// One state stops a member and starts another. Neither a full disk nor the other one's launch keeps the stop
// away, and a restart on the disk that is still full forgets none of it.
func TestReleasingNeverWaitsForTheDisk(t *testing.T) {
	d := newSmallDisk(t)
	s := d.open()
	v, parts := d.m.desired(1, workload("a", 1), workload("b", 1), workload("c", 1))
	require.NoError(t, s.AcceptState(v, parts))
	for _, member := range []string{"a", "b", "c"} {
		use(t, s, member, "run-"+member, 60)
	}
	d.fill(0)

	v, parts = d.m.desired(2, stopped("b", 2), workload("c", 1), workload("new", 1))
	require.NoError(t, s.AcceptState(v, parts))
	ended := noon.Add(90 * time.Second)
	for _, run := range []string{"run-a", "run-b"} {
		require.NoError(t, s.UpdateRun(run, func(r *state.Run) { r.StopRequested = true }))
	}
	sample(t, s, noon.Add(100*time.Second),
		meter.Run{RunID: "run-a", MemberID: "a", StartedAt: noon, ExitedAt: ended},
		meter.Run{RunID: "run-b", MemberID: "b", StartedAt: noon, ExitedAt: ended},
		meter.Run{RunID: "run-c", MemberID: "c", StartedAt: noon, Up: true})
	require.NoError(t, s.UpdateRun("run-b", func(r *state.Run) { r.ExitRecorded = true }))
	require.NoError(t, s.CloseRun("run-a"))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), ended))

	check := func(why string) {
		t.Helper()
		accepted := s.Accepted()
		require.Equal(t, uint64(2), accepted.Generation, why)
		require.Len(t, accepted.Parts, 3, why)
		require.True(t, accepted.Parts[0].Workload.GetStopped(), why)
		require.Nil(t, accepted.Parts[2].Workload, "%s: nothing is started from a full disk", why)
		require.True(t, s.Runs()["run-b"].StopRequested && s.Runs()["run-b"].ExitRecorded, why)
		require.NotContains(t, s.Runs(), "run-a", why)
		require.NotNil(t, s.Members()["a"].Removal, why)
		require.True(t, s.Measured("run-b"), why)
		require.False(t, s.Measured("run-c"), why)
		seconds, _ := sealedSeconds(t, s, d.m)
		require.InDelta(t, 90+90+60, seconds, 40, why)
		older, oldParts := d.m.desired(1, workload("a", 1), workload("b", 1), workload("c", 1))
		require.Error(t, s.AcceptState(older, oldParts), "%s: never backwards", why)
	}
	check("on the full disk")
	require.NoError(t, s.Close())
	s = d.open()
	check("after a restart on the full disk")
	require.NoError(t, s.UpdateMember("b", func(m *state.Member) { m.ExitCode = 7 }))
	require.NoError(t, s.Close())

	d.free()
	s = d.open()
	check("with space again")
	require.Equal(t, int32(7), s.Members()["b"].ExitCode)
	sample(t, s, noon.Add(2*time.Minute), meter.Run{RunID: "run-c", MemberID: "c", StartedAt: noon, Up: true})
	require.NoError(t, s.Close())
	require.NoError(t, os.Remove(filepath.Join(d.dir, "state", "reserve")))
	s = d.open()
	check("without the reserve file, whose changes are in the database by now")
}

// Where there was never space for the reserve file, a state that ends something is in force although it cannot be
// stored; the hub learns that it is not, and no older one is accepted afterwards.
func TestStateThatCannotBeStoredIsInForceAndNotAcknowledged(t *testing.T) {
	d := newSmallDisk(t)
	s := d.openWithoutReserve()
	v, parts := d.m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	d.free()
	d.fill(0)
	changed := s.Subscribe()

	v, parts = d.m.desired(2)
	err := s.AcceptState(v, parts)
	require.Equal(t, protocol.Nack_UNAVAILABLE, protocol.RefusalOf(err))
	require.True(t, woken(changed))
	require.Empty(t, s.Accepted().Parts)
	older, oldParts := d.m.desired(1, workload("a", 1))
	require.Equal(t, protocol.Nack_GENERATION_OLDER, protocol.RefusalOf(s.AcceptState(older, oldParts)))

	d.free()
	require.NoError(t, s.AcceptState(v, parts), "the hub offers it again")
	require.NoError(t, s.Close())
	s = d.open()
	require.Equal(t, uint64(2), s.Accepted().Generation)
}

// Law 3: an agent that is killed before the state has space on the disk goes on with the one before it. The file beside
// the database must not vouch for a state that the next start cannot find.
func TestAStateThatWasNeverStoredLeavesTheOneBeforeItInForce(t *testing.T) {
	d := newSmallDisk(t)
	s := d.openWithoutReserve()
	v, parts := d.m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	d.free()
	d.fill(0)
	v, parts = d.m.desired(2, workload("a", 1))
	require.Equal(t, protocol.Nack_UNAVAILABLE, protocol.RefusalOf(s.AcceptState(v, parts)))
	require.Equal(t, uint64(2), s.Accepted().Generation)
	require.NoError(t, s.Close())

	s = d.open()
	require.Empty(t, s.Unverified())
	require.Equal(t, uint64(1), s.Accepted().Generation)
	require.NotNil(t, s.Accepted().Parts[0].Workload)
}

// A container ends while the same sample finds one that nobody announced: its last usage needs no space either.
func TestAnExitIsMeasuredOnAFullDiskWhateverElseIsFound(t *testing.T) {
	d := newSmallDisk(t)
	s := d.openWithoutReserve()
	use(t, s, "a", "r1", 60)
	d.free()
	d.fill(0)
	up := meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true}
	require.ErrorContains(t, s.SaveSample(meter.Observation{At: noon.Add(2 * time.Minute), Runs: []meter.Run{up}},
		clock.Stamp{At: noon}), "disk_full")
	sample(t, s, noon.Add(2*time.Minute),
		meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, ExitedAt: noon.Add(90 * time.Second)},
		meter.Run{RunID: "r2", MemberID: "b", StartedAt: noon.Add(time.Minute), Up: true})
	require.True(t, s.Measured("r1"))
}

// The cap of a lease counts a second once, however often a full disk refuses the sample that holds it: otherwise the
// workload would end before its lease.
func TestLaw03UsageThatCannotBeStoredIsNotConsumed(t *testing.T) {
	d := newSmallDisk(t)
	s := d.openWithoutReserve()
	use(t, s, "a", "r1", 60)
	before := s.Consumed("a")
	require.Positive(t, before[protocol.MeterSessionSeconds])
	d.free()
	d.fill(0)
	up := meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true}
	for range 3 {
		require.ErrorContains(t, s.SaveSample(meter.Observation{At: noon.Add(2 * time.Minute), Runs: []meter.Run{up}},
			clock.Stamp{At: noon}), "disk_full")
		require.Equal(t, before, s.Consumed("a"))
	}
	d.free()
	sample(t, s, noon.Add(2*time.Minute), up)
	require.Equal(t, (2 * time.Minute).Microseconds(), s.Consumed("a")[protocol.MeterSessionSeconds])
}

// Usage that is measured on a full disk takes half of the reserve file at most: what ends something is durable however
// long the disk is full.
func TestUsageOnAFullDiskLeavesRoomForWhatEnds(t *testing.T) {
	d := newSmallDisk(t)
	s := d.open()
	const runs = 300
	up := make([]meter.Run, runs)
	for i := range up {
		id := fmt.Sprintf("4a3c1f62-9d0e-4c57-8d4e-%012d", i)
		up[i] = meter.Run{RunID: id + ".0123456789ab", MemberID: id, StartedAt: noon, Up: true}
		require.NoError(t, s.OpenRun(state.Run{ID: up[i].RunID, MemberID: id, OpenedAt: noon}))
	}
	sample(t, s, noon, up...)
	d.fill(0)
	var refused error
	for at := noon; refused == nil; {
		at = at.Add(5 * time.Minute)
		require.Less(t, at.Sub(noon), 100*24*time.Hour, "usage takes no space of the reserve")
		refused = s.SaveSample(meter.Observation{At: at, Runs: up}, clock.Stamp{At: at})
	}
	require.ErrorContains(t, refused, "disk_full")
	large := strings.Repeat("x", 2<<20)
	require.NoError(t, s.UpdateMember(up[0].MemberID, func(m *state.Member) { m.Detail = large }))
	require.NoError(t, s.Close())
	s = d.open()
	require.Equal(t, len(large), len(s.Members()[up[0].MemberID].Detail)) //nolint:testifylint // Len would print it
}

// After a restart on the full disk the store knows what it sealed before: it counts as unsent, and its space is given
// back once the hub has archived it.
func TestUsageFromBeforeAFullDiskIsKnownAfterARestart(t *testing.T) {
	d := newSmallDisk(t)
	s := d.open()
	use(t, s, "a", "r1", 60)
	before := s.Spool()
	require.Positive(t, before.LastSegment)
	d.fill(0)
	sample(t, s, noon.Add(2*time.Minute), meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true})
	full := s.Spool()
	require.Greater(t, full.LastSegment, before.LastSegment)
	require.Greater(t, full.UnsentBytes, before.UnsentBytes)
	require.NoError(t, s.Close())
	s = d.open()
	require.Equal(t, full, s.Spool())
	d.free()
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{
		Incarnation: s.Incarnation(), Posted: full.LastSegment, Archived: full.LastSegment,
	}))
	for number := uint64(1); number <= full.LastSegment; number++ {
		_, err := s.Segment(number)
		require.Error(t, err, "segment %d is archived, so forgotten", number)
	}
}

func TestTornWriteOfTheReserveLeavesTheChangesBeforeIt(t *testing.T) {
	d := newSmallDisk(t)
	s := d.open()
	use(t, s, "a", "r1", 10)
	d.fill(0)
	reserve := filepath.Join(d.dir, "state", "reserve")
	for code := range int32(6) {
		require.NoError(t, s.UpdateMember("a", func(m *state.Member) { m.ExitCode = code }))
		require.NoError(t, s.Close())
		raw, err := os.ReadFile(reserve)
		require.NoError(t, err)
		for _, slot := range []int{0, len(raw) / 2} { // one of them is the newest
			torn := slices.Clone(raw)
			torn[slot+100] ^= 1
			require.NoError(t, os.WriteFile(reserve, torn, 0o600))
			s = d.open()
			require.Contains(t, []int32{max(code-1, 0), code}, s.Members()["a"].ExitCode)
			require.NoError(t, s.Close())
		}
		require.NoError(t, os.WriteFile(reserve, raw, 0o600))
		s = d.open()
	}
}

// A busy node measures a hundred containers for six hours. Its hub acknowledges usage, as hubs do.
func TestStoreOfABusyNodeStaysSmall(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	const runs, hours = 100, 6
	var up []meter.Run
	for i := range runs {
		r := state.Run{
			ID:       fmt.Sprintf("4a3c1f62-9d0e-4c57-8d4e-%012d.0123456789ab", i),
			MemberID: fmt.Sprintf("4a3c1f62-9d0e-4c57-8d4e-%012d", i), OpenedAt: noon,
		}
		require.NoError(t, s.OpenRun(r))
		up = append(up, meter.Run{
			RunID: r.ID, MemberID: r.MemberID, Revision: 1, LeaseNo: 1, StartedAt: noon, Up: true,
			Sampled: true,
		})
	}
	for tick := range hours * 360 {
		at := noon.Add(time.Duration(tick) * 10 * time.Second)
		for i := range up {
			up[i].CPUMicros += rand.Int64N(10e6)
			up[i].MemoryBytes = 1<<30 + rand.Int64N(1<<30)
		}
		sample(t, s, at, up...)
		if tick%360 == 359 {
			last := s.Spool().LastSegment
			require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: last, Archived: last}))
			require.NoError(t, s.CollectGarbage())
		}
	}
	t.Logf("the store takes %d KiB", allocated(t, dir)>>10)
	require.Less(t, allocated(t, dir), int64(64<<20))
	require.NoError(t, s.Oversized())
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	require.False(t, s.Measured(up[0].RunID))
	sample(t, s, noon.Add(hours*time.Hour+time.Minute))
	require.True(t, s.Measured(up[0].RunID), "what was written in pieces is read as a whole")
}

// Documents above the threshold lie in the value log, whose files go only after the tables were merged.
func TestOverwrittenValuesGiveTheirSpaceBack(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	junk := make([]byte, 500<<10)
	for generation := range uint64(160) {
		w := workload("a", generation+1)
		for i := range junk {
			junk[i] = byte('a' + rand.IntN(26))
		}
		w.ParametersJson = string(junk)
		v, parts := m.desired(generation+1, w)
		require.NoError(t, s.AcceptState(v, parts))
		// What else a node writes meanwhile fills the tables.
		require.NoError(t, s.UpdateMember("m", func(m *state.Member) { m.Detail = strings.Repeat(string(junk[:100]), 2000) }))
	}
	before := allocated(t, dir)
	require.Greater(t, before, int64(80<<20), "the test writes what has to go")
	require.NoError(t, s.CollectGarbage())
	require.Less(t, allocated(t, dir), before/2)
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	require.Equal(t, string(junk), s.Accepted().Parts[0].Workload.GetParametersJson())
}

func allocated(t *testing.T, dir string) (total int64) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		var st unix.Stat_t
		require.NoError(t, err)
		if err := unix.Lstat(path, &st); errors.Is(err, unix.ENOENT) {
			return nil // Badger has removed it meanwhile
		}
		require.NoError(t, err)
		total += st.Blocks * 512
		return nil
	}))
	return total
}
