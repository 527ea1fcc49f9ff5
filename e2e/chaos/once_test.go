package chaos_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// A service that ends before the others start has done its work once its exit is noted, whenever the agent is killed.
func TestLaw13WhatAServiceHasDoneIsNotDoneAgainAfterAKill(t *testing.T) {
	k := newKillTest(t, 1)
	for _, point := range []string{"agent/exit/measured", "agent/exit/recorded"} {
		started, crashes := k.oracle.Starts(), k.agentProgram.crashes
		k.agentProgram.arm(t, point, 1)
		var i api.AppInstance
		k.restartWhile(func(ctx context.Context) (err error) {
			i, _, err = k.Tenant.Launch(ctx, k.Operator, api.AppInstanceCreate{
				AppSlug: harness.ProjectSlug, Version: "1.0.0", DisplayName: point,
				PlacementIntent: api.PlacementIntent{AllocationIds: []string{k.Allocation.ID}},
			}, nil)
			return err
		})
		require.Equal(t, crashes+1, k.agentProgram.crashes, "%s is not reached", point)
		k.Decommission(i)
		require.Equal(t, started+harness.ProjectServices, k.oracle.Starts(), "each service started once: %s", point)
	}
	k.explainKills()
}
