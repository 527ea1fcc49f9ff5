package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

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
