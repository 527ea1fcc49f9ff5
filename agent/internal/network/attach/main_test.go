package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

func TestABadRequestIsAnsweredAndTheNextOneServed(t *testing.T) {
	dir := t.TempDir()
	c := network.Config{
		Bridge: "gpattach0", CIDR: "10.221.0.0/24", StateDir: filepath.Join(dir, "state"),
		SharedDir: filepath.Join(dir, "shared"),
	}
	var out bytes.Buffer
	// No port 0 can be published, and nothing has the network that is to be removed.
	require.NoError(t, run(t.Context(), c, strings.NewReader(`{"id":"a"}{"id":"a","remove":true}`), &out))
	var got []reply
	for d := json.NewDecoder(&out); d.More(); {
		var r reply
		require.NoError(t, d.Decode(&r))
		got = append(got, r)
	}
	require.Len(t, got, 3)
	require.Equal(t, "paths", got[0].Step)
	require.Equal(t, filepath.Join(dir, "state", "ns"), filepath.Dir(got[0].NetNSPath))
	require.Equal(t, "done", got[1].Step)
	require.Contains(t, got[1].Error, "port")
	require.Equal(t, reply{Step: "done"}, got[2])
}
