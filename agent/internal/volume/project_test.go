package volume_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/host"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func project(id string) *protocol.ProjectVolume {
	return &protocol.ProjectVolume{Id: id, ProjectId: "p1", SizeBytes: 32 * mib}
}

// inUse says that every member still uses the volume.
func inUse(string) bool { return true }

// apply requires that nothing failed.
func (f *fixture) apply(p *protocol.ProjectVolume) *protocol.VolumeStatus {
	f.t.Helper()
	s := f.v.Apply(f.t.Context(), p, inUse)
	require.Empty(f.t, s.GetReason(), s.GetDetail())
	return s
}

// usesProject is a member that mounts the project's volume.
func usesProject(member, id string, readOnly bool) volume.Use {
	return volume.Use{MemberID: member, Name: "data", VolumeID: id, ProjectID: "p1", ReadOnly: readOnly}
}

func TestProjectVolumeOutlivesItsMembersAndHasOneWriter(t *testing.T) {
	f := newFixture(t)
	_, err := f.v.Prepare(t.Context(), usesProject("m1", "v1", false))
	require.Equal(t, agent.CodeVolumeNotReady, fault.As(err).Code, "only the state makes it")
	require.Equal(t, protocol.VolumeStatus_READY, f.apply(project("v1")).GetStatus())
	f.write(f.prepare(usesProject("m1", "v1", false)), "models")
	_, err = f.v.Prepare(t.Context(), usesProject("m2", "v1", false))
	require.True(t, fault.Is(err, fault.Conflict))
	f.requireContent(f.prepare(usesProject("m3", "v1", true)), "models")
	stranger := usesProject("m9", "v1", true)
	stranger.ProjectID = "p2"
	_, err = f.v.Prepare(t.Context(), stranger)
	require.True(t, fault.Is(err, fault.Forbidden))
	f.prepare(use(1))
	stranger = usesProject("m9", "m1.data", true)
	stranger.ProjectID = ""
	_, err = f.v.Prepare(t.Context(), stranger)
	require.True(t, fault.Is(err, fault.Forbidden), "a volume of an instance is no project's, not even of none")

	deleted := project("v1")
	deleted.Deleted = true
	s := f.v.Apply(t.Context(), deleted, inUse)
	require.Equal(t, protocol.VolumeStatus_PENDING, s.GetStatus())
	require.Equal(t, string(agent.CodeVolumeInUse), s.GetReason())
	require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
	left, err := f.v.Leftovers("m1")
	require.NoError(t, err)
	require.Empty(t, left)
	f.requireContent(f.prepare(usesProject("m2", "v1", false)), "models")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m2"))
	s = f.v.Apply(t.Context(), deleted, inUse)
	require.Equal(t, string(agent.CodeVolumeInUse), s.GetReason(), "one that only reads has it, and is stopped")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m3"))
	f.requireContent(f.prepare(usesProject("m4", "v1", false)), "models")
	f.prepare(usesProject("m4", "v1", true)) // an upgrade that only reads
	f.prepare(usesProject("m5", "v1", false))
	require.NoError(t, f.v.RemoveMember(t.Context(), "m4"))
	require.NoError(t, f.v.RemoveMember(t.Context(), "m5"))
	for range 2 {
		require.Equal(t, protocol.VolumeStatus_DELETED, f.apply(deleted).GetStatus())
	}
	require.Empty(t, glob(t, f.cfg.Dir+"/*"))
}

