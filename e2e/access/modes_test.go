package access_test

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// newModesPlatform has version 2.0.0 of the app, which may run in every mode, and a node for several orgs.
func newModesPlatform(t *testing.T) (w *harness.Testbed, admin *harness.Shell) {
	t.Helper()
	w = harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	c := w.AgentConfig("node")
	policy := filepath.Join(w.Dir, "policy.yaml")
	require.NoError(t, os.WriteFile(policy, []byte("share_weak_isolation: true\n"), 0o600))
	c.ExtraArgs = append(c.ExtraArgs, "--policy", policy)
	w.Agent = w.StartAgent(c)
	w.ShipApp()
	w.ShipVersion("2.0.0", "  runtime_backend: launchable_oci\n", "  runtime_backend: launchable_oci\n"+
		"  supported_modes: {operating_modes: [tenant_dedicated, platform_managed], "+
		"control_plane_scopes: [project, tenant, platform]}\n")
	admin = w.AdminShell()
	admin.MustRun("entitlements", "set", harness.AppSlug, "--project", "main")
	return w, admin
}

// Another project of the org reaches a shared instance from its attachment on, until that ends, and only reaches it.
func TestAnAttachedProjectReachesASharedInstance(t *testing.T) {
	w, admin := newModesPlatform(t)
	w.Allocate(w.Agent)
	admin.MustRun("projects", "create", "second", "--org", "acme")
	owner, other := w.UserShell(admin), w.ShellOf(admin, "bob", "second")
	i := harness.AsJSON[client.AppInstance](owner, "instances", "create", harness.AppSlug, "--project", "main",
		"--version", "2.0.0", "--control-plane-scope", "tenant", "--wait")
	require.EqualValues(t, "tenant_shared", i.TenantBoundaryMode)
	forward := []string{"port-forward", i.ID, "--project", "second", "http"}
	other.Fails(5, "", forward...)

	attachment := harness.AsJSON[client.Attachment](other, "attachments", "create", i.ID, "--project", "second")
	url := other.Forward(forward[1:]...)
	page, err := io.ReadAll(request(w.Ctx, t, http.MethodGet, url, nil).Body)
	require.NoError(t, err)
	require.Contains(t, string(page), harness.FirstGreeting)
	require.Contains(t, other.MustRun("attachments", "list", "--project", "second"), i.ID)
	require.Contains(t, owner.MustRun("attachments", "list", i.ID, "--project", "main"), attachment.ID)
	other.Fails(5, "not_found", "instances", "stop", i.ID, "--project", "second")
	owner.Fails(6, "instance_attached", "instances", "decommission", i.ID, "--project", "main")

	owner.MustRun("attachments", "delete", i.ID, attachment.ID, "--project", "main")
	other.Fails(5, "", forward...)
	require.Equal(t, client.AppInstanceStatusDecommissioned, w.Decommission(i).Status)
}

// What the platform manages runs in the platform's allocation; the tenant sees it, reaches it, pays what it uses and
// ends it, and the platform's admin operates it.
func TestThePlatformRunsWhatItManagesAndTheTenantPaysTheUsage(t *testing.T) {
	w, admin := newModesPlatform(t)
	admin.MustRun("orgs", "create", "platform")
	admin.MustRun("projects", "create", "managed", "--org", "platform", "--platform")
	user := w.UserShell(admin)
	create := []string{
		"instances", "create", harness.AppSlug, "--project", "main", "--version", "2.0.0",
		"--operating-mode", "platform_managed",
	}
	user.Fails(6, "insufficient_capacity", create...)
	lent := harness.AsJSON[client.Allocation](admin, "allocations", "create", "--project", "managed", "--cpu", "1",
		"--memory-mib", "256")
	i := harness.AsJSON[client.AppInstance](user, append(create, "--wait")...)
	require.EqualValues(t, "platform_shared", i.TenantBoundaryMode)
	require.Equal(t, lent.ID, i.Members[0].AllocationID)
	w.RequireAnswer(i)
	require.Equal(t, 1, w.ContainersOn(w.Agent, i))
	user.Fails(4, "", "instances", "stop", i.ID, "--project", "main")
	page, err := io.ReadAll(request(w.Ctx, t, http.MethodGet, user.Forward(i.ID, "--project", "main", "http"), nil).Body)
	require.NoError(t, err)
	require.Contains(t, string(page), harness.FirstGreeting)

	admin.MustRun("instances", "stop", i.ID, "--project", "main", "--wait")
	admin.MustRun("instances", "start", i.ID, "--project", "main", "--wait")
	require.Equal(t, client.AppInstanceStatusDecommissioned, harness.AsJSON[client.AppInstance](user, "instances",
		"decommission", i.ID, "--project", "main", "--wait").Status)
	require.Positive(t, harness.UsageCost(t, w.FinalPostings(i)).Sign())
	admin.MustRun("allocations", "release", lent.ID, "--project", "managed")
}
