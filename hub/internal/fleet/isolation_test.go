package fleet_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestANodeSaysWhyItServesOneOrg(t *testing.T) {
	n := fleet.Node{Conditions: []string{
		"cgroup_v1", protocol.ConditionRuncVulnerable,
		protocol.ConditionNoUserNamespaces,
	}}
	require.Equal(t, []string{protocol.ConditionNoUserNamespaces, protocol.ConditionRuncVulnerable},
		n.SingleOrgConditions())
	n.Conditions = append(n.Conditions, protocol.ConditionWeakIsolationShared)
	require.Empty(t, n.SingleOrgConditions())
	require.Empty(t, fleet.Node{Conditions: []string{"cgroup_v1"}}.SingleOrgConditions())
}
