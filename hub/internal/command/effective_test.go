package command_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

// TestEachModeDecidesWhereAnAppRunsWhoOperatesItWhoPaysAndWhoShares is the table of docs/design/effective-values.md.
func TestEachModeDecidesWhereAnAppRunsWhoOperatesItWhoPaysAndWhoShares(t *testing.T) {
	for boundary, c := range map[string]struct {
		mode, scope                 string
		lent, operates, mayBeJoined bool
	}{
		"project_isolated": {mode: "tenant_dedicated", scope: "project", operates: true},
		"tenant_shared":    {mode: "tenant_dedicated", scope: "tenant", operates: true, mayBeJoined: true},
		"platform_shared":  {mode: "platform_managed", scope: "platform", lent: true},
	} {
		t.Run(boundary, func(t *testing.T) {
			w := newWorld(t)
			platform, second := w.platform(), w.secondProject()
			w.Allocation()
			w.lends(platform)
			verified, env := w.Sign(strings.NewReplacer("version: 1.0.0", "version: 3.0.0", "runtime_backend: launchable_oci",
				"runtime_backend: launchable_oci, supported_modes: {operating_modes: [tenant_dedicated, platform_managed], "+
					"control_plane_scopes: [project, tenant, platform]}").Replace(commandtest.Manifest()))
			w.PublishVersion("3.0.0", verified, env)
			in := w.InstanceInput()
			in.Version, in.OperatingMode, in.ControlPlaneScope = "3.0.0", c.mode, c.scope
			i, err := w.Commands().CreateInstance(t.Context(), w.Meta("k"), in)
			require.NoError(t, err)
			require.Equal(t, instance.Modes{
				OperatingMode: c.mode, ControlPlaneScope: c.scope, TenantBoundaryMode: boundary,
				RuntimeBackend: manifest.RuntimeLaunchableOCI,
			}, i.Modes)

			holder := w.Project
			if c.lent {
				holder = platform
			}
			payer := `SELECT count(*) FROM subjects WHERE id = $1 AND org_id = $2 AND project_id = $3`
			require.Equal(t, 1, w.Count(payer, i.Members[0].AllocationID, holder.OrgID, holder.ID), "the allocation")
			require.Equal(t, 1, w.Count(payer, i.Members[0].ID, w.Project.OrgID, w.Project.ID), "the app")

			name := "renamed"
			_, err = w.Commands().ChangeInstance(t.Context(), w.Meta("rename"), w.Project.ID, i.ID,
				command.ChangeInstanceInput{DisplayName: &name})
			require.Equal(t, c.operates, err == nil, "%v", err)
			_, err = w.Commands().AttachInstance(t.Context(), w.Meta("attach"), second.ID, i.ID)
			require.Equal(t, c.mayBeJoined, err == nil, "%v", err)
		})
	}
}

// TestEachBackendDecidesWhoRunsAnApp: apps of nodes share an allocation and are metered; those of an external worker
// have tasks, whole allocations, and no meter of their own.
func TestEachBackendDecidesWhoRunsAnApp(t *testing.T) {
	onNodes := map[string]string{
		manifest.RuntimeLaunchableOCI: manifesttest.Document("demo", commandtest.Image),
		manifest.RuntimeDockerCompose: manifesttest.Services("demo", commandtest.Image),
	}
	backends := []string{manifest.RuntimeLaunchableOCI, manifest.RuntimeDockerCompose, "slurm", "ray", "k8s", "bare_metal"}
	for _, backend := range backends {
		t.Run(backend, func(t *testing.T) {
			w := newWorld(t)
			room := w.AllocationInput()
			room.CPUCores = 2
			a, err := w.Commands().CreateAllocation(t.Context(), w.Meta("room"), room)
			require.NoError(t, err)
			in := command.CreateInstanceInput{
				ProjectID: w.Project.ID, AppSlug: "demo", Version: "2.0.0", DisplayName: "o", AllocationIDs: []string{a.ID},
			}
			doc, onNode := onNodes[backend]
			if onNode {
				verified, env := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: 2.0.0", 1))
				w.PublishVersion("2.0.0", verified, env)
			} else {
				in.AppSlug = "cluster"
				w.PublishWorker(strings.NewReplacer("slurm", backend, "version: 1.0.0", "version: 2.0.0").Replace(
					manifesttest.External("cluster")))
			}
			i, err := w.Commands().CreateInstance(t.Context(), w.Meta("first"), in)
			require.NoError(t, err)
			require.Equal(t, backend, i.Modes.RuntimeBackend)
			_, err = w.Commands().CreateInstance(t.Context(), w.Meta("second"), in)
			tasks := w.tasks(i, lifecycle.TaskPending)
			told, metered := 0, w.Count(`SELECT count(*) FROM subjects WHERE id = $1`, i.Members[0].ID)
			w.Tx(func(ctx context.Context, tx db.Tx) error {
				members, err := instance.SnapshotFor(ctx, tx, w.Node)
				told = len(members)
				return err
			})
			if !onNode {
				require.EqualValues(t, "insufficient_capacity", fault.As(err).Code, "the member has the whole allocation")
				require.Equal(t, "deploy", tasks[0].Kind)
				require.Equal(t, []int{0, 0}, []int{told, metered})
				return
			}
			require.NoError(t, err)
			require.Empty(t, tasks)
			require.Equal(t, []int{2, 1}, []int{told, metered})
		})
	}
}
