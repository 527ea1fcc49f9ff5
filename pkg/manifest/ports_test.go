package manifest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestPortsAreChosenForThoseOfTheVersion(t *testing.T) {
	m := parsed(t)
	require.Equal(t, "http", m.Version.RuntimeProfile.Ports[0].Name)
	for name, c := range map[string]struct {
		ports  []manifest.PortChoice
		fields []fault.Field
	}{
		"one":              {[]manifest.PortChoice{{"http", 30001}}, nil},
		"left to the node": {[]manifest.PortChoice{{"http", 0}}, nil},
		"an unknown one": {
			[]manifest.PortChoice{{"http", 30001}, {"telepathy", 30002}},
			[]fault.Field{{Pointer: "/ports/1/name", Reason: "the version has no port of this name"}},
		},
		"one twice": {
			[]manifest.PortChoice{{"http", 30001}, {"http", 30002}},
			[]fault.Field{{Pointer: "/ports/0/name", Reason: "is named twice"}},
		},
		"too high a number": {
			[]manifest.PortChoice{{"http", 65536}},
			[]fault.Field{{Pointer: "/ports/0/host_port", Reason: "must be at most 65535"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := m.CheckChoice(manifest.Choice{Ports: c.ports})
			if c.fields == nil {
				require.NoError(t, err)
				return
			}
			require.Equal(t, manifest.CodeResourcesInvalid, fault.As(err).Code)
			require.Equal(t, c.fields, fault.As(err).Fields)
		})
	}
	two := m
	two.Version.RuntimeProfile.Ports = append(two.Version.RuntimeProfile.Ports, manifest.Port{Name: "admin", Container: 9})
	err := two.CheckChoice(manifest.Choice{Ports: []manifest.PortChoice{{"http", 30001}, {"admin", 30001}}})
	require.Equal(t, []fault.Field{{Pointer: "/ports/0/host_port", Reason: "is chosen twice"}}, fault.As(err).Fields)
	require.NoError(t, two.CheckChoice(manifest.Choice{Ports: []manifest.PortChoice{{"http", 0}, {"admin", 0}}}))
}

func TestAnUpgradeKeepsThePortsThatItDoesNotName(t *testing.T) {
	has := manifest.Choice{Ports: []manifest.PortChoice{{"http", 30001}, {"gone", 30002}}}
	require.Equal(t, []manifest.PortChoice{{"http", 30001}}, manifest.Choice{}.Else(has.For(parsed(t))).Ports)
	named := manifest.Choice{Ports: []manifest.PortChoice{{"http", 0}}}
	require.Equal(t, []uint32{0, 30002}, named.Else(has).HostPorts(), "0 gives the choice back to the node")
}

// Only a workload with a chosen port needs the feature: an older node runs the others.
func TestAChosenPortNeedsAFeatureOfTheNode(t *testing.T) {
	m := parsed(t)
	require.Equal(t, m.Features(), m.FeaturesFor(manifest.Choice{Ports: []manifest.PortChoice{{"http", 0}}}))
	chosen := manifest.Choice{Ports: []manifest.PortChoice{{"http", 30001}}}
	require.Contains(t, m.FeaturesFor(chosen), manifest.FeatureHostPorts)
	require.Subset(t, manifest.KnownFeatures(), m.FeaturesFor(chosen))
}

func TestANodeAdmitsAnyPortOfItsOwnAndNoOtherInside(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	env, v := w.verify(t, document(t))
	for name, c := range map[string]struct {
		change   func(*protocol.Port)
		admitted bool
	}{
		"the node's choice": {func(*protocol.Port) {}, true},
		"the tenant's":      {func(p *protocol.Port) { p.HostPort = 30001 }, true},
		"none that is":      {func(p *protocol.Port) { p.HostPort = 70000 }, false},
		"another inside":    {func(p *protocol.Port) { p.HostPort, p.ContainerPort = 30001, 22 }, false},
		"another exposure":  {func(p *protocol.Port) { p.HostPort, p.Expose = 30001, "public" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			workload := admittedWorkload(t, env, v)
			c.change(workload.GetServices()[0].GetPorts()[0])
			err := manifest.Admits(v, workload)
			if c.admitted {
				require.NoError(t, err)
				require.Equal(t, workload.GetServices()[0].GetPorts()[0].GetHostPort() != 0,
					len(v.Manifest().ChoiceOf(workload.GetServices()).Ports) == 1)
				return
			}
			require.Equal(t, manifest.CodeNotAdmitted, fault.As(err).Code, "%v", err)
		})
	}
}
