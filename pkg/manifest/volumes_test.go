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

const volumes = `    volumes:
      - {name: data, path: /data, size_mib: {min: 16, default: 64, max: 1024}, snapshot_on_upgrade: true}
      - {name: models, path: /models, size_mib: {min: 16, default: 16, max: 1048576}, scope: project, read_only: true}
`

func withVolumes(t *testing.T, text string) string {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join("testdata", "jupyter.yaml"))
	require.NoError(t, err)
	return strings.Replace(string(doc), "    resources:", text+"    resources:", 1)
}

func parsedVolumes(t *testing.T) manifest.Manifest {
	t.Helper()
	m, err := manifest.Parse([]byte(withVolumes(t, volumes)))
	require.NoError(t, err)
	return m
}

// chosenVolumes names a volume for each of the project that the version needs.
func chosenVolumes(m manifest.Manifest) []manifest.VolumeChoice {
	var chosen []manifest.VolumeChoice
	for _, v := range m.Volumes() {
		if v.Scope == manifest.VolumeOfProject {
			chosen = append(chosen, manifest.VolumeChoice{Name: v.Name, VolumeID: "v1", SizeMiB: 512})
		}
	}
	return chosen
}

func inputs() manifest.Inputs {
	return manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}}
}

func TestVolumesNeedTheirFeature(t *testing.T) {
	m := parsedVolumes(t)
	require.Contains(t, m.Features(), manifest.FeatureVolumes)
	require.Contains(t, manifest.KnownFeatures(), manifest.FeatureVolumes)
}

func TestVolumesAreLoweredAsChosen(t *testing.T) {
	m := parsedVolumes(t)
	chosen := manifest.Choice{Volumes: []manifest.VolumeChoice{
		{Name: "data", SizeMiB: 128}, {Name: "models", VolumeID: "v1", SizeMiB: 512},
	}}
	require.NoError(t, m.CheckChoice(chosen))
	services, err := manifest.Lower(m, inputs(), manifest.Shape{Volumes: chosen.Volumes})
	require.NoError(t, err)
	data, models := services[0].GetVolumes()[0], services[0].GetVolumes()[1]
	require.Equal(t, uint64(128<<20), data.GetSizeBytes())
	require.True(t, data.GetSnapshotOnUpgrade())
	require.Empty(t, data.GetVolumeId())
	require.Equal(t, "v1", models.GetVolumeId())
	require.True(t, models.GetReadOnly())
	require.Equal(t, chosen.Volumes, m.ChoiceOf(services).Volumes)

	services, err = manifest.Lower(m, inputs(), manifest.Shape{Volumes: chosen.Volumes[1:]})
	require.NoError(t, err)
	require.Equal(t, uint64(64<<20), services[0].GetVolumes()[0].GetSizeBytes(), "the default")
}

func TestVolumesThatTheVersionDoesNotHaveAreRefused(t *testing.T) {
	m := parsedVolumes(t)
	for pointer, chosen := range map[string][]manifest.VolumeChoice{
		"/volumes/0/name":      {{Name: "other"}},
		"/volumes/0/size_mib":  {{Name: "data", SizeMiB: 4096}},
		"/volumes/0/volume_id": {{Name: "data", VolumeID: "v1"}},
	} {
		err := m.CheckChoice(manifest.Choice{Volumes: chosen})
		require.Error(t, err)
		require.Equal(t, pointer, fault.As(err).Fields[0].Pointer)
		_, err = manifest.Lower(m, inputs(), manifest.Shape{Volumes: chosen})
		require.Error(t, err)
	}
	_, err := manifest.Lower(m, inputs(), manifest.Shape{})
	require.Contains(t, fault.As(err).Fields[0].Reason, "needs the id of a volume of the project")
}

func TestManifestThatMisplacesVolumesIsRefused(t *testing.T) {
	for why, text := range map[string]string{
		"must be at least 16":    "{name: data, path: /data, size_mib: {min: 1, default: 64, max: 1024}}",
		"platform's own":         "{name: data, path: /etc/hosts, size_mib: 64}",
		"neither /etc":           "{name: data, path: /etc, size_mib: 64}",
		"belongs to volumes of":  "{name: data, path: /data, size_mib: 64, scope: project, snapshot_on_upgrade: true}",
		"min ≤ default":          "{name: data, path: /data, size_mib: {min: 64, default: 16, max: 128}}",
		"clean absolute path":    "{name: data, path: /data/../x, size_mib: 64}",
		"lies in another volume": "{name: data, path: /a, size_mib: 64}\n      - {name: more, path: /a/b, size_mib: 64}",
		"stands twice":           "{name: data, path: /a, size_mib: 64}\n      - {name: data, path: /b, size_mib: 64}",
		"image or scratch":       "{name: data, path: /tmp/x, size_mib: 64}",
	} {
		_, err := manifest.Parse([]byte(withVolumes(t, "    volumes:\n      - "+text+"\n")))
		require.Error(t, err, why)
		var reasons []string
		for _, f := range fault.As(err).Fields {
			reasons = append(reasons, f.Reason)
		}
		require.Contains(t, strings.Join(reasons, "\n"), why)
	}
}

func TestServicesShareAVolumeByItsName(t *testing.T) {
	const first = "        volumes: [{name: data, path: /data, size_mib: 64}]\n        resources:"
	parse := func(second string) error {
		head, tail, found := strings.Cut(chat(t), "        resources:")
		require.True(t, found)
		tail = strings.Replace(tail, "        resources:", "        volumes: ["+second+"]\n        resources:", 1)
		_, err := manifest.Parse([]byte(head + first + tail))
		return err
	}
	require.NoError(t, parse("{name: data, path: /elsewhere, size_mib: 64, read_only: true}"))
	err := parse("{name: data, path: /elsewhere, size_mib: 128}")
	require.Error(t, err)
	require.Equal(t, "/version/runtime_profile/services/1/volumes/0", fault.As(err).Fields[0].Pointer)
}

// The hub's keys alone give a workload no volume, no other size and no other place.
func TestAdmitsComparesVolumes(t *testing.T) {
	for what, change := range map[string]func(*protocol.Service){
		"another path":    func(s *protocol.Service) { s.Volumes[0].Path = "/usr" },
		"another size":    func(s *protocol.Service) { s.Volumes[0].SizeBytes = 1 << 40 },
		"not read-only":   func(s *protocol.Service) { s.Volumes[1].ReadOnly = false },
		"no snapshot":     func(s *protocol.Service) { s.Volumes[0].SnapshotOnUpgrade = false },
		"a further one":   func(s *protocol.Service) { s.Volumes = append(s.Volumes, s.Volumes[0]) },
		"none":            func(s *protocol.Service) { s.Volumes = nil },
		"of the project":  func(s *protocol.Service) { s.Volumes[0].VolumeId = "v1" },
		"of the instance": func(s *protocol.Service) { s.Volumes[1].VolumeId = "" },
	} {
		t.Run(what, func(t *testing.T) {
			world := newWorld(t, "org/acme/", "acme")
			env, verified := world.verify(t, withVolumes(t, volumes))
			w := admittedWorkload(t, env, verified)
			require.NoError(t, manifest.Admits(verified, w))
			change(w.GetServices()[0])
			require.Error(t, manifest.Admits(verified, w))
		})
	}
}
