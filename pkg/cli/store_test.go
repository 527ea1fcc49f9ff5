package cli

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Commands run beside each other, as in scripts: none loses what another has stored.
func TestCommandsChangeTheStoreOneAfterTheOther(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gpuaas", "contexts.yaml")
	const commands = 50
	var all sync.WaitGroup
	failed := make([]error, commands)
	for n := range commands {
		all.Go(func() {
			failed[n] = changeStore(path, func(s *store) error {
				s.Contexts[fmt.Sprint(n)] = hubContext{URL: "https://hub.example"}
				return nil
			})
		})
	}
	all.Wait()
	for _, err := range failed {
		require.NoError(t, err)
	}
	s, err := loadStore(path)
	require.NoError(t, err)
	require.Len(t, s.Contexts, commands)
}
