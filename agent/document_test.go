package agent_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// The volume is snapshot before the next version has it, and restored when the one before returns, so neither may have
// the other's container. Without a snapshot an equal container goes on.
func TestAContainerWhoseVolumeIsSnapshotIsItsVersions(t *testing.T) {
	digest := func(version string, snapshot bool) string {
		w := agent.NewWorkload("m", &protocol.Workload{AppVersion: version, Services: []*protocol.Service{{
			Name: "main", Volumes: []*protocol.VolumeMount{{Name: "data", Path: "/data", SnapshotOnUpgrade: snapshot}},
		}}})
		return w.Services[0].SpecDigest
	}
	require.NotEqual(t, digest("1.0.0", true), digest("2.0.0", true))
	require.Equal(t, digest("1.0.0", false), digest("2.0.0", false))
}
