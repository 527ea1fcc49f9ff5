package accelerator

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/protocol"
)

// judged is an inventory with one GPU that was reset at a time.
func judged(t *testing.T, at time.Time) (i *Inventory, driver *source, advance func(time.Duration) map[string]duty) {
	t.Helper()
	i = New(Config{Root: t.TempDir(), TestFor: time.Minute})
	driver = i.sources[0]
	driver.found = []*protocol.Accelerator{{Id: "GPU-a", Health: protocol.HealthOK}}
	driver.scannedAt = at.Add(time.Second)
	i.ladder.Rungs["GPU-a"] = rung{Health: protocol.HealthTesting, Reason: "Xid 95", Since: at}
	log := &kernelLog{path: filepath.Join(t.TempDir(), "kmsg")}
	return i, driver, func(later time.Duration) map[string]duty {
		delete(i.ladder.underWay, "GPU-a")
		return i.advance(t.Context(), log, at.Add(later))
	}
}

// A driver that answers again only long after a reset had named the GPU before it: as one that needs a reset.
func TestAResetGPUIsJudgedByWhatItsDriverSaysAfterTheReset(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	i, driver, advance := judged(t, at)
	i.SetUsed(nil)
	driver.found[0].Health, driver.scannedAt = protocol.HealthNeedsReset, at.Add(-time.Second)
	require.Empty(t, advance(time.Hour))
	require.Equal(t, protocol.HealthTesting, i.ladder.Rungs["GPU-a"].Health, "it was asked before the reset")
	driver.found[0].Health = protocol.HealthOK
	require.Empty(t, advance(time.Hour), "a GPU that worked before is not tested by that either")

	driver.scannedAt = at.Add(time.Hour)
	require.Equal(t, map[string]duty{"GPU-a": dutyTest}, advance(time.Hour))
	driver.found[0].Health = protocol.HealthFaulty
	advance(time.Hour)
	require.Equal(t, protocol.HealthQuarantined, i.ladder.Rungs["GPU-a"].Health)
}

// What AMD's driver has reset by itself may still be in the container that made the fault, which has its grace to end.
func TestAnAcceleratorIsNotTestedWhileAContainerHasIt(t *testing.T) {
	i, _, advance := judged(t, time.Unix(1_800_000_000, 0))
	require.Empty(t, advance(time.Hour), "nobody has said yet which containers there are")
	i.SetUsed([]string{"GPU-a"})
	require.Empty(t, advance(time.Hour))
	i.SetUsed(nil)
	require.Equal(t, map[string]duty{"GPU-a": dutyTest}, advance(time.Hour))
}

// After a start of the agent, and right after the fault, nobody has said yet which containers there are.
func TestLaw14AnAcceleratorIsNotResetBeforeItIsKnownToBeFree(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	i, _, advance := judged(t, at)
	needsReset := rung{Health: protocol.HealthNeedsReset, Reason: "Xid 95", Since: at}
	i.ladder.Rungs["GPU-a"] = needsReset
	require.Empty(t, advance(time.Hour))
	i.SetUsed(nil)
	i.ladder.usedAt = at.Add(-time.Second)
	require.Empty(t, advance(time.Hour), "a container may have got it since")
	i.SetUsed([]string{"GPU-a"})
	require.Empty(t, advance(time.Hour))
	require.Equal(t, needsReset, i.ladder.Rungs["GPU-a"])
	i.SetUsed(nil)
	require.Equal(t, map[string]duty{"GPU-a": dutyReset}, advance(time.Hour))
}

func TestAPartitionThatIsNamedAfterTheFirstPassIsInUse(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	i, driver, advance := judged(t, at)
	driver.found = nil
	i.SetUsed([]string{"MIG-a"})
	i.apply(t.Context(), driver, []*protocol.Accelerator{{
		Id: "GPU-a", Health: protocol.HealthOK, Partitions: []*protocol.AcceleratorPartition{{Id: "MIG-a"}},
	}}, nil, at.Add(time.Second))
	require.Empty(t, advance(time.Hour))
}