// A version without the volume gives it up, although the member goes on.
func TestAProjectVolumeLeavesMembersThatDoNotUseIt(t *testing.T) {
	f := newFixture(t)
	f.apply(project("v1"))
	f.write(f.prepare(usesProject("m1", "v1", false)), "models")
	f.prepare(usesProject("m2", "v1", true))
	require.NoError(t, f.v.Detach(t.Context(), "m1")) // its container has ended
	onlyReads := func(memberID string) bool { return memberID == "m2" }
	require.Equal(t, protocol.VolumeStatus_READY, f.v.Apply(t.Context(), project("v1"), onlyReads).GetStatus())
	f.requireContent(f.prepare(usesProject("m3", "v1", false)), "models")
	_, err := f.v.Prepare(t.Context(), usesProject("m1", "v1", false))
	require.Equal(t, agent.CodeVolumeInUse, fault.As(err).Code)

	deleted := project("v1")
	deleted.Deleted = true
	require.Equal(t, string(agent.CodeVolumeInUse), f.v.Apply(t.Context(), deleted, onlyReads).GetReason())
	nobody := func(string) bool { return false }
	require.Equal(t, protocol.VolumeStatus_DELETED, f.v.Apply(t.Context(), deleted, nobody).GetStatus())
}

func TestAProjectVolumeThatWasThereIsNotMadeAnew(t *testing.T) {
	f := newFixture(t)
	made := project("v1")
	made.Made = true
	require.Equal(t, protocol.VolumeStatus_MISSING, f.apply(made).GetStatus())
	require.Empty(t, glob(t, f.cfg.Dir+"/*"))
	foreign := project("v2")
	f.apply(foreign)
	foreign.ProjectId = "p2"
	require.Equal(t, protocol.VolumeStatus_PENDING, f.v.Apply(t.Context(), foreign, inUse).GetStatus())
	path := project("../v3")
	require.Equal(t, "bad_volume", f.v.Apply(t.Context(), path, inUse).GetReason())
	huge := project("v4")
	huge.SizeBytes = 1 << 50
	require.Equal(t, string(agent.CodeVolumeNoSpace), f.v.Apply(t.Context(), huge, inUse).GetReason())
}

func TestASnapshotIsTakenOnceAndRestoredOnce(t *testing.T) {
	f := newFixture(t)
	none := project("v0")
	none.Snapshots = []*protocol.VolumeSnapshot{{Id: "s0", Deleted: true}}
	require.Equal(t, protocol.VolumeStatus_DELETED, f.apply(none).GetSnapshots()[0].GetStatus(), "it was never taken")
	p := project("v1")
	f.apply(p)
	dir := f.prepare(usesProject("m1", "v1", false))
	f.write(dir, "before")
	p.Made = true
	p.Snapshots = []*protocol.VolumeSnapshot{{Id: "s1"}}
	s := f.apply(p) // of a mounted file system
	require.Equal(t, protocol.VolumeStatus_READY, s.GetSnapshots()[0].GetStatus())
	require.EqualValues(t, 32*mib, s.GetSnapshots()[0].GetSizeBytes())
	f.write(dir, "after")
	f.apply(p)
	unnamed := proto.CloneOf(p)
	unnamed.Snapshots = nil
	require.True(t, proto.Equal(s.GetSnapshots()[0], f.apply(unnamed).GetSnapshots()[0]),
		"a restored hub may ask for none")
	f.requireContent(dir, "after")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))

	p.RestoreNo, p.RestoreSnapshotId = 1, "s1"
	require.EqualValues(t, 1, f.apply(p).GetRestoreNo())
	dir = f.prepare(usesProject("m2", "v1", false))
	f.requireContent(dir, "before")
	f.write(dir, "again")
	f.apply(p)
	f.requireContent(dir, "again")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m2"))

	p.SizeBytes = 64 * mib
	require.EqualValues(t, 64*mib, f.apply(p).GetSizeBytes(), "a volume that nothing uses grows")
	p.SizeBytes = 16 * mib
	require.EqualValues(t, 64*mib, f.apply(p).GetSizeBytes(), "it never shrinks")
	p.SizeBytes, p.RestoreNo = 64*mib, 2
	s = f.apply(p)
	require.EqualValues(t, 64*mib, s.GetSizeBytes(), "a smaller snapshot grows with its volume")
	dir = f.prepare(usesProject("m3", "v1", false))
	f.requireContent(dir, "before")
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	require.Greater(t, st.Blocks*uint64(st.Bsize), uint64(48*mib), "and its file system with it")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m3"))
	p.Snapshots[0].Deleted = true
	require.Equal(t, protocol.VolumeStatus_DELETED, f.apply(p).GetSnapshots()[0].GetStatus())
	require.Empty(t, glob(t, f.cfg.Dir+"/v1/snapshots/*"))
	p.RestoreNo = 3
	require.NotEmpty(t, f.v.Apply(t.Context(), p, inUse).GetReason())
	f.requireContent(f.prepare(usesProject("m4", "v1", false)), "before")
}

