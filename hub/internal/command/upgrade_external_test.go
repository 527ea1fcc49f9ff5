package command_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

// An upgrade of an app that an external worker operates is refused where the members that it has are not those of the
// next version, or where another backend would operate them.
func TestAnUpgradeOfAnExternalWorkerKeepsToTheNextVersion(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(2) // a controller and a worker
	upgrade := func(version string, changes ...string) error {
		t.Helper()
		w.PublishWorker(strings.NewReplacer(append(changes, "version: 1.0.0", "version: "+version)...).
			Replace(manifesttest.External("cluster")))
		_, err := w.Commands().UpgradeInstance(t.Context(), w.Meta("to"+version), command.UpgradeInstanceInput{
			ProjectID: w.Project.ID, InstanceID: i.ID, Version: version,
		})
		return err
	}
	for _, test := range []struct{ name, from, to, reason string }{
		{
			"role gone", "role: worker, min: 0", "role: node, min: 0",
			"allows 0 to 0 members of the role worker; the instance has 1",
		},
		{
			"too few", "role: worker, min: 0", "role: worker, min: 2",
			"allows 2 to 3 members of the role worker; the instance has 1",
		},
		{
			"new role", "{role: worker", "{role: node, min: 1, max: 1}, {role: worker",
			"allows 1 to 1 members of the role node; the instance has 0",
		},
	} {
		err := upgrade("1.1."+strings.ReplaceAll(test.name, " ", ""), test.from, test.to)
		requireCode(t, "members_out_of_bounds", err)
		require.Equal(t, []fault.Field{{Pointer: "/target_version", Reason: test.reason}}, fault.As(err).Fields, test.name)
	}
	requireCode(t, "mode_unsupported", upgrade("1.2.0", "runtime_backend: slurm", "runtime_backend: ray", "kind: slurm",
		"kind: ray"))
	require.Equal(t, i.Revision, w.Get(i.ID).Revision, "nothing changed")
	require.NoError(t, upgrade("1.3.0", "max: 3", "max: 1"))
}