// The kernel's log speaks of a GPU whose driver answers only long after the agent's start, as one without persistence
// mode does: the message waits for it, also where the agent is started again meanwhile, and counts once.
func TestAMessageWaitsForTheDriverOfItsGPU(t *testing.T) {
	dir, now := t.TempDir(), time.Unix(1_800_000_000, 0)
	log := filepath.Join(dir, "kmsg")
	require.NoError(t, os.WriteFile(log, []byte("3,7,5140900,-;NVRM: Xid (PCI:0000:1b:00): 95, pid=1, Uncontained\n"+
		"3,8,5140900,-;NVRM: Xid (PCI:0000:43:00): 79, GPU has fallen off the bus.\n"), 0o600))
	cfg := Config{Root: t.TempDir(), LadderFile: filepath.Join(dir, "health.json")}
	started := func() (i *Inventory, advance func()) {
		i = New(cfg)
		i.sources[1].scannedAt = now // AMD's driver answers at once
		kernel := &kernelLog{path: log}
		t.Cleanup(kernel.close)
		return i, func() { i.advance(t.Context(), kernel, now) }
	}
	for range 2 {
		i, advance := started()
		advance()
		advance()
		require.Len(t, i.ladder.Unplaced, 2)
		require.Empty(t, i.ladder.Rungs)
	}
	i, advance := started()
	i.sources[0].scannedAt = now
	i.sources[0].found = []*protocol.Accelerator{{
		Id: "GPU-a", PciAddress: "0000:1b:00.0", Health: protocol.HealthOK,
	}}
	advance()
	require.Equal(t, protocol.HealthNeedsReset, i.ladder.Rungs["GPU-a"].Health)
	require.Len(t, i.ladder.Rungs, 1, "the other GPU is gone")
	require.Empty(t, i.ladder.Unplaced)

	i.ladder.Rungs = map[string]rung{}
	advance()
	require.Empty(t, i.ladder.Rungs, "it counts once")
}

// The directory may outlive a reboot. That has reset every accelerator, and the kernel counts its records anew.
func TestTheLadderOfAnEarlierBootIsForgotten(t *testing.T) {
	cfg := Config{Root: t.TempDir(), LadderFile: filepath.Join(t.TempDir(), "health.json")}
	i := New(cfg)
	i.ladder.Read = 7
	i.move(t.Context(), "GPU-a", rung{Health: protocol.HealthQuarantined})
	restarted := New(cfg).ladder
	require.EqualValues(t, 7, restarted.Read)
	require.Equal(t, protocol.HealthQuarantined, restarted.Rungs["GPU-a"].Health)

	boot, err := daemon.BootID()
	require.NoError(t, err)
	raw, err := os.ReadFile(cfg.LadderFile)
	require.NoError(t, err)
	other := strings.ReplaceAll(string(raw), boot, "another-boot")
	require.NoError(t, os.WriteFile(cfg.LadderFile, []byte(other), 0o600))
	rebooted := New(cfg).ladder
	require.Zero(t, rebooted.Read)
	require.Empty(t, rebooted.Rungs)
}

// A driver without its persistence mode starts every GPU first. Without its answer the hub would take all accelerators
// for missing.
func TestTheFirstScanMayTakeAsLongAsADriverMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i := New(Config{Root: t.TempDir()})
		go func() {
			time.Sleep(DefaultTimeout)
			for _, s := range i.sources {
				close(s.scanned)
			}
		}()
		began := time.Now()
		i.AwaitFirstScan(t.Context())
		require.Equal(t, DefaultTimeout, time.Since(began))

		hangs := New(Config{Root: t.TempDir()})
		hangs.AwaitFirstScan(t.Context())
	})
}

// What a driver that hangs has found is older: its accelerators are not known to have worked since.
func TestTheAgeOfTheInventoryIsThatOfTheOlderScan(t *testing.T) {
	i := New(Config{Root: t.TempDir()})
	require.Zero(t, i.ScannedAt())
	at := time.Unix(1_800_000_000, 0)
	for order := range 2 {
		hanging, answering := i.sources[order], i.sources[1-order]
		hanging.scannedAt, answering.scannedAt = at, at.Add(time.Hour)
		answering.found = []*protocol.Accelerator{{Id: "GPU-a"}}
		hanging.found = nil
		require.Equal(t, answering.scannedAt, i.ScannedAt(), "a driver without accelerators does not count")
		hanging.found = []*protocol.Accelerator{{Id: "GPU-b"}}
		require.Equal(t, at, i.ScannedAt())
	}
}
