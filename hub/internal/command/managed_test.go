package command_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// platform is the platform's project.
func (w *world) platform() iam.Project {
	w.T.Helper()
	org, _ := w.NewTenant("platform")
	p, err := w.Commands().CreateProject(w.T.Context(), w.Admin("platform"), iam.Project{
		OrgID: org.OrgID, Slug: "managed", DisplayName: "Managed", Platform: true,
	})
	require.NoError(w.T, err)
	return p
}

// lends makes an allocation of the platform.
func (w *world) lends(p iam.Project) capacity.Allocation {
	w.T.Helper()
	in := w.AllocationInput()
	in.ProjectID = p.ID
	a, err := w.Commands().CreateAllocation(w.T.Context(), w.Admin("lend"+db.NewID()), in)
	require.NoError(w.T, err)
	return a
}

// managed asks for an instance of a version that the platform manages.
func (w *world) managed(allocationIDs ...string) (instance.Instance, error) {
	w.T.Helper()
	if w.Count(`SELECT count(*) FROM app_versions WHERE version = '3.0.0'`) == 0 {
		verified, env := w.Sign(strings.NewReplacer("version: 1.0.0", "version: 3.0.0", "runtime_backend: launchable_oci",
			"runtime_backend: launchable_oci, supported_modes: {operating_modes: [platform_managed], "+
				"control_plane_scopes: [platform]}").Replace(commandtest.Manifest()))
		w.PublishVersion("3.0.0", verified, env)
	}
	in := w.InstanceInput()
	in.Version, in.AllocationIDs = "3.0.0", allocationIDs
	return w.Commands().CreateInstance(w.T.Context(), w.Meta("managed"+db.NewID()), in)
}

func TestOnlyAPlatformAdminMakesThePlatformsOneProject(t *testing.T) {
	w := newWorld(t)
	wanted := iam.Project{OrgID: w.Project.OrgID, Slug: "mine", DisplayName: "Mine", Platform: true}
	_, err := w.Commands().CreateProject(t.Context(), w.Meta("tenant"), wanted)
	require.True(t, fault.Is(err, fault.Forbidden), "%v", err)
	require.True(t, w.platform().Platform)
	_, err = w.Commands().CreateProject(t.Context(), w.Admin("second"), wanted)
	require.EqualValues(t, "already_exists", fault.As(err).Code)
}

func TestWhatThePlatformManagesRunsInItsAllocationsAndTheTenantPaysForTheApp(t *testing.T) {
	w := newWorld(t)
	own := w.Allocation()
	_, err := w.managed()
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code, "room of the tenant's is none of the platform's")
	platform := w.platform()
	lent := []string{w.lends(platform).ID, w.lends(platform).ID}
	_, err = w.managed(own.ID)
	require.EqualValues(t, "placement_managed", fault.As(err).Code)

	_, before := w.Wallet()
	i, err := w.managed()
	require.NoError(t, err)
	require.Equal(t, w.Project.ID, i.ProjectID)
	require.Equal(t, "platform_shared", i.Modes.TenantBoundaryMode)
	require.Contains(t, lent, i.Members[0].AllocationID)
	_, after := w.Wallet()
	require.Greater(t, after, before, "the tenant's wallet covers the app")
	payer := `SELECT count(*) FROM subjects WHERE id = $1 AND org_id = $2 AND project_id = $3`
	require.Equal(t, 1, w.Count(payer, i.Members[0].ID, w.Project.OrgID, w.Project.ID))
	require.Equal(t, 1, w.Count(payer, i.Members[0].AllocationID, platform.OrgID, platform.ID))

	dedicated := w.InstanceInput()
	dedicated.AllocationIDs = lent[:1]
	_, err = w.Commands().CreateInstance(t.Context(), w.Meta("dedicated"), dedicated)
	require.EqualValues(t, "allocation_unknown", fault.As(err).Code, "a tenant runs nothing of its own there")
	admin := w.Admin("release")
	_, err = w.Commands().ReleaseAllocation(t.Context(), admin, platform.ID, i.Members[0].AllocationID)
	require.EqualValues(t, "allocation_in_use", fault.As(err).Code)
}

// A slice that no hardware keeps apart, and a node that serves one org at a time, are the allocation's org's alone.
func TestWhatThePlatformManagesSharesNothingThatOneOrgHasToHave(t *testing.T) {
	w := newWorld(t)
	w.lends(w.platform())
	w.conditions("user_namespaces_unavailable")
	_, err := w.managed()
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
	w.conditions()
	_, err = w.managed()
	require.NoError(t, err)
}

func TestATenantSeesAndEndsWhatThePlatformManagesAndDoesNotOperateIt(t *testing.T) {
	w := commandtest.New(t)
	i := w.Running()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE app_instances SET operating_mode = 'platform_managed',
			control_plane_scope = 'platform', tenant_boundary_mode = 'platform_shared' WHERE id = $1`, i.ID)
		return err
	})
	before := w.Get(i.ID)
	name := "renamed"
	operate := map[string]func(command.Meta) error{
		"stop": func(m command.Meta) error {
			_, err := w.Commands().StopInstance(t.Context(), m, w.Project.ID, i.ID)
			return err
		},
		"rename": func(m command.Meta) error {
			_, err := w.Commands().ChangeInstance(t.Context(), m, w.Project.ID, i.ID,
				command.ChangeInstanceInput{DisplayName: &name})
			return err
		},
	}
	for what, do := range operate {
		err := do(w.Meta("tenant " + what))
		require.True(t, fault.Is(err, fault.Forbidden), "%s: %v", what, err)
	}
	require.Equal(t, before, w.Get(i.ID), "what is refused changes nothing")

	admin := iam.Principal{Type: principal.User, ID: w.User.ID, PlatformAdmin: true}
	for _, what := range []string{"rename", "stop"} {
		m := w.Meta("platform " + what)
		m.Principal = admin
		require.NoError(t, operate[what](m), what)
	}
	ending, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Decommissioning, ending.Lifecycle.Status)
}
