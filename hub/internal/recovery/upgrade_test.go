package recovery_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 16: an upgrade after the backup lets a member use more. Nothing of that is free for another one, and its usage is
// billed beyond the limits of the backup.
func TestLaw16WhatAnUpgradeAfterTheBackupUsesIsTakenOver(t *testing.T) {
	lo := loseHub(t)
	_, err := (&command.Service{DB: lo.h.DB, Bundle: lo.h.Keys.Bundle, Sealer: hubtest.PlainSealer{}}).UpgradeInstance(
		t.Context(), lo.h.Tenant("upgrade"), command.UpgradeInstanceInput{
			ProjectID: lo.h.Project.ID, InstanceID: lo.kept.ID, Version: "1.0.0",
			Resources: manifest.Choice{CPUMillis: 1500, MemoryMiB: 512},
		})
	require.NoError(t, err)
	lo.holds(lo.l.ExpectState(1))
	again := lo.restore()
	lo.adopt(again)
	require.EqualValues(t, 2, again.Instance(lo.kept.ID).Revision)
	member := lo.kept.Members[0].ID
	for _, table := range []string{"reservations WHERE member_id", "subjects WHERE id"} {
		require.Equal(t, 1500, hubtest.Count(again, `SELECT cpu_millis FROM `+table+` = $1`, member), table)
		require.Equal(t, 512<<20, hubtest.Count(again, `SELECT memory_bytes FROM `+table+` = $1`, member), table)
	}
}

// Laws 14 and 16: a member that may go back to its former revision keeps the accelerators of both, whichever needs more
// memory.
func TestLaw14AndLaw16TheAcceleratorsOfBothRevisionsAreTakenOver(t *testing.T) {
	services := func(cpuMillis uint32, memoryBytes uint64, acceleratorIDs ...string) []*protocol.Service {
		return []*protocol.Service{{Resources: &protocol.Resources{
			CpuMillis: cpuMillis, MemoryBytes: memoryBytes, AcceleratorIds: acceleratorIDs,
		}}}
	}
	use := recovery.UseOf(&protocol.Workload{
		Services: services(700, 1<<20, "GPU-1", "GPU-0"),
		Fallback: &protocol.Workload{Services: services(100, 2<<20, "GPU-1")},
	})
	require.Equal(t, []string{"GPU-0", "GPU-1"}, use.AcceleratorIDs)
	require.EqualValues(t, 700, use.CPUMillis)
	require.EqualValues(t, 2<<20, use.MemoryBytes)
}
