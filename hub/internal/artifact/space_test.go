package artifact

import (
	"math"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/require"
)

// Pushes go on while the disk is read: what they link is not in what is found there.
func TestABlobThatIsLinkedWhileTheDiskIsReadIsCounted(t *testing.T) {
	const repository = "org/acme/app/runtime"
	s := &space{owners: map[string]*ownerSpace{}, uploads: map[string]*upload{}}
	s.setLimit(repository, math.MaxInt64)
	gone, found, late := digest.FromString("gone"), digest.FromString("found"), digest.FromString("late")
	require.NoError(t, s.link(repository, gone, 1))
	require.NoError(t, s.link(repository, found, 10))

	s.begin()
	require.NoError(t, s.link(repository, found, 10))
	require.NoError(t, s.link(repository, late, 100))
	s.replace(map[string]map[digest.Digest]int64{"acme": {found: 10}})
	require.EqualValues(t, 110, s.used("acme"))
	require.NoError(t, s.link(repository, late, 100))
	require.EqualValues(t, 110, s.used("acme"), "each blob once")
}
