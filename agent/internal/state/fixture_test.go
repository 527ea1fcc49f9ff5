package state_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// mesh signs what a hub would.
type mesh struct {
	t                  testing.TB
	root, state, lease ed25519.PrivateKey
	node               ed25519.PrivateKey
	bundle             protocol.Bundle
	epoch              uint64
}

const nodeID = "node-1"

func newMesh(t testing.TB) *mesh {
	t.Helper()
	key := func() ed25519.PrivateKey {
		_, k, err := ed25519.GenerateKey(rand.Reader)
		require.NoError(t, err)
		return k
	}
	m := &mesh{t: t, root: key(), state: key(), lease: key(), node: key(), epoch: 1}
	env := m.bundleEnvelope(1)
	b, err := protocol.VerifyBundle(env, protocol.Fingerprint(pub(m.root)))
	require.NoError(t, err)
	m.bundle = b
	return m
}

func pub(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

func (m *mesh) bundleEnvelope(version uint64) *protocol.Envelope {
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub(k)),
			Ed25519: pub(k),
		}}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "mesh.example", Version: version, Epoch: m.epoch, IssuedAt: timestamppb.New(noon),
		Roles: []*protocol.Role{role("root", m.root), role("state", m.state), role("lease", m.lease)},
	}, protocol.NewEd25519Signer(m.root))
	require.NoError(m.t, err)
	return env
}

func (m *mesh) resume(s *state.Store) error {
	return accept.Resume(s, protocol.Fingerprint(pub(m.root)), "", m.identity())
}

func (m *mesh) identity() protocol.NodeIdentity { return protocol.NewNodeIdentity(nodeID, pub(m.node)) }

func workload(member string, revision uint64) *protocol.Workload {
	return &protocol.Workload{Id: member, InstanceId: "i-" + member, Revision: revision, CorrelationId: "corr"}
}

// desired signs a state that names the workloads, and returns their documents.
func (m *mesh) desired(generation uint64,
	ws ...*protocol.Workload,
) (protocol.Verified[*protocol.DesiredState], [][]byte) {
	m.t.Helper()
	me := m.identity()
	d := &protocol.DesiredState{
		NodeId: nodeID, NodeKeySha256: me.KeySHA256[:], Epoch: m.epoch, Generation: generation,
		IssuedAt: timestamppb.New(noon),
	}
	var parts [][]byte
	for _, w := range ws {
		raw, err := proto.Marshal(w)
		require.NoError(m.t, err)
		sum := sha256.Sum256(raw)
		d.Parts = append(d.Parts, &protocol.PartRef{Id: w.GetId(), Sha256: sum[:], SizeBytes: uint64(len(raw))})
		parts = append(parts, raw)
	}
	env, err := protocol.SignMessage(protocol.PayloadState, d, protocol.NewEd25519Signer(m.state))
	require.NoError(m.t, err)
	v, err := protocol.VerifyState(env, m.bundle, me)
	require.NoError(m.t, err)
	return v, parts
}

func (m *mesh) leases(incarnation string, ls ...*protocol.Lease) protocol.Verified[*protocol.LeaseBatch] {
	m.t.Helper()
	env, err := protocol.SignMessage(protocol.PayloadLeases,
		&protocol.LeaseBatch{NodeId: nodeID, Incarnation: incarnation, Epoch: m.epoch, Leases: ls},
		protocol.NewEd25519Signer(m.lease))
	require.NoError(m.t, err)
	v, err := protocol.VerifyLeases(env, m.bundle, m.identity())
	require.NoError(m.t, err)
	return v
}

func lease(member string, no uint64) *protocol.Lease {
	return &protocol.Lease{
		MemberId: member, LeaseNo: no,
		ExpiresAt: timestamppb.New(noon.Add(time.Hour * time.Duration(no))),
	}
}

func open(t testing.TB, dir string, m *mesh) *state.Store {
	t.Helper()
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.NoError(t, m.resume(s))
	require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(m.node)))
	if !s.Bundle().Valid() {
		require.NoError(t, s.InitBundle(m.bundle))
	}
	return s
}

func woken(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
