package command_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// newVolumeWorld is a world with an allocation and version 2.0.0, which writes to the project's volume data; 2.1.0 only
// reads it.
func newVolumeWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.Allocation()
	for version, more := range map[string]string{"2.0.0": "", "2.1.0": ", read_only: true"} {
		doc := strings.Replace(commandtest.Manifest(), "version: 1.0.0", "version: "+version, 1)
		doc = strings.Replace(doc, "    ports:", "    volumes: [{name: data, path: /data, size_mib: {min: 16, default: 16, "+
			"max: 128}, scope: project"+more+"}]\n    ports:", 1)
		verified, env := w.Sign(doc)
		w.PublishVersion(version, verified, env)
	}
	return w
}

// volume is one that the node has made.
func (w *world) volume(name string) capacity.Volume {
	w.T.Helper()
	v, err := w.Commands().CreateVolume(w.T.Context(), w.Meta("volume"+db.NewID()), capacity.NewVolume{
		ProjectID: w.Project.ID, Name: name, SizeBytes: 64 << 20,
	})
	require.NoError(w.T, err)
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY})
	return w.getVolume(v.ID)
}

func (w *world) volumeReport(volumes ...*protocol.VolumeStatus) nodes.Report {
	r := w.NodeReport(1)
	r.Volumes = volumes
	return r
}

func (w *world) reportVolume(volumes ...*protocol.VolumeStatus) {
	w.T.Helper()
	w.Counter++
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return nodes.ApplyReport(ctx, tx, w.volumeReport(volumes...), w.Now)
	})
}

func (w *world) getVolume(id string) (v capacity.Volume) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		v, err = capacity.GetVolume(ctx, tx, w.Project.ID, id)
		return err
	})
	return v
}

// launch deploys a version with a volume of the project.
func (w *world) launch(version, volumeID string) (instance.Instance, error) {
	in := w.InstanceInput()
	in.Version, in.Resources = version, manifest.Choice{
		CPUMillis: 100, MemoryMiB: 16, Volumes: []manifest.VolumeChoice{{Name: "data", VolumeID: volumeID}},
	}
	return w.Commands().CreateInstance(w.T.Context(), w.Meta("instance"+db.NewID()), in)
}

func requireCode(t *testing.T, code fault.Code, err error) {
	t.Helper()
	require.Equal(t, code, fault.As(err).Code, "%v", err)
}

func TestAVolumeOfTheProjectHasOneWriterAndManyReaders(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	_, err := w.launch("2.0.0", "")
	require.Error(t, err)
	require.Equal(t, "/volumes/0/volume_id", fault.As(err).Fields[0].Pointer)
	_, err = w.launch("2.0.0", db.NewID())
	requireCode(t, "volume_unknown", err)
	writer, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	require.Equal(t, []manifest.VolumeChoice{{Name: "data", VolumeID: v.ID, SizeMiB: 64}},
		w.Get(writer.ID).Resources.Volumes)
	_, err = w.launch("2.0.0", v.ID)
	requireCode(t, "volume_in_use", err)
	for range 2 {
		_, err = w.launch("2.1.0", v.ID)
		require.NoError(t, err)
	}
	require.Len(t, w.getVolume(v.ID).UsedBy, 3)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		members, err := instance.SnapshotFor(ctx, tx, w.Node)
		require.NoError(t, err)
		require.Contains(t, members[0].Features, manifest.FeatureProjectVolumes)
		allocations, accelerators, err := capacity.SnapshotFor(ctx, tx, w.Node)
		require.NoError(t, err)
		volumes, err := capacity.DesiredVolumes(ctx, tx, w.Node)
		require.NoError(t, err)
		snap := plan.Snapshot{
			Node: plan.Node{ID: w.Node, AcceleratorIDs: accelerators}, Allocations: allocations, Members: members,
			Volumes: volumes,
		}
		state, err := plan.Compile(snap)
		require.NoError(t, err)
		require.NoError(t, plan.Check(snap, state))
		require.Len(t, state.Volumes, 1)
		require.True(t, state.Volumes[0].GetMade())
		require.Equal(t, w.Project.ID, state.Volumes[0].GetProjectId())
		return nil
	})

	_, err = w.Commands().DeleteVolume(t.Context(), w.Meta("delete"), w.Project.ID, v.ID)
	requireCode(t, "volume_in_use", err)
	w.decommissioned(writer)
	w.Report(2, w.Removed(writer))
	require.Len(t, w.getVolume(v.ID).UsedBy, 2)
	_, err = w.launch("2.0.0", v.ID)
	require.NoError(t, err, "the last writer is proven gone")
}

