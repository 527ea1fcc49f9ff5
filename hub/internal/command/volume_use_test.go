package command_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/manifest"
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
