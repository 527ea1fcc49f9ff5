package runtime

import (
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
)

// containerd would map the files of a layer to the user ids that these labels name.
func TestAManifestDoesNotChooseTheUserIDsOfItsFiles(t *testing.T) {
	var info snapshots.Info
	l := imageLayer{name: "layer", desc: ocispec.Descriptor{Annotations: map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:0:65536",
		snapshots.LabelSnapshotGIDMapping: "0:0:65536",
		snapshots.LabelSnapshotRef:        "another layer",
		"containerd.io/snapshot/other":    "kept",
	}}}
	require.NoError(t, l.labels()(&info))
	require.Equal(t, map[string]string{
		snapshots.LabelSnapshotRef: "layer", "containerd.io/snapshot/other": "kept",
	}, info.Labels)
}