// Until an upgrade to a version that only reads has been confirmed, its node may fall back to one that writes.
func TestAVolumeHasItsWriterUntilAnUpgradeIsThrough(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	writer, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	w.Report(1, w.Says(writer, protocol.WorkloadStatus_READY))
	_, err = w.upgrade(writer, command.UpgradeInstanceInput{Version: "2.1.0"})
	require.NoError(t, err)
	_, err = w.launch("2.0.0", v.ID)
	requireCode(t, "volume_in_use", err)
}

// upgraded upgrades an instance, and has its node report it ready.
func (w *world) upgraded(i instance.Instance, version string) {
	w.T.Helper()
	i, err := w.upgrade(i, command.UpgradeInstanceInput{Version: version})
	require.NoError(w.T, err)
	require.Equal(w.T, lifecycle.Running, w.ready(i).Lifecycle.Status)
}

func TestAVolumeIsFreeForAnotherWriterOnceAnUpgradeOnlyReads(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	writer, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	w.Report(1, w.Says(writer, protocol.WorkloadStatus_READY))
	w.upgraded(writer, "2.1.0")
	require.Equal(t, []string{writer.Members[0].ID}, w.getVolume(v.ID).UsedBy, "it reads")
	_, err = w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, writer.ID, "")
	requireCode(t, "volume_in_use", err)
}

// An instance that reads a volume becomes its writer with the request for an upgrade, where it has no writer.
func TestAnUpgradeThatWritesTakesTheVolumesWriter(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	reader, err := w.launch("2.1.0", v.ID)
	require.NoError(t, err)
	w.Report(1, w.Says(reader, protocol.WorkloadStatus_READY))
	w.upgraded(reader, "2.0.0")
	_, err = w.launch("2.0.0", v.ID)
	requireCode(t, "volume_in_use", err)
	other, err := w.launch("2.1.0", v.ID)
	require.NoError(t, err)
	w.Report(2, w.Says(other, protocol.WorkloadStatus_READY))
	_, err = w.upgrade(other, command.UpgradeInstanceInput{Version: "2.0.0"})
	requireCode(t, "volume_in_use", err)
}

// Of launches at the same time, one gets a volume to write to, and the others the same fault as if it had come before.
func TestConcurrentLaunchesNeverShareAWriter(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for n := range errs {
		wg.Go(func() { _, errs[n] = w.launch("2.0.0", v.ID) })
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
			continue
		}
		requireCode(t, "volume_in_use", err)
		require.Equal(t, "/volumes", fault.As(err).Fields[0].Pointer)
	}
	require.Equal(t, 1, made)
	require.Len(t, w.getVolume(v.ID).UsedBy, 1)
	w.consistent()
}

func TestAnInstanceIsPlacedOnTheNodeOfItsVolume(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	there := v.NodeID
	w.EnrollNode()
	in := w.AllocationInput()
	in.NodeID = w.Node
	elsewhere, err := w.Commands().CreateAllocation(t.Context(), w.Meta("elsewhere"), in)
	require.NoError(t, err)
	_, err = w.Commands().CreateVolume(t.Context(), w.Meta("which"), capacity.NewVolume{
		ProjectID: w.Project.ID, Name: "which", SizeBytes: 64 << 20,
	})
	requireCode(t, "placement_required", err)
	i, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err, "two allocations have room, and one is on the volume's node")
	require.Equal(t, there, i.Members[0].NodeID)

	launch := w.InstanceInput()
	launch.Version, launch.AllocationIDs = "2.1.0", []string{elsewhere.ID}
	launch.Resources.Volumes = []manifest.VolumeChoice{{Name: "data", VolumeID: v.ID}}
	_, err = w.Commands().CreateInstance(t.Context(), w.Meta("far"), launch)
	requireCode(t, "volume_on_another_node", err)
	require.Equal(t, "/placement_intent/allocation_ids", fault.As(err).Fields[0].Pointer)
}

