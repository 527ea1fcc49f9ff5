// Package accepttest signs what a hub and a publisher sign, for tests of what a node does with it.
package accepttest

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// NodeID is the node of a Mesh.
const NodeID = "node-1"

// Image is what a Mesh's workloads run.
const Image = "org/acme/web/runtime@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

// Mesh holds every key of a small mesh.
type Mesh struct {
	t testing.TB
	// Now is the time of all that is signed.
	Now                                             time.Time
	Root, State, Lease, Catalog, Publisher, NodeKey ed25519.PrivateKey
	Epoch                                           uint64
	// Bundles are those that were made, the newest one last.
	Bundles []protocol.Bundle
	// MinVersions are the lowest versions by app that bundles name which are made next.
	MinVersions map[string]string
	// Delegation of the publisher for workloads that are made next.
	Delegation *protocol.Envelope
	manifest   *protocol.Envelope
}

// New makes a mesh with its first bundle and a delegation of a year.
func New(t testing.TB, now time.Time) *Mesh {
	t.Helper()
	m := &Mesh{
		t:         t,
		Now:       now,
		Root:      Key(t),
		State:     Key(t),
		Lease:     Key(t),
		Catalog:   Key(t),
		Publisher: Key(t),
		NodeKey:   Key(t),
		Epoch:     1,
	}
	m.NextBundle(now)
	m.Delegate(now.AddDate(1, 0, 0))
	m.SignManifest(manifesttest.Document("web", Image))
	return m
}

// SignManifest signs the manifest of workloads that are made next, whatever it says.
func (m *Mesh) SignManifest(doc string) {
	m.t.Helper()
	env, err := protocol.Sign(protocol.PayloadManifest, []byte(doc), protocol.NewEd25519Signer(m.Publisher))
	require.NoError(m.t, err)
	m.manifest = env
}

// Key makes a key.
func Key(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, k, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	return k
}

// Public is the public half of a key.
func Public(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

// KeyID names a key.
func KeyID(k ed25519.PrivateKey) string { return protocol.KeyID(Public(k)) }

// Pin is the fingerprint of the root.
func (m *Mesh) Pin() string { return protocol.Fingerprint(Public(m.Root)) }

// Node is who the node is in signed documents.
func (m *Mesh) Node() protocol.NodeIdentity {
	return protocol.NewNodeIdentity(NodeID, Public(m.NodeKey))
}

// Bundle is the newest one.
func (m *Mesh) Bundle() protocol.Bundle { return m.Bundles[len(m.Bundles)-1] }

// NextBundle makes the next bundle with the present keys.
func (m *Mesh) NextBundle(issued time.Time, revoked ...string) protocol.Bundle {
	m.t.Helper()
	return m.RotatedBundle(issued, nil, revoked...)
}

// RotatedBundle is NextBundle where the root was another one before.
func (m *Mesh) RotatedBundle(issued time.Time, former ed25519.PrivateKey, revoked ...string) protocol.Bundle {
	m.t.Helper()
	b := &protocol.TrustBundle{
		TrustDomain:   "mesh.example",
		Version:       uint64(len(m.Bundles) + 1),
		Epoch:         m.Epoch,
		IssuedAt:      timestamppb.New(issued),
		RevokedKeyIds: revoked,
	}
	for app, version := range m.MinVersions {
		b.MinVersions = append(b.MinVersions, &protocol.MinVersion{AppSlug: app, Version: version})
	}
	for name, k := range map[string]ed25519.PrivateKey{
		protocol.RoleRoot: m.Root, protocol.RoleState: m.State, protocol.RoleLease: m.Lease, protocol.RoleCatalog: m.Catalog,
	} {
		key := &protocol.PublicKey{KeyId: KeyID(k), Ed25519: Public(k)}
		b.Roles = append(b.Roles, &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{key}})
	}
	signers := []protocol.Signer{protocol.NewEd25519Signer(m.Root)}
	if former != nil {
		signers = append(signers, protocol.NewEd25519Signer(former))
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, b, signers...)
	require.NoError(m.t, err)
	next, err := protocol.VerifyBundle(env, m.Pin())
	require.NoError(m.t, err)
	m.Bundles = append(m.Bundles, next)
	return next
}

