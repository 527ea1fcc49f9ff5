package chaos_test

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// removalKill is a kill of the agent while it removes an app of several services: at a point, when the first service
// passes it or a later one.
type removalKill struct {
	point string
	hit   int
}

// removalKills are all kills of a removal, in the order in which services pass the points.
func removalKills() (all []removalKill) {
	for hit := 1; hit <= 2; hit++ {
		for _, p := range failpoint.Names() {
			ofService := slices.ContainsFunc([]string{
				"agent/stop/", "agent/exit/", "agent/remove/", "agent/detach/", "agent/network/removed",
			}, func(prefix string) bool { return strings.HasPrefix(p, prefix) })
			if ofService || hit == 1 && strings.HasPrefix(p, "agent/retire/") {
				all = append(all, removalKill{p, hit})
			}
		}
	}
	return all
}

// removals decommissions apps of several services and kills the agent at each point of their removal. After a kill the
// next one is armed: a decommission survives several. What it does not pass any more is the first kill of the next one.
func (k *killTest) removals() {
	k.T.Helper()
	k.Decommission(k.LaunchProject("first")) // the directories of a first start
	nothingLeft := k.leakCheck()
	for due, round := removalKills(), 0; len(due) > 0; round++ {
		began, before := time.Now(), len(due)
		i := k.LaunchProject("removed")
		require.Equal(k.T, harness.ProjectServices, k.ContainersOn(k.Agent, i))
		due = k.killRemoval(i, due)
		require.Less(k.T, len(due), before, "the first of %v is never reached", due)
		nothingLeft()
		k.requireLaws(instanceHistory{id: i.ID, member: i.Members[0].ID, events: []string{
			"requested", "deploying", "running", "decommission_requested", "decommissioned",
		}})
		k.T.Logf("removal with %d kills, %s, %d to go", before-len(due), time.Since(began).Round(time.Millisecond), len(due))
	}
}

// killRemoval decommissions the instance and kills the agent at one due point after the other, until the instance is
// gone. It returns the kills that are still due.
func (k *killTest) killRemoval(i api.AppInstance, due []removalKill) []removalKill {
	k.T.Helper()
	ctx, cancel := context.WithTimeout(k.Ctx, stepLimit)
	defer cancel()
	next := 0
	arm := func() {
		if next < len(due) {
			k.agentProgram.arm(k.T, due[next].point, due[next].hit)
		}
	}
	arm()
	ended := make(chan error, 1)
	go func() {
		_, err := k.Tenant.Decommission(ctx, k.Operator, i.ID)
		ended <- err
	}()
	for {
		select {
		case err := <-ended:
			require.NoError(k.T, err)
			require.NoError(k.T, k.agentProgram.disarm())
			return due
		case <-k.agentProgram.process().Exited():
			require.NoError(k.T, k.agentProgram.recordCrash())
			require.True(k.T, k.agentProgram.crashed, "the agent ended by itself:\n%s", k.agentProgram.process().LogTail(20))
			// Kills that a removal has passed may come again for another service; they wait for the next removal.
			due = slices.Delete(due, next, next+1)
			arm()
			require.NoError(k.T, k.agentProgram.startUntilServing())
		}
	}
}
