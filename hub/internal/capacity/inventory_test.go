package capacity_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/protocol"
)

// stored reads the accelerators of the node with GPUs.
func (w *world) stored() (list []*protocol.Accelerator) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
		of, err := capacity.Accelerators(ctx, tx, w.gpu.ID)
		list = of[w.gpu.ID]
		return err
	}))
	return list
}

// written is when the row of the first accelerator was written last.
func (w *world) written() (at string) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, `SELECT updated_at::TEXT FROM accelerators WHERE node_id = $1 ORDER BY id LIMIT 1`,
			w.gpu.ID).Scan(&at)
	}))
	return at
}

func TestWhatANodeSaysOfAnAcceleratorIsKept(t *testing.T) {
	w := newWorld(t)
	gpu := gpus(1)[0]
	gpu.PciAddress, gpu.NumaNode, gpu.Cores, gpu.DriverVersion, gpu.RuntimeVersion = "0000:1b:00.0", proto.Uint32(0),
		16896,
		"550.54.15", "12.4"
	gpu.Links = []*protocol.AcceleratorLink{{PeerId: "GPU-1", Kind: "nvlink", Count: 18}}
	gpu.Partitions = []*protocol.AcceleratorPartition{{Id: "MIG-1", Profile: "1g.12gb", MemoryBytes: 11 << 30}}
	w.inventory(gpu)
	require.True(t, proto.Equal(gpu, w.stored()[0]), "%v", w.stored()[0])

	before := w.written()
	w.inventory(proto.CloneOf(gpu))
	require.Equal(t, before, w.written(), "what has not changed is not written")
	changed := proto.CloneOf(gpu)
	changed.Partitions = nil
	w.inventory(changed)
	require.Empty(t, w.stored()[0].GetPartitions())

	w.inventory()
	require.Equal(t, "missing", w.stored()[0].GetHealth())
	require.Equal(t, "0000:1b:00.0", w.stored()[0].GetPciAddress(), "it may come back")
	w.inventory(changed)
	require.Equal(t, "ok", w.stored()[0].GetHealth())
}

func TestOnlyAnAcceleratorThatIsOKIsGiven(t *testing.T) {
	w := newWorld(t)
	list := gpus(4)
	list[0].Health, list[1].Health, list[2].Health = "degraded", "faulty", "something of a newer node"
	w.inventory(list...)
	a, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 1 })
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-3"}, a.AcceleratorIDs)
	_, err = w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 1 })
	require.Equal(t, "insufficient_capacity", code(err))
}

// A node that says too much of an accelerator fills no row.
func TestWhatANodeSaysOfAnAcceleratorIsBounded(t *testing.T) {
	w := newWorld(t)
	long := strings.Repeat("x", 5000) + "\x00"
	gpu := &protocol.Accelerator{Id: "GPU-0", PciAddress: long, DriverVersion: "5\x005", RuntimeVersion: long}
	for range 1000 {
		gpu.Links = append(gpu.Links, &protocol.AcceleratorLink{PeerId: long, Kind: long})
		gpu.Partitions = append(gpu.Partitions, &protocol.AcceleratorPartition{Id: long, Profile: long, MemoryBytes: 1 << 63})
	}
	w.inventory(gpu)
	got := w.stored()[0]
	require.Equal(t, "55", got.GetDriverVersion())
	require.Len(t, got.GetPciAddress(), 128)
	require.Len(t, got.GetLinks(), protocol.MaxAcceleratorParts)
	require.Len(t, got.GetPartitions(), protocol.MaxAcceleratorParts)
	require.Len(t, got.GetPartitions()[0].GetProfile(), 128)
	require.LessOrEqual(t, got.GetPartitions()[0].GetMemoryBytes(), uint64(1<<50))
}

// A node may name as many accelerators as it likes; those that are known keep being updated.
func TestAKnownAcceleratorIsUpdatedWhereNoOtherHasRoom(t *testing.T) {
	w := newWorld(t)
	all := func() int { return w.count(`SELECT count(*) FROM accelerators`) }
	known := 0
	for first := 0; all() > known; first += 100 {
		known = all()
		list := gpus(100)
		for i, a := range list {
			a.Id = fmt.Sprintf("GPU-x%05d", first+i)
		}
		w.inventory(list...)
	}
	require.Equal(t, 4*protocol.MaxAccelerators, known)
	newer := gpus(1)[0]
	newer.DriverVersion = "newer"
	w.inventory(newer)
	require.Equal(t, known, all())
	require.Equal(t, 1, w.count(`SELECT count(*) FROM accelerators WHERE id = 'GPU-0'
		AND description::TEXT LIKE '%newer%'`))
}

// Law 10: a volume outlives the allocations of its org. A node that isolates weakly takes no other org beside it.
func TestLaw10AVolumeKeepsOtherOrgsFromAWeaklyIsolatedNode(t *testing.T) {
	w := newWorld(t)
	w.cpu.OneOrg = true
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		return capacity.CreateVolume(ctx, tx, capacity.Volume{
			ID: db.NewID(), OrgID: w.org, ProjectID: w.project, NodeID: w.cpu.ID, Name: "data", SizeBytes: 64 << 20,
			Status: capacity.VolumeReady, RequestedBy: principal.Actor{Type: principal.User, ID: "u"}, CorrelationID: "corr",
			ResourceVersion: 1, CreatedAt: w.now(), UpdatedAt: w.now(),
		}, 1<<30)
	}))
	allocate := func(orgID string) error {
		_, err := w.create(func(n *capacity.NewAllocation) {
			n.NodeID, n.CPUCores, n.MemoryMiB, n.OrgID = w.cpu.ID, 1, 1024, orgID
		})
		return err
	}
	require.Equal(t, "insufficient_capacity", code(allocate(db.NewID())))
	require.NoError(t, allocate(w.org))
}