func TestARestoreNeedsStoppedInstancesAndKeepsThemFromStarting(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	snapshot, err := w.Commands().CreateVolumeSnapshot(t.Context(), w.Meta("snapshot"), w.Project.ID, v.ID, "first")
	require.NoError(t, err)
	w.reportVolume(&protocol.VolumeStatus{
		Id: v.ID, Status: protocol.VolumeStatus_READY,
		Snapshots: []*protocol.SnapshotStatus{{Id: snapshot.ID, Status: protocol.VolumeStatus_READY}},
	})
	i, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	restore := func() error {
		return second(w.Commands().RestoreVolume(t.Context(), w.Meta("restore"), w.Project.ID, v.ID, snapshot.ID))
	}
	requireCode(t, "volume_in_use", restore())
	_, err = w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	requireCode(t, "volume_in_use", restore())
	s := w.Says(i, protocol.WorkloadStatus_STOPPED)
	s.Revision = uint64(w.Get(i.ID).Revision)
	w.Report(2, s)
	require.NoError(t, restore())
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	requireCode(t, "volume_status", err)
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY})
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("early"), w.Project.ID, i.ID)
	requireCode(t, "volume_status", err)
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, RestoreNo: 1})
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.NoError(t, err)
}

func TestVolumesCountInQuotaAndDisk(t *testing.T) {
	w := newVolumeWorld(t)
	ask := func(name string, mib int64) error {
		return second(w.Commands().CreateVolume(t.Context(), w.Meta(name), capacity.NewVolume{
			ProjectID: w.Project.ID, Name: name, SizeBytes: mib << 20,
		}))
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return second(iam.SetLimits(ctx, tx, w.Project.OrgID, iam.Limits{iam.QuotaVolumeBytes: 640 << 20}, w.Now))
	})
	require.NoError(t, ask("a", 512))
	requireCode(t, fault.CodeQuotaExceeded, ask("b", 256))
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return second(iam.SetLimits(ctx, tx, w.Project.OrgID, nil, w.Now))
	})
	requireCode(t, capacity.CodeInsufficient, ask("b", 768)) // the node has 1 GiB
	require.NoError(t, ask("b", 256))
	w.SetFeatures(manifest.SchemaV1, manifest.FeatureVolumes)
	requireCode(t, "volumes_unsupported", ask("c", 16))
}

// Law 13: a node's state has room for so many volumes of projects and no more, and one org never takes them all.
func TestLaw13ANodeKeepsABoundedNumberOfVolumes(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	add := func(p iam.Project, name string) error {
		another := v
		another.ID, another.OrgID, another.ProjectID, another.Name = db.NewID(), p.OrgID, p.ID, name
		return db.WriteTx(t.Context(), w.DB, func(tx db.Tx) error {
			return capacity.CreateVolume(t.Context(), tx, another, 1<<50)
		})
	}
	other, _ := w.NewTenant("other")
	third, _ := w.NewTenant("third")
	for _, p := range []iam.Project{w.Project, other} {
		w.Exec(`INSERT INTO volumes (id, org_id, project_id, node_id, name, size_bytes, status, requested_by_type,
				requested_by_id, correlation_id, resource_version, created_at, updated_at)
			SELECT gen_random_uuid(), $3, $4, node_id, 'v' || n, size_bytes, status, requested_by_type,
				requested_by_id, correlation_id, resource_version, created_at, updated_at
			FROM volumes, generate_series(3, $2::INT8) AS n WHERE id = $1`, v.ID, protocol.MaxVolumes/2, p.OrgID, p.ID)
	}
	require.NoError(t, add(w.Project, "last"))
	requireCode(t, capacity.CodeInsufficient, add(w.Project, "more"))
	for _, name := range []string{"a", "b"} {
		require.NoError(t, add(other, name))
	}
	requireCode(t, capacity.CodeInsufficient, add(third, "more"))
}

