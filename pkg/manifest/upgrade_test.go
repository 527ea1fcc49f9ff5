package manifest_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// startsFirst is the sample with the strategy start_first.
func startsFirst(t testing.TB) string {
	return strings.Replace(document(t), "version:\n", "version:\n  upgrade: {strategy: start_first}\n", 1)
}

func TestServicesThatShareNothingStartFirst(t *testing.T) {
	lowered := func(m manifest.Manifest, shape manifest.Shape) *protocol.Service {
		services, err := manifest.Lower(m, manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}}, shape)
		require.NoError(t, err)
		return services[0]
	}
	m, err := manifest.Parse([]byte(startsFirst(t)))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureStartFirst)
	require.NotContains(t, parsed(t).Features(), manifest.FeatureStartFirst)
	require.True(t, lowered(m, manifest.Shape{}).GetStartFirst())
	require.False(t, lowered(m, manifest.Shape{}).GetRecreate())
	require.True(t, lowered(m, manifest.Shape{Recreate: true}).GetRecreate())
	require.False(t, lowered(parsed(t), manifest.Shape{Recreate: true}).GetRecreate())
	require.False(t, lowered(parsed(t), manifest.Shape{}).GetStartFirst())

	chat := chatWith(t, "start_first")
	services, err := manifest.Lower(chat, manifest.Inputs{}, manifest.Shape{})
	require.NoError(t, err)
	for _, s := range services {
		require.Equal(t, len(s.GetVolumes()) == 0, s.GetStartFirst(), s.GetName())
	}
}

// site is a web server behind a proxy, with a database and a clean-up that is no dependency of any.
func site(image string, startsFirst ...string) *protocol.Workload {
	w := &protocol.Workload{Services: []*protocol.Service{
		{Name: "proxy", Image: "proxy", DependsOn: []*protocol.Dependency{
			{Service: "web", Condition: protocol.Dependency_SERVICE_HEALTHY},
		}},
		{Name: "web", Image: image, DependsOn: []*protocol.Dependency{
			{Service: "db"}, {Service: "migrate", Condition: protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY},
		}},
		{Name: "migrate", Image: "migrate"},
		{Name: "db", Image: "db", Volumes: []*protocol.VolumeMount{{Name: "data"}}},
	}}
	for _, s := range w.GetServices() {
		s.StartFirst = slices.Contains(startsFirst, s.GetName())
	}
	return w
}

func TestAServiceChangesWithThoseWhoseAddressItHas(t *testing.T) {
	changed := func(serves, next *protocol.Workload) (names []string, why string) {
		services, why := manifest.Changed(serves, next)
		for _, s := range services {
			names = append(names, s.GetName())
		}
		return names, why
	}
	all := []string{"proxy", "web", "migrate"}
	require.Equal(t, []any{[]string(nil), ""}, pair(changed(site("1", all...), site("1", all...))))
	require.Equal(t, []any{[]string{"proxy", "web"}, ""}, pair(changed(site("1", all...), site("2", all...))))
	require.Equal(t, []any{[]string{"web"}, ""}, pair(changed(site("1"), site("2"))), "the address stays")
	waits := site("2", all...)
	waits.Services[0].Recreate, waits.Services[1].Recreate = true, true
	require.Equal(t, []any{[]string(nil), ""}, pair(changed(site("2", all...), waits)), "how it starts is not what runs")

	next := site("1", all...)
	next.Services[2].Image = "migrate:2"
	require.Equal(t, []any{[]string{"migrate"}, ""}, pair(changed(site("1", all...), next)), "it has ended")
	next = site("1", all...)
	next.Services[3].Image = "db:2"
	require.Equal(t, []any{[]string{"db"}, "service db has volumes"}, pair(changed(site("1", all...), next)))
	next = site("2", all...)
	next.Services = next.Services[:3]
	_, why := changed(site("1", all...), next)
	require.Equal(t, "service db of the version before has volumes", why)
	next = site("2", all...)
	next.Services[1].Resources = &protocol.Resources{AcceleratorIds: []string{"gpu"}}
	_, why = changed(site("1", all...), next)
	require.Equal(t, "service web has accelerators", why)
	_, why = changed(&protocol.Workload{}, next)
	require.Equal(t, "no version serves", why)
}

func pair(values ...any) []any { return values }

// chatWith is an app of several services with a strategy.
func chatWith(t *testing.T, strategy string) manifest.Manifest {
	t.Helper()
	chat, err := os.ReadFile("testdata/chat.yaml")
	require.NoError(t, err)
	m, err := manifest.Parse([]byte(strings.Replace(string(chat), "version:\n",
		"version:\n  upgrade: {strategy: "+strategy+"}\n", 1)))
	require.NoError(t, err)
	return m
}

func TestAStrategyThatIsUnknownIsRefused(t *testing.T) {
	_, err := manifest.Parse([]byte(strings.Replace(startsFirst(t), "start_first", "stop_first", 1)))
	require.Equal(t, "/version/upgrade/strategy", fault.As(err).Fields[0].Pointer)

	_, err = manifest.Parse([]byte(strings.Replace(withVolumes(t, volumes), "version:\n",
		"version:\n  upgrade: {strategy: start_first}\n", 1)))
	require.ErrorContains(t, err, "contradicts")
	require.Equal(t, fault.Field{
		Pointer: "/version/upgrade/strategy",
		Reason:  "start_first needs a service without volumes, which two containers never share",
	}, fault.As(err).Fields[0])
}

// Law 14: two copies share neither an accelerator nor a volume, also where only the one that serves has it.
func TestLaw14NothingStartsBesideWhatHasAnAcceleratorOrAVolume(t *testing.T) {
	for has, give := range map[string]func(*protocol.Service){
		"accelerators": func(s *protocol.Service) {
			s.Resources = &protocol.Resources{AcceleratorIds: []string{"gpu"}}
		},
		"volumes": func(s *protocol.Service) { s.Volumes = []*protocol.VolumeMount{{Name: "data"}} },
	} {
		serves := site("1", "web")
		give(serves.GetServices()[1])
		_, why := manifest.Changed(serves, site("2", "web"))
		require.Equal(t, "service web of the version before has "+has, why)
	}
}
