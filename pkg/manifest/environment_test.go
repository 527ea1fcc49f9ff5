package manifest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const environment = "    environment: {path: /opt/environment, python: /usr/bin/python3, max_size_mib: 1024}\n"

func withEnvironment(t *testing.T, text string) string {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join("testdata", "jupyter.yaml"))
	require.NoError(t, err)
	return strings.Replace(string(doc), "    resources:", text+"    resources:", 1)
}

func TestAnEnvironmentIsAServiceThatEndsBeforeTheMainOneStarts(t *testing.T) {
	m, err := manifest.Parse([]byte(withEnvironment(t, environment)))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureEnvironments)
	require.Contains(t, manifest.KnownFeatures(), manifest.FeatureEnvironments)
	shape := manifest.Shape{CPUMillis: 2000, Environment: []string{"Uvicorn[standard] >=0.30", "numpy"}}
	services, err := manifest.Lower(m, inputs(), shape)
	require.NoError(t, err)
	require.Len(t, services, 2)
	main, builder := services[0], services[1]
	want := []string{"numpy", "uvicorn[standard]>=0.30"}
	require.Equal(t, want, main.GetEnvironment().GetRequirements())
	require.Equal(t, manifest.EnvironmentService, main.GetDependsOn()[0].GetService())
	require.False(t, main.GetEnvironment().GetBuilds())
	require.Equal(t, manifest.EnvironmentService, builder.GetName())
	require.True(t, builder.GetEnvironment().GetBuilds())
	require.Equal(t, main.GetImage(), builder.GetImage())
	require.Equal(t, main.GetUser(), builder.GetUser())
	require.EqualValues(t, 2000, builder.GetResources().GetCpuMillis())
	require.EqualValues(t, manifest.DefaultBuildTimeoutSeconds, builder.GetEnvironment().GetBuildTimeoutSeconds())
	require.Empty(t, builder.GetEnv(), "nothing of the tenant's parameters")
	require.Equal(t, want, m.ChoiceOf(services).Environment)

	alone, err := manifest.Lower(m, inputs(), manifest.Shape{})
	require.NoError(t, err)
	require.Len(t, alone, 1)
	require.Nil(t, alone[0].GetEnvironment())
}

func TestAnUpgradeKeepsOrChangesAnEnvironment(t *testing.T) {
	m, err := manifest.Parse([]byte(withEnvironment(t, environment)))
	require.NoError(t, err)
	had := manifest.Choice{Environment: []string{"numpy"}}
	require.Equal(t, []string{"numpy"}, manifest.Choice{}.Else(had).Environment)
	require.Equal(t, []string{"scipy"}, manifest.Choice{Environment: []string{"scipy"}}.Else(had).Environment)
	require.Empty(t, manifest.Choice{Environment: []string{}}.Else(had).Environment)
	require.Equal(t, []string{"numpy"}, had.For(m).Environment)
	plain := parsed(t)
	require.Empty(t, had.For(plain).Environment)
	for pointer, check := range map[string]error{
		"/environment/requirements":   plain.CheckChoice(had),
		"/environment/requirements/1": m.CheckChoice(manifest.Choice{Environment: []string{"a", "-r x"}}),
	} {
		require.Equal(t, manifest.CodeResourcesInvalid, fault.As(check).Code)
		require.Equal(t, pointer, fault.As(check).Fields[0].Pointer)
	}
	require.NoError(t, plain.CheckChoice(manifest.Choice{Environment: []string{}}))
}

// A hub whose online keys are stolen can install what a tenant could choose, and nothing else.
func TestANodeAdmitsNoOtherEnvironment(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	doc := withEnvironment(t, environment)
	env, v := w.verify(t, doc)
	m, err := manifest.Parse([]byte(doc))
	require.NoError(t, err)
	fresh := func() *protocol.Workload {
		workload := admittedWorkload(t, env, v)
		workload.Services, err = manifest.Lower(m, inputs(), manifest.Shape{Environment: []string{"numpy"}})
		require.NoError(t, err)
		workload.ParametersJson = `{"password_hash":"` + goodHash + `"}`
		return workload
	}
	require.NoError(t, manifest.Admits(v, fresh()))
	for name, change := range map[string]func([]*protocol.Service) []*protocol.Service{
		"no builder":   func(s []*protocol.Service) []*protocol.Service { return s[:1] },
		"two builders": func(s []*protocol.Service) []*protocol.Service { return append(s, s[1]) },
		"another command": func(s []*protocol.Service) []*protocol.Service {
			s[1].Command = []string{"/bin/sh"}
			return s
		},
		"an option": func(s []*protocol.Service) []*protocol.Service {
			for _, x := range s {
				x.Environment.Requirements = []string{"--index-url=https://evil.example"}
			}
			return s
		},
		"not canonical": func(s []*protocol.Service) []*protocol.Service {
			for _, x := range s {
				x.Environment.Requirements = []string{"NumPy"}
			}
			return s
		},
		"larger": func(s []*protocol.Service) []*protocol.Service {
			s[1].Environment.SizeBytes++
			return s
		},
	} {
		workload := fresh()
		workload.Services = change(workload.GetServices())
		require.Equal(t, manifest.CodeNotAdmitted, fault.As(manifest.Admits(v, workload)).Code, name)
	}
}

func TestAnEnvironmentHasAPlaceOfItsOwn(t *testing.T) {
	for pointer, text := range map[string]string{
		"/version/runtime_profile/environment/path": "    environment: {path: /tmp/x, python: /usr/bin/python3, " +
			"max_size_mib: 64}\n",
		"/version/runtime_profile/environment/python": "    environment: {path: /opt/e, python: /usr/../python3, " +
			"max_size_mib: 64}\n",
		"/version/runtime_profile/environment/max_size_mib": "    environment: {path: /opt/e, python: /p, max_size_mib: 1}\n",
	} {
		_, err := manifest.Parse([]byte(withEnvironment(t, text)))
		require.Error(t, err, pointer)
		require.Contains(t, pointers(fault.As(err)), pointer)
	}
	reserved := strings.Replace(withEnvironment(t, environment), "verbose: {type: boolean}",
		"package_index: {type: string}", 1)
	_, err := manifest.Parse([]byte(reserved))
	require.Contains(t, pointers(fault.As(err)), "/version/parameters/properties/package_index")
}