// A volume grows, also in use, and never shrinks; what it is to take counts from the request on.
func TestAVolumeGrows(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	_, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	resize := func(mib int64) (capacity.Volume, error) {
		return w.Commands().ResizeVolume(t.Context(), w.Meta("resize"), w.Project.ID, v.ID, mib<<20)
	}
	_, err = resize(32)
	require.Equal(t, "/size_mib", fault.As(err).Fields[0].Pointer)
	_, err = resize(2048)
	requireCode(t, capacity.CodeInsufficient, err) // the node has 1 GiB
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return second(iam.SetLimits(ctx, tx, w.Project.OrgID, iam.Limits{iam.QuotaVolumeBytes: 100 << 20}, w.Now))
	})
	_, err = resize(128)
	requireCode(t, fault.CodeQuotaExceeded, err)
	same, err := resize(64)
	require.NoError(t, err)
	require.Equal(t, v.ResourceVersion, same.ResourceVersion)
	grown, err := resize(96)
	require.NoError(t, err)
	require.Equal(t, capacity.VolumeResizing, grown.Status)
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 64 << 20})
	require.Equal(t, capacity.VolumeResizing, w.getVolume(v.ID).Status, "the report is older")
	_, err = w.launch("2.1.0", v.ID)
	require.NoError(t, err, "it is usable meanwhile")
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 96 << 20})
	require.Equal(t, capacity.VolumeReady, w.getVolume(v.ID).Status)
	require.EqualValues(t, 96<<20, w.getVolume(v.ID).SizeBytes)
	require.Equal(t, 96<<20, w.Count(`SELECT volume_bytes FROM subjects WHERE id = $1`, v.ID))
}

// Law 7: what is kept when the wallet is empty does not grow on it.
func TestLaw07AVolumeGrowsOnlyWithMoney(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return second(ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: ledger.MeterVolumeByteSeconds, Currency: "EUR", Nanos: 1_000_000_000, Per: "hour",
			From: w.Now,
		}, w.Now))
	})
	w.Exec(`UPDATE wallets SET balance_nanos = 40000000`) // of the 0.0625 that 64 MiB cost in an hour
	before := w.Contents()
	resize := func(mib int64) error {
		return second(w.Commands().ResizeVolume(t.Context(), w.Meta("resize"), w.Project.ID, v.ID, mib<<20))
	}
	requireCode(t, "insufficient_funds", second(w.Commands().CreateVolumeSnapshot(t.Context(), w.Meta("snapshot"),
		w.Project.ID, v.ID, "first")))
	requireCode(t, "insufficient_funds", resize(128))
	require.Equal(t, before, w.Contents())
	require.NoError(t, resize(96), "only what it takes more is to be covered")
}

// A second resize before the first is through reaches the node too.
func TestAVolumeGrowsFurtherWhileItGrows(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	for _, mib := range []int64{96, 128} {
		before := w.Count(`SELECT rev FROM node_intents WHERE node_id = $1`, w.Node)
		_, err := w.Commands().ResizeVolume(t.Context(), w.Meta("resize"), w.Project.ID, v.ID, mib<<20)
		require.NoError(t, err)
		require.Equal(t, before+1, w.Count(`SELECT rev FROM node_intents WHERE node_id = $1`, w.Node), "to %d MiB", mib)
	}
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 96 << 20})
	require.Equal(t, capacity.VolumeResizing, w.getVolume(v.ID).Status)
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 128 << 20})
	require.Equal(t, capacity.VolumeReady, w.getVolume(v.ID).Status)
}

