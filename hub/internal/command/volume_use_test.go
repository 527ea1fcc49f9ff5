package command_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// A version may mount one volume twice, to write in one place and to read in another: that is a writer.
func TestAnInstanceThatAlsoReadsItsVolumeIsItsWriter(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	doc := strings.Replace(commandtest.Manifest(), "version: 1.0.0", "version: 2.2.0", 1)
	const volume = "{name: NAME, path: /NAME, size_mib: {min: 16, default: 16, max: 128}, scope: projectMORE}"
	doc = strings.Replace(doc, "    ports:", "    volumes: ["+
		strings.NewReplacer("NAME", "data", "MORE", "").Replace(volume)+", "+
		strings.NewReplacer("NAME", "view", "MORE", ", read_only: true").Replace(volume)+"]\n    ports:", 1)
	verified, env := w.Sign(doc)
	w.PublishVersion("2.2.0", verified, env)
	launch := func() error {
		in := w.InstanceInput()
		in.Version, in.Resources = "2.2.0", manifest.Choice{
			CPUMillis: 100, MemoryMiB: 16,
			Volumes: []manifest.VolumeChoice{{Name: "data", VolumeID: v.ID}, {Name: "view", VolumeID: v.ID}},
		}
		return second(w.Commands().CreateInstance(t.Context(), w.Meta("instance"+db.NewID()), in))
	}
	require.NoError(t, launch())
	requireCode(t, "volume_in_use", launch())
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM reserved_volumes WHERE NOT read_only`))
}

// A size that the project's volume does not have is refused, not passed over.
func TestLaw12NoSizeIsChosenForAVolumeOfTheProject(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	chosen := manifest.Choice{
		CPUMillis: 100, MemoryMiB: 16, Volumes: []manifest.VolumeChoice{{Name: "data", VolumeID: v.ID, SizeMiB: 128}},
	}
	in := w.InstanceInput()
	in.Version, in.Resources = "2.0.0", chosen
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta("launch"), in)
	w.requireRefused(err, manifest.CodeResourcesInvalid, "/volumes/0/size_mib")
	i, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "2.1.0", Resources: chosen})
	w.requireRefused(err, manifest.CodeResourcesInvalid, "/volumes/0/size_mib")
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "2.1.0"})
	require.NoError(t, err)
}
