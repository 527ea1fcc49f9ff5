package accelerator_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/protocol"
)

// requireEqual compares accelerators as what they print, which names the field that differs.
func requireEqual(t *testing.T, want, got *protocol.Accelerator) {
	t.Helper()
	require.True(t, proto.Equal(want, got), "want %v\ngot  %v", want, got)
}

func TestMI300XWithPartitionsAndXGMI(t *testing.T) {
	const first, second = "GPU-8c1f0a96f2d3b751", "GPU-0f44e2b17a90c6d3"
	list := start(t, accelerator.Config{Root: unpack(t, "mi300x")}).List()
	require.Equal(t, []string{second, first}, ids(list))
	want := &protocol.Accelerator{
		Id: first, Vendor: "amd", Model: "AMD Instinct MI300X OAM", MemoryBytes: 192 << 30, Health: "ok",
		PciAddress: "0000:0c:00.0", NumaNode: proto.Uint32(0), Cores: 304, DriverVersion: "6.10.5",
		RuntimeVersion: "6.3.1-48",
		Links:          []*protocol.AcceleratorLink{{PeerId: second, Kind: "xgmi", Count: 1}},
	}
	for n := range 8 {
		want.Partitions = append(want.Partitions, &protocol.AcceleratorPartition{
			Id: fmt.Sprintf("%s-%d", first, n), Profile: "CPX/NPS4", MemoryBytes: 24 << 30,
		})
	}
	requireEqual(t, want, list[1])
	require.Empty(t, list[0].GetPartitions(), "a GPU in one partition is offered whole")
	require.EqualValues(t, 304, list[0].GetCores())
	require.EqualValues(t, 1, list[0].GetNumaNode())
	require.Equal(t, first, list[0].GetLinks()[0].GetPeerId())
	require.Len(t, list[0].GetLinks(), 1, "the links to eight partitions lead to one GPU")
}

func TestMI210WithMemoryErrors(t *testing.T) {
	root := unpack(t, "mi210")
	list := start(t, accelerator.Config{Root: root}).List()
	requireEqual(t, &protocol.Accelerator{
		Id: "GPU-6f2e9b0d41c8a357", Vendor: "amd", Model: "AMD Instinct MI210", MemoryBytes: 64 << 30, Health: "ok",
		PciAddress: "0000:43:00.0", NumaNode: proto.Uint32(0), Cores: 104, DriverVersion: "6.8.0-49-generic",
		Links: []*protocol.AcceleratorLink{{PeerId: "GPU-b19d5c7730e4f286", Kind: "xgmi", Count: 1}},
	}, list[0])
	require.Equal(t, "degraded", list[1].GetHealth(), "an error that was not corrected")

	device := filepath.Join(root, "sys/bus/pci/drivers/amdgpu/0000:43:00.0")
	pages := "0x00400000 : 0x00001000 : R\n0x00500000 : 0x00001000 : P\n"
	require.NoError(t, os.WriteFile(filepath.Join(device, "ras/gpu_vram_bad_pages"), []byte(pages), 0o600))
	require.Equal(t, "degraded", start(t, accelerator.Config{Root: root}).List()[0].GetHealth(), "a bad page is in use")
	require.NoError(t, os.Remove(filepath.Join(device, "mem_info_vram_total")))
	require.Equal(t, "faulty", start(t, accelerator.Config{Root: root}).List()[0].GetHealth(), "it does not answer")
}

func TestAGPUThatIsTooHotGetsNoNewWork(t *testing.T) {
	root := unpack(t, "radeon")
	sensors := filepath.Join(root, "sys/bus/pci/drivers/amdgpu/0000:03:00.0/hwmon/hwmon4")
	require.NoError(t, os.MkdirAll(sensors, 0o755))
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(sensors, name), []byte(text+"\n"), 0o600))
	}
	write("temp1_crit", "100000")
	write("temp1_input", "64000")
	write("temp2_crit", "110000")
	write("temp2_input", "109000")
	i := start(t, accelerator.Config{Root: root, Interval: 10 * time.Millisecond})
	const id = "GPU-d20b5fe3917c4468"
	require.Equal(t, "ok ", health(i, id))
	write("temp2_input", "110000")
	await(t, i, func() bool { return health(i, id) == "degraded it is too hot" })
	require.Zero(t, i.State(id), "what runs on it goes on")
	write("temp2_input", "109000")
	require.Never(t, func() bool { return health(i, id) == "ok " }, 200*time.Millisecond, 10*time.Millisecond,
		"it has to be cool for a while")
}

func TestRadeonWithAndWithoutAUniqueID(t *testing.T) {
	list := start(t, accelerator.Config{Root: unpack(t, "radeon")}).List()
	requireEqual(t, &protocol.Accelerator{
		Id: "0000:0b:00.0", Vendor: "amd", Model: "AMD GPU 0x731f", MemoryBytes: 8 << 30, Health: "ok",
		PciAddress: "0000:0b:00.0", Cores: 40, DriverVersion: "6.12.9-amd64",
	}, list[0])
	requireEqual(t, &protocol.Accelerator{
		Id: "GPU-d20b5fe3917c4468", Vendor: "amd", Model: "AMD Radeon RX 7900", MemoryBytes: 24 << 30, Health: "ok",
		PciAddress: "0000:03:00.0", Cores: 96, DriverVersion: "6.12.9-amd64",
	}, list[1])
}

// No container could compute on a GPU that only drives displays, as that of many processors.
func TestAGPUWithoutItsComputeDriverGetsNoWork(t *testing.T) {
	root := unpack(t, "radeon")
	require.NoError(t, os.RemoveAll(filepath.Join(root, "sys/class/kfd/kfd/topology/nodes/2")))
	i := start(t, accelerator.Config{Root: root})
	const id = "0000:0b:00.0"
	require.Equal(t, "faulty the kernel's compute driver does not serve it", health(i, id))
	require.Equal(t, agent.AcceleratorFaulty, i.State(id))
	require.Equal(t, "ok ", health(i, "GPU-d20b5fe3917c4468"))
}

// One board must not silence its node: a report with a text that is not UTF-8 could not be encoded.
func TestABoardMayNameItselfInAnyBytes(t *testing.T) {
	root := unpack(t, "mi210")
	name := filepath.Join(root, "sys/bus/pci/drivers/amdgpu/0000:43:00.0/product_name")
	require.NoError(t, os.WriteFile(name, []byte("Instinct\xff\xff\n"), 0o600))
	list := start(t, accelerator.Config{Root: root}).List()
	require.Equal(t, "Instinct?", list[0].GetModel())
	_, err := proto.Marshal(list[0])
	require.NoError(t, err)
}
