package state_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestStateOfAnotherNodeIsNotTouched(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	require.True(t, fault.Is(s.Identify("node-2", nil), fault.Conflict))
	require.Equal(t, nodeID, s.NodeID())
}

func TestSecondOpenerIsTurnedAway(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	open(t, dir, m)
	_, err := state.Open(dir, state.Options{MinFreeBytes: 1})
	require.True(t, fault.Is(err, fault.Unavailable))
	require.ErrorContains(t, err, "stop that one first")
}

func TestManyDocumentsFitOneTransaction(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	var ws []*protocol.Workload
	for i := range protocol.MaxParts {
		w := workload(fmt.Sprintf("member-%04d", i), 1)
		w.ParametersJson = string(make([]byte, 400))
		ws = append(ws, w)
	}
	v, parts := m.desired(1, ws...)
	require.NoError(t, s.AcceptState(v, parts))
	require.Len(t, s.Accepted().Parts, protocol.MaxParts)
}
