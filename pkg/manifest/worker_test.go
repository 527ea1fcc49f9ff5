package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

func TestAnAppOfAnExternalWorkerNamesItsTasks(t *testing.T) {
	m, err := manifest.Parse([]byte(manifesttest.External("cluster")))
	require.NoError(t, err)
	require.Equal(t, []string{manifest.FeatureExternalWorker, manifest.SchemaV1}, m.Features())
	require.Empty(t, m.Images())
	stored, err := m.JSON()
	require.NoError(t, err)
	again, err := manifest.FromJSON(stored)
	require.NoError(t, err)
	c := again.Version.ExternalWorkerContract
	require.Equal(t, []string{"install", "start"}, c.Task(manifest.TaskDeploy).Phases)
	require.Equal(t, manifest.TaskDeploy, c.Task(manifest.TaskStart).Kind, "a worker without start deploys again")
	c.Tasks = c.Tasks[:2]
	require.Nil(t, c.Task(manifest.TaskStop))
	require.Equal(t, []string{"controller"}, c.Roles(1))
	require.Equal(t, []string{"controller", "worker", "worker"}, c.Roles(3))
	require.Nil(t, c.Roles(0))
	require.Nil(t, c.Roles(5))
	require.Equal(t, 3, c.Component("worker").Max)
	require.Nil(t, c.Component("head"))
}

func TestAContractThatNoWorkerCanKeepIsRefused(t *testing.T) {
	for name, c := range map[string]struct{ from, to, pointer string }{
		"a container app":  {"slurm", "launchable_oci", ""},
		"no contract":      {"external_worker_contract", "config_schema", "/version/external_worker_contract"},
		"no deploy":        {"kind: deploy", "kind: start", "/version/external_worker_contract/tasks"},
		"a kind twice":     {"kind: stop", "kind: deploy", "/version/external_worker_contract/tasks/3/kind"},
		"a role twice":     {"role: worker", "role: controller", "/version/external_worker_contract/components/1/role"},
		"min above max":    {"min: 1, max: 1", "min: 2, max: 1", "/version/external_worker_contract/components/0/min"},
		"no member at all": {"min: 1, max: 1", "min: 0, max: 1", "/version/external_worker_contract/components"},
		"managed by the platform": {
			"runtime_backend: slurm}", "runtime_backend: slurm, supported_modes: {operating_modes: [platform_managed], " +
				"control_plane_scopes: [platform]}}", "/app/supported_modes/operating_modes/0",
		},
		"secret parameters": {
			"{type: string}", "{type: string, writeOnly: true}", "/version/parameters/properties/partition",
		},
	} {
		t.Run(name, func(t *testing.T) {
			doc := manifesttest.External("cluster")
			require.Contains(t, doc, c.from)
			_, err := manifest.Parse([]byte(strings.ReplaceAll(doc, c.from, c.to)))
			require.Error(t, err)
			var pointers []string
			for _, f := range fault.As(err).Fields {
				pointers = append(pointers, f.Pointer)
			}
			if c.pointer != "" {
				require.Contains(t, pointers, c.pointer)
			}
		})
	}
}
