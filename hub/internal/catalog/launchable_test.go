package catalog

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestWhoMayLaunchAVersionInEachStatus(t *testing.T) {
	owned, platform := App{OrgID: "owner"}, App{}
	tenant, owner, admin := Want{OrgID: "tenant", ProjectID: "p"}, Want{OrgID: "owner", ProjectID: "p"}, Want{Trial: true}
	for _, c := range []struct {
		status  Status
		percent int
		app     App
		by      Want
		may     bool
	}{
		{Draft, 0, owned, owner, false},
		{Draft, 0, owned, admin, false},
		{Staged, 0, owned, tenant, false},
		{Staged, 0, owned, owner, true},
		{Staged, 0, owned, admin, true},
		{Staged, 0, platform, tenant, false},
		{Staged, 0, platform, Want{}, false},
		{Staged, 0, platform, admin, true},
		{Canary, 0, owned, tenant, false},
		{Canary, 100, owned, tenant, true},
		{Canary, 0, owned, owner, true},
		{Canary, 0, platform, admin, true},
		{Active, 0, owned, tenant, true},
		{Deprecated, 0, owned, owner, false},
		{Deprecated, 0, owned, admin, false},
		{Retired, 0, owned, admin, false},
	} {
		err := Version{ID: "v", Status: c.status, CanaryPercent: c.percent}.checkLaunchable(c.app, c.by)
		if c.may {
			require.NoError(t, err, "%+v", c)
			continue
		}
		require.Equal(t, CodeVersionNotActive, fault.As(err).Code, "%+v", c)
		require.Equal(t, "/version", fault.As(err).Fields[0].Pointer)
	}
}

func TestACanarysShareGrowsAndEachVersionHasOtherProjects(t *testing.T) {
	const projects = 10_000
	share := func(id string, percent int) map[int]bool {
		in := map[int]bool{}
		for n := range projects {
			if (Version{ID: id, CanaryPercent: percent}).inCanary(strconv.Itoa(n)) {
				in[n] = true
			}
		}
		return in
	}
	tenth, half := share("a", 10), share("a", 50)
	require.InDelta(t, projects/10, len(tenth), projects/100)
	require.InDelta(t, projects/2, len(half), projects/50)
	for n := range tenth {
		require.True(t, half[n], "a project stays in while the share grows")
	}
	both := 0
	for n := range share("b", 10) {
		if tenth[n] {
			both++
		}
	}
	require.InDelta(t, projects/100, both, projects/200)
}
