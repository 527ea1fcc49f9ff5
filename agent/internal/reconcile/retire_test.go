package reconcile

import (
	"context"
	"crypto/ed25519"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

// removals are the machine's answers while a member is retired: where something of it is left, and whether its removal
// takes that away.
type removals struct {
	left    string
	removed bool
}

func (r *removals) listed(where string) ([]string, error) {
	if r.left == where {
		return []string{where + " m1.1"}, nil
	}
	return nil, nil
}

type leftContainers struct {
	Containers
	*removals
}

func (c leftContainers) RemoveMember(context.Context, string) error {
	c.removed = true
	return nil
}

func (c leftContainers) Leftovers(context.Context, string) ([]string, error) {
	return c.listed("container")
}

type leftNetwork struct {
	Network
	*removals
}

func (n leftNetwork) RemoveMember(context.Context, string) error          { return nil }
func (n leftNetwork) Leftovers(context.Context, string) ([]string, error) { return n.listed("rule") }

type leftVolumes struct {
	Volumes
	*removals
}

func (v leftVolumes) RemoveMember(context.Context, string) error { return nil }
func (v leftVolumes) Leftovers(string) ([]string, error)         { return v.listed("volume") }

type noInstallations struct{ Environments }

func (noInstallations) RemoveMember(context.Context, string) error { return nil }

// A removal that says nothing of what it leaves is no proof: the machine is asked afterwards, and all of its answers
// count.
func TestLaw09NoProofIsStoredWhileAnythingOfAMemberIsLeft(t *testing.T) {
	store, err := state.Open(filepath.Join(t.TempDir(), "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	require.NoError(t, store.Identify(uuid.NewString(), protocol.NewEd25519Signer(key)))
	require.NoError(t, store.UpdateMember("m1", func(*state.Member) {}))
	source, err := state.MachineTime()
	require.NoError(t, err)
	on := &removals{}
	r := &Reconciler{store: store, clock: state.NewClock(store, source, time.Time{}), machine: Machine{
		Containers: leftContainers{removals: on}, Network: leftNetwork{removals: on}, Volumes: leftVolumes{removals: on},
		Environments: noInstallations{},
	}}
	for _, on.left = range []string{"container", "rule", "volume"} {
		require.ErrorContains(t, r.retire(t.Context(), agent.RetireMember{MemberID: "m1"}), on.left+" m1.1")
		m, known := store.Member("m1")
		require.True(t, known)
		require.Nil(t, m.Removal, on.left)
	}
	require.True(t, on.removed, "what a crash has left is removed")
	on.left = ""
	require.NoError(t, r.retire(t.Context(), agent.RetireMember{MemberID: "m1"}))
	m, _ := store.Member("m1")
	require.NotNil(t, m.Removal)
}