// The hub asks for a restore once, and starts containers on the volume when the node has reported it.
func TestLaw13ARestoreThatFailedIsDoneOnceNothingIsInItsWay(t *testing.T) {
	f := newFixture(t)
	p := project("v1")
	f.apply(p)
	dir := f.prepare(usesProject("m1", "v1", false))
	f.write(dir, "before")
	p.Made, p.Snapshots = true, []*protocol.VolumeSnapshot{{Id: "s1"}}
	f.apply(p)
	f.write(dir, "after")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))

	inTheWay := filepath.Join(f.cfg.Dir, "v1", "data.img.unfinished")
	require.NoError(t, os.MkdirAll(filepath.Join(inTheWay, "x"), 0o700))
	p.RestoreNo, p.RestoreSnapshotId = 1, "s1"
	s := f.v.Apply(t.Context(), p, inUse)
	require.NotEmpty(t, s.GetReason())
	require.Zero(t, s.GetRestoreNo())
	require.NoError(t, os.RemoveAll(inTheWay))
	f.v = f.open()
	require.EqualValues(t, 1, f.apply(p).GetRestoreNo())
	f.requireContent(f.prepare(usesProject("m2", "v1", false)), "before")
}

// The agent was killed once a growth had reserved the space. The next one takes a snapshot first.
func TestASnapshotBetweenTheStepsOfAGrowthIsRestoredInFull(t *testing.T) {
	f := newFixture(t)
	p := project("v1")
	f.apply(p)
	require.NoError(t, os.Truncate(filepath.Join(f.cfg.Dir, "v1", "data.img"), 128*mib))
	p.Made, p.SizeBytes, p.Snapshots = true, 128*mib, []*protocol.VolumeSnapshot{{Id: "s1"}}
	require.EqualValues(t, 128*mib, f.apply(p).GetSizeBytes())
	p.RestoreNo, p.RestoreSnapshotId = 1, "s1"
	require.EqualValues(t, 128*mib, f.apply(p).GetSizeBytes())
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(f.prepare(usesProject("m1", "v1", false)), &st))
	require.Greater(t, st.Blocks*uint64(st.Bsize), uint64(100*mib))
}

// A snapshot for which something is in the way is tried again; the others are taken, and the volume grows meanwhile.
func TestASnapshotThatFailsKeepsNothingElseFromBeingDone(t *testing.T) {
	f := newFixture(t)
	p := project("v1")
	f.apply(p)
	inTheWay := filepath.Join(f.cfg.Dir, "v1", "snapshots", "s1.unfinished")
	require.NoError(t, os.MkdirAll(filepath.Join(inTheWay, "x"), 0o700))
	p.Snapshots = []*protocol.VolumeSnapshot{{Id: "s1"}, {Id: "s2"}}
	p.SizeBytes = 64 * mib
	s := f.v.Apply(t.Context(), p, inUse)
	require.NotEmpty(t, s.GetReason())
	require.Len(t, s.GetSnapshots(), 2)
	require.Equal(t, protocol.VolumeStatus_PENDING, s.GetSnapshots()[0].GetStatus())
	require.Equal(t, protocol.VolumeStatus_READY, s.GetSnapshots()[1].GetStatus())
	require.EqualValues(t, 64*mib, s.GetSizeBytes())
	require.NoError(t, os.RemoveAll(inTheWay))
	require.Equal(t, protocol.VolumeStatus_READY, f.apply(p).GetSnapshots()[0].GetStatus())
}