// Law 5: a larger size is billed once the node has made it, and not before, whatever else happens meanwhile. What the
// node has lost is not billed.
func TestLaw05ALargerVolumeIsBilledOnceItIsThere(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	billed := func() int { return w.Count(`SELECT volume_bytes FROM subjects WHERE id = $1`, v.ID) }
	snapshot, err := w.Commands().CreateVolumeSnapshot(t.Context(), w.Meta("snapshot"), w.Project.ID, v.ID, "first")
	require.NoError(t, err)
	for _, mib := range []int64{96, 128} {
		require.NoError(t, second(w.Commands().ResizeVolume(t.Context(), w.Meta("r"), w.Project.ID, v.ID, mib<<20)))
		require.Equal(t, 128<<20, billed(), "asked for %d MiB, with a snapshot", mib)
	}
	_, err = w.Commands().DeleteVolumeSnapshot(t.Context(), w.Meta("delete"), w.Project.ID, v.ID, snapshot.ID)
	require.NoError(t, err)
	w.reportVolume(&protocol.VolumeStatus{
		Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 64 << 20,
		Snapshots: []*protocol.SnapshotStatus{{Id: snapshot.ID, Status: protocol.VolumeStatus_DELETED}},
	})
	require.Equal(t, 64<<20, billed(), "the snapshot is gone")
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_MISSING})
	require.Zero(t, billed(), "it is missing")
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 96 << 20})
	require.Equal(t, capacity.VolumeResizing, w.getVolume(v.ID).Status, "it is back and grows on")
	require.Equal(t, 64<<20, billed(), "it is back")
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 128 << 20})
	require.Equal(t, 128<<20, billed())
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_MISSING})
	require.NoError(t, second(w.Commands().DeleteVolume(t.Context(), w.Meta("delete volume"), w.Project.ID, v.ID)))
	require.Zero(t, billed(), "until its node says that it is deleted")
}

func TestANodeWithVolumesIsNotRemovedAndALostOneEndsThem(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	w.Exec(`UPDATE allocations SET released_at = now(), status = 'released'`)
	admin := func(key string) command.Meta {
		m := w.Meta(key)
		m.Principal = iam.Principal{Type: w.User.Type, ID: w.User.ID, PlatformAdmin: true}
		return m
	}
	require.NoError(t, w.Commands().DrainNode(t.Context(), admin("drain"), w.Node))
	err := w.Commands().RemoveNode(t.Context(), admin("remove"), w.Node, command.RemoveNodeInput{})
	requireCode(t, "node_in_use", err)
	require.Contains(t, fault.As(err).Public, "1 volumes")
	w.Exec(`UPDATE node_sessions SET disconnected_at = now()`)
	w.Exec(`UPDATE node_sessions SET seen_at = now() - interval '1 year'`)
	require.NoError(t, w.Commands().RemoveNode(t.Context(), admin("lost"), w.Node, command.RemoveNodeInput{Lost: true}))
	require.Equal(t, capacity.VolumeNodeLost, w.getVolume(v.ID).Status)
	_, err = w.Commands().DeleteVolume(t.Context(), w.Meta("delete"), w.Project.ID, v.ID)
	requireCode(t, "volume_status", err)
}

// Law 5: a volume is billed while its node keeps it.
func TestLaw05AVolumeOfALostNodeIsBilledUpToItsLoss(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	w.silent()
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true}))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM subjects WHERE id = $1 AND closed_at = $2`, v.ID, w.Now))
}

// A volume that its node had and lost is missing: the node is not asked to make an empty one in its place.
func TestAMissingVolumeIsNotMadeAnew(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_MISSING})
	require.Equal(t, capacity.VolumeMissing, w.getVolume(v.ID).Status)
	_, err := w.launch("2.0.0", v.ID)
	requireCode(t, "volume_status", err)
	w.reportVolume(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY})
	require.Equal(t, capacity.VolumeReady, w.getVolume(v.ID).Status)
}

func law08ChangesOfVolumesAreOneTransaction(t *testing.T) {
	ready := func(w *world) (capacity.Volume, command.Meta) { return w.volume("data"), w.Meta("k") }
	requireAtomic(t, []atomicStep{
		{"create volume", "volumes", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.CreateVolume(ctx, m, capacity.NewVolume{
					ProjectID: w.Project.ID, Name: "v", SizeBytes: 64 << 20,
				}))
			})
		}},
		{"delete volume", "volumes", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			v, m := ready(w)
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.DeleteVolume(ctx, m, w.Project.ID, v.ID))
			})
		}},
		{"snapshot", "volume_snapshots", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			v, m := ready(w)
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.CreateVolumeSnapshot(ctx, m, w.Project.ID, v.ID, ""))
			})
		}},
		{"report", "volumes", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			v, _ := ready(w)
			w.Counter++
			return w.report(w.volumeReport(&protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_MISSING}))
		}},
	})
}