// Delegate gives the publisher a delegation until then.
func (m *Mesh) Delegate(until time.Time) {
	m.t.Helper()
	env, err := protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
		Publisher:          &protocol.PublicKey{KeyId: KeyID(m.Publisher), Ed25519: Public(m.Publisher)},
		RepositoryPrefixes: []string{"org/acme/"},
		ExpiresAt:          timestamppb.New(until),
	}, protocol.NewEd25519Signer(m.Catalog))
	require.NoError(m.t, err)
	m.Delegation = env
}

// Workload is one that the publisher admits, first named at Now.
func (m *Mesh) Workload(member string, revision uint64) *protocol.Workload {
	m.t.Helper()
	parsed, err := manifest.Parse([]byte(manifesttest.Document("web", Image)))
	require.NoError(m.t, err)
	services, err := manifest.Lower(parsed, manifest.Inputs{}, manifest.Shape{})
	require.NoError(m.t, err)
	return &protocol.Workload{
		Id:                      member,
		InstanceId:              "i-" + member,
		Revision:                revision,
		AppSlug:                 "web",
		AppVersion:              "1.0.0",
		CorrelationId:           "corr",
		Manifest:                m.manifest,
		Delegation:              m.Delegation,
		Services:                services,
		ParametersJson:          "{}",
		Features:                parsed.Features(),
		ReadinessTimeoutSeconds: 30,
		FirstNamedAt:            timestamppb.New(m.Now),
	}
}

// Desired signs a state that names the workloads, and returns it with their documents.
func (m *Mesh) Desired(generation uint64, workloads ...*protocol.Workload) (*protocol.Envelope, [][]byte) {
	m.t.Helper()
	me := m.Node()
	d := &protocol.DesiredState{
		NodeId:           me.ID,
		NodeKeySha256:    me.KeySHA256[:],
		Epoch:            m.Epoch,
		Generation:       generation,
		IssuedAt:         timestamppb.New(m.Now),
		MinBundleVersion: m.Bundle().Version(),
	}
	var parts [][]byte
	for _, w := range workloads {
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(w)
		require.NoError(m.t, err)
		sum := sha256.Sum256(raw)
		d.Parts = append(d.Parts, &protocol.PartRef{Id: w.GetId(), Sha256: sum[:], SizeBytes: uint64(len(raw))})
		parts = append(parts, raw)
	}
	env, err := protocol.SignMessage(protocol.PayloadState, d, protocol.NewEd25519Signer(m.State))
	require.NoError(m.t, err)
	return env, parts
}

// Leases signs a lease with this number, of a week, for each member.
func (m *Mesh) Leases(incarnation string, no uint64, members ...string) *protocol.Envelope {
	m.t.Helper()
	batch := &protocol.LeaseBatch{
		NodeId: NodeID, Incarnation: incarnation, Epoch: m.Epoch,
		IssuedAt: timestamppb.New(m.Now),
	}
	for _, id := range members {
		batch.Leases = append(batch.Leases, &protocol.Lease{
			MemberId:  id,
			LeaseNo:   no,
			ExpiresAt: timestamppb.New(m.Now.AddDate(0, 0, 7)),
			EndPolicy: "stop",
			CapNanos:  1 << 60,
			Prices:    []*protocol.FrozenPrice{{Meter: protocol.MeterSessionSeconds, PriceNanos: 1000, PerQuantity: 1_000_000}},
		})
	}
	env, err := protocol.SignMessage(protocol.PayloadLeases, batch, protocol.NewEd25519Signer(m.Lease))
	require.NoError(m.t, err)
	return env
}