// A volume grows while containers use it, and those see it at once.
func TestAVolumeInUseGrows(t *testing.T) {
	f := newFixture(t)
	p := project("v1")
	f.apply(p)
	dir := f.prepare(usesProject("m1", "v1", false))
	f.write(dir, "kept")
	held, err := os.Open(dir)
	require.NoError(t, err)
	size := func() uint64 {
		var st unix.Statfs_t
		require.NoError(t, unix.Fstatfs(int(held.Fd()), &st))
		return st.Blocks * uint64(st.Bsize)
	}
	require.Less(t, size(), uint64(32*mib))
	p.SizeBytes = 128 * mib
	if !host.HasCapability(unix.CAP_SYS_RESOURCE) {
		require.Equal(t, string(agent.CodeVolumeInUse), f.v.Apply(t.Context(), p, inUse).GetReason())
		require.NoError(t, held.Close())
		require.NoError(t, f.v.Detach(t.Context(), "m1"))
		require.EqualValues(t, 128*mib, f.apply(p).GetSizeBytes(), "a stopped member keeps it from nothing")
		f.requireContent(f.prepare(usesProject("m1", "v1", false)), "kept")
		skip.Except(t, skip.NoResize, "")
	}
	defer func() { require.NoError(t, held.Close()) }()
	require.EqualValues(t, 128*mib, f.apply(p).GetSizeBytes())
	require.Greater(t, size(), uint64(100*mib))
	f.requireContent(dir, "kept")
	p.SizeBytes = 1 << 50
	require.Equal(t, string(agent.CodeVolumeNoSpace), f.v.Apply(t.Context(), p, inUse).GetReason())
	f.requireContent(dir, "kept")
}

const projectChildEnv = "GPUAAS_TEST_PROJECT_VOLUME_CHILD"

// TestKilledAtAnyMomentAProjectVolumeIsWhole kills a process that makes, snapshots, restores and deletes volumes.
func TestKilledAtAnyMomentAProjectVolumeIsWhole(t *testing.T) {
	if dir := os.Getenv(projectChildEnv); dir != "" {
		restoreForever(t, dir)
	}
	f := newFixture(t)
	f.apply(project("kept"))
	f.write(f.prepare(usesProject("m1", "kept", false)), "first")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
	kept := project("kept")
	kept.Made, kept.Snapshots = true, []*protocol.VolumeSnapshot{{Id: "s1"}}
	f.apply(kept)
	for round := range 12 {
		f.runUntilKilled(projectChildEnv, time.Duration(20+23*round)*time.Millisecond)
		f.v = f.open()
		require.Empty(t, glob(t, f.cfg.Dir+"/.*-*"))
		require.Empty(t, glob(t, f.cfg.Dir+"/*/*.unfinished"))
		f.requireContent(f.prepare(usesProject("m1", "kept", false)), "first")
		require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
		other := project("other")
		f.apply(other)
		other.Deleted = true
		f.apply(other)
	}
}

func restoreForever(t *testing.T, dir string) {
	f := &fixture{t: t, cfg: volume.Config{
		Dir: filepath.Join(dir, "volumes"), MountDir: filepath.Join(dir, "mounts"), ReserveBytes: 64 * mib,
	}}
	f.v = f.open()
	kept := project("kept")
	kept.Made, kept.RestoreSnapshotId = true, "s1"
	for n := f.apply(kept).GetRestoreNo(); ; n++ {
		kept.RestoreNo = n + 1
		snapshot := &protocol.VolumeSnapshot{Id: "t" + strconv.FormatUint(n, 10)}
		kept.Snapshots = []*protocol.VolumeSnapshot{snapshot}
		f.apply(kept)
		snapshot.Deleted = true
		f.apply(kept)
		other := project("other")
		f.apply(other)
		other.Deleted = true
		f.apply(other)
	}
}
