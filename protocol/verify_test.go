package protocol_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/protocol"
)

type key struct {
	pub    ed25519.PublicKey
	signer protocol.Signer
}

func newKey(t require.TestingT) key {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	return key{pub: pub, signer: protocol.NewEd25519Signer(priv)}
}

func (k key) public() *protocol.PublicKey {
	return &protocol.PublicKey{KeyId: protocol.KeyID(k.pub), Ed25519: k.pub}
}

func caDER(t require.TestingT) []byte {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"},
		NotAfter: time.Unix(4e9, 0), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	require.NoError(t, err)
	return der
}

type world struct {
	root, state, lease, catalog, node key
	bundle                            protocol.Bundle
	me                                protocol.NodeIdentity
	ca                                []byte
}

func (w *world) message(version uint64, revoked ...string) *protocol.TrustBundle {
	role := func(name string, k key) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{k.public()}}
	}
	ca := func(name string) *protocol.Role {
		return &protocol.Role{Name: name, Keys: []*protocol.PublicKey{{KeyId: name, Certificate: w.ca}}}
	}
	return &protocol.TrustBundle{
		TrustDomain: "test.example", Version: version, Epoch: 1, RevokedKeyIds: revoked,
		Roles: []*protocol.Role{
			role(protocol.RoleRoot, w.root), role(protocol.RoleState, w.state), role(protocol.RoleLease, w.lease),
			role(protocol.RoleCatalog, w.catalog), ca(protocol.RoleNodeCA), ca(protocol.RoleHubCA),
		},
	}
}

func newWorld(t require.TestingT) *world {
	w := &world{root: newKey(t), state: newKey(t), lease: newKey(t), catalog: newKey(t), node: newKey(t), ca: caDER(t)}
	env, err := protocol.SignMessage(protocol.PayloadBundle, w.message(1), w.root.signer)
	require.NoError(t, err)
	w.bundle, err = protocol.VerifyBundle(env, protocol.Fingerprint(w.root.pub))
	require.NoError(t, err)
	w.me = protocol.NewNodeIdentity("node-1", w.node.pub)
	return w
}

func (w *world) desired() *protocol.DesiredState {
	return &protocol.DesiredState{
		NodeId: w.me.ID, NodeKeySha256: w.me.KeySHA256[:], Epoch: 1, Generation: 7,
		MinBundleVersion: 1,
	}
}

func TestDesiredStateIsRefusedWithAReason(t *testing.T) {
	w := newWorld(t)
	other := newKey(t)
	cases := map[string]struct {
		change func(*protocol.DesiredState)
		signer protocol.Signer
		want   protocol.Nack_Reason
	}{
		"as it should be":        {want: 0},
		"signed by a stranger":   {signer: other.signer, want: protocol.Nack_SIGNATURE_INVALID},
		"signed by another role": {signer: w.lease.signer, want: protocol.Nack_SIGNATURE_INVALID},
		"for another node": {change: func(d *protocol.DesiredState) {
			d.NodeId = "node-2"
		}, want: protocol.Nack_WRONG_NODE},
		"for an older key of this node": {change: func(d *protocol.DesiredState) {
			d.NodeKeySha256 = make([]byte, 32)
		}, want: protocol.Nack_WRONG_NODE},
		"of an unknown epoch": {change: func(d *protocol.DesiredState) { d.Epoch = 2 }, want: protocol.Nack_EPOCH_UNKNOWN},
		"needing a newer bundle": {change: func(d *protocol.DesiredState) {
			d.MinBundleVersion = 2
		}, want: protocol.Nack_BUNDLE_TOO_OLD},
		"without a generation": {change: func(d *protocol.DesiredState) {
			d.Generation = 0
		}, want: protocol.Nack_MALFORMED},
		"with a part of no digest": {
			change: func(d *protocol.DesiredState) { d.Parts = []*protocol.PartRef{{Id: "a"}} },
			want:   protocol.Nack_MALFORMED,
		},
		"with a part twice": {change: func(d *protocol.DesiredState) {
			d.Parts = []*protocol.PartRef{{Id: "a", Sha256: make([]byte, 32)}, {Id: "a", Sha256: make([]byte, 32)}}
		}, want: protocol.Nack_MALFORMED},
		"with a part that is too large": {change: func(d *protocol.DesiredState) {
			d.Parts = []*protocol.PartRef{{Id: "a", Sha256: make([]byte, 32), SizeBytes: protocol.MaxWorkloadBytes + 1}}
		}, want: protocol.Nack_TOO_LARGE},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			d, signer := w.desired(), w.state.signer
			if c.change != nil {
				c.change(d)
			}
			if c.signer != nil {
				signer = c.signer
			}
			env, err := protocol.SignMessage(protocol.PayloadState, d, signer)
			require.NoError(t, err)
			v, err := protocol.VerifyState(env, w.bundle, w.me)
			require.Equal(t, c.want, protocol.RefusalOf(err))
			require.Equal(t, c.want == 0, v.OK())
		})
	}
}

func TestOversizedDocumentIsRefusedBeforeItIsDecoded(t *testing.T) {
	w := newWorld(t)
	env, err := protocol.Sign(protocol.PayloadState, make([]byte, protocol.MaxEnvelopeBytes+1), w.state.signer)
	require.NoError(t, err)
	_, err = protocol.VerifyState(env, w.bundle, w.me)
	require.Equal(t, protocol.Nack_TOO_LARGE, protocol.RefusalOf(err))
}

func TestRevokedKeySignsNothing(t *testing.T) {
	w := newWorld(t)
	env, err := protocol.SignMessage(protocol.PayloadBundle, w.message(2, protocol.KeyID(w.state.pub)), w.root.signer)
	require.NoError(t, err)
	next, err := w.bundle.Succeed(env)
	require.NoError(t, err)
	require.True(t, next.Revoked(protocol.KeyID(w.state.pub)))

	state, err := protocol.SignMessage(protocol.PayloadState, w.desired(), w.state.signer)
	require.NoError(t, err)
	_, err = protocol.VerifyState(state, next, w.me)
	require.Equal(t, protocol.Nack_KEY_REVOKED, protocol.RefusalOf(err))
}

// What a stolen authority signed opens no connection once it is revoked, on either side.
func TestARevokedAuthorityVouchesForNobody(t *testing.T) {
	w := newWorld(t)
	for _, revoked := range []string{"", protocol.RoleNodeCA, protocol.RoleHubCA} { // the ids of their keys here
		b, err := w.bundle.Succeed(signBundle(t, w.message(2, revoked), w.root))
		require.NoError(t, err)
		require.Equal(t, revoked == protocol.RoleNodeCA, b.NodeCAs().Equal(x509.NewCertPool()), revoked)
		require.Equal(t, revoked == protocol.RoleHubCA, b.HubCAs().Equal(x509.NewCertPool()), revoked)
	}
}

// Law 1: whatever byte of a signed document is changed, in whatever way, nobody accepts it.
func TestLaw01AnAlteredDocumentIsNeverVerified(t *testing.T) {
	w := newWorld(t)
	env, err := protocol.SignMessage(protocol.PayloadState, w.desired(), w.state.signer)
	require.NoError(t, err)
	rapid.Check(t, func(t *rapid.T) {
		c, _ := proto.Clone(env).(*protocol.Envelope)
		targets := [][]byte{c.Payload, c.Signatures[0].Signature}
		b := targets[rapid.IntRange(0, 1).Draw(t, "target")]
		b[rapid.IntRange(0, len(b)-1).Draw(t, "byte")] ^= byte(rapid.IntRange(1, 255).Draw(t, "flip"))
		v, err := protocol.VerifyState(c, w.bundle, w.me)
		require.Error(t, err)
		require.False(t, v.OK())
	})
}

func TestBundleSucceedsOnlyForward(t *testing.T) {
	w := newWorld(t)
	sign := func(m *protocol.TrustBundle, s ...protocol.Signer) *protocol.Envelope {
		env, err := protocol.SignMessage(protocol.PayloadBundle, m, s...)
		require.NoError(t, err)
		return env
	}
	newRoot := newKey(t)
	rotated := w.message(2)
	rotated.Roles[0].Keys = []*protocol.PublicKey{newRoot.public()}

	_, err := w.bundle.Succeed(sign(w.message(1), w.root.signer))
	require.Equal(t, protocol.Nack_GENERATION_OLDER, protocol.RefusalOf(err))
	_, err = w.bundle.Succeed(sign(rotated, newRoot.signer))
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err), "the new root alone")
	_, err = w.bundle.Succeed(sign(rotated, w.root.signer))
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err), "the old root alone")
	next, err := w.bundle.Succeed(sign(rotated, w.root.signer, newRoot.signer))
	require.NoError(t, err)
	require.EqualValues(t, 2, next.Version())

	elsewhere := w.message(2)
	elsewhere.TrustDomain = "other.example"
	_, err = w.bundle.Succeed(sign(elsewhere, w.root.signer))
	require.Equal(t, protocol.Nack_MALFORMED, protocol.RefusalOf(err))
}

func TestBundleNeedsTheFingerprintAndItsOwnRoot(t *testing.T) {
	w := newWorld(t)
	_, err := protocol.VerifyBundle(w.bundle.Envelope(), protocol.Fingerprint(w.state.pub))
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))

	forged, err := protocol.SignMessage(protocol.PayloadBundle, w.message(1), w.state.signer)
	require.NoError(t, err)
	_, err = protocol.VerifyBundle(forged, protocol.Fingerprint(w.root.pub))
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))

	// A key under another key's id.
	posing := w.message(1)
	posing.Roles[1].Keys[0].Ed25519 = newKey(t).pub
	env, err := protocol.SignMessage(protocol.PayloadBundle, posing, w.root.signer)
	require.NoError(t, err)
	_, err = protocol.VerifyBundle(env, protocol.Fingerprint(w.root.pub))
	require.Equal(t, protocol.Nack_MALFORMED, protocol.RefusalOf(err))
}

func TestThresholdCountsDistinctKeys(t *testing.T) {
	w := newWorld(t)
	m := w.message(1)
	m.Roles[0].Threshold = 2
	m.Roles[0].Keys = append(m.Roles[0].Keys, newKey(t).public())
	env, err := protocol.SignMessage(protocol.PayloadBundle, m, w.root.signer, w.root.signer)
	require.NoError(t, err)
	_, err = protocol.VerifyBundle(env, protocol.Fingerprint(w.root.pub))
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))
}

func TestPartMustBeNamedByTheState(t *testing.T) {
	w := newWorld(t)
	part, err := proto.Marshal(&protocol.Workload{Id: "member-1"})
	require.NoError(t, err)
	sum := sha256.Sum256(part)
	d := w.desired()
	d.Parts = []*protocol.PartRef{{Id: "member-1", Sha256: sum[:], SizeBytes: uint64(len(part))}}
	env, err := protocol.SignMessage(protocol.PayloadState, d, w.state.signer)
	require.NoError(t, err)
	v, err := protocol.VerifyState(env, w.bundle, w.me)
	require.NoError(t, err)

	got, err := protocol.VerifyPart(v, part)
	require.NoError(t, err)
	require.Equal(t, "member-1", got.GetId())
	_, err = protocol.VerifyPart(v, append(part, 0x8a, 0x01, 0x00))
	require.Equal(t, protocol.Nack_PART_DIGEST_MISMATCH, protocol.RefusalOf(err))
	_, err = protocol.VerifyPart(protocol.Verified[*protocol.DesiredState]{}, part)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))
}

func TestPublisherSignsOnlyWithALivingDelegation(t *testing.T) {
	w := newWorld(t)
	publisher, now := newKey(t), time.Unix(1_800_000_000, 0)
	delegate := func(expires time.Time, signer protocol.Signer) *protocol.Envelope {
		env, err := protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
			Publisher: publisher.public(), OrgSlug: "acme", RepositoryPrefixes: []string{"org/acme/"},
			ExpiresAt: timestamppb.New(expires),
		}, signer)
		require.NoError(t, err)
		return env
	}
	manifest, err := protocol.Sign(protocol.PayloadManifest, []byte("app: {}"), publisher.signer)
	require.NoError(t, err)

	payload, who, err := protocol.VerifyPublisher(manifest, delegate(now.Add(time.Hour), w.catalog.signer), w.bundle, now)
	require.NoError(t, err)
	require.Equal(t, "app: {}", string(payload))
	require.Equal(t, "acme", who.OrgSlug)

	_, _, err = protocol.VerifyPublisher(manifest, delegate(now.Add(-time.Hour), w.catalog.signer), w.bundle, now)
	require.Equal(t, protocol.Nack_EXPIRED, protocol.RefusalOf(err))
	_, _, err = protocol.VerifyPublisher(manifest, delegate(now.Add(time.Hour), w.state.signer), w.bundle, now)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err), "a stolen online key delegates nothing")
	_, _, err = protocol.VerifyPublisher(manifest, nil, w.bundle, now)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))
}

func TestSegmentIsSignedByTheNodeItself(t *testing.T) {
	w := newWorld(t)
	env, err := protocol.SignMessage(protocol.PayloadSegment, &protocol.UsageSegment{NodeId: w.me.ID, Number: 1},
		w.node.signer)
	require.NoError(t, err)
	v, err := protocol.VerifySegment(env, w.node.pub)
	require.NoError(t, err)
	require.EqualValues(t, 1, v.Message().GetNumber())
	_, err = protocol.VerifySegment(env, w.state.pub)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))
}

func TestLaw15AnOwnersRefusalIsSignedAndAboutOneRevision(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		change func(*protocol.WorkloadStatus)
		says   protocol.Nack_Reason
	}{
		"as it was signed": {func(*protocol.WorkloadStatus) {}, 0},
		"nothing is signed": {func(s *protocol.WorkloadStatus) {
			s.OwnerRefusal = nil
		}, protocol.Nack_MALFORMED},
		"another member":   {func(s *protocol.WorkloadStatus) { s.MemberId = "m2" }, protocol.Nack_MALFORMED},
		"another instance": {func(s *protocol.WorkloadStatus) { s.InstanceId = "i2" }, protocol.Nack_MALFORMED},
		"another revision": {func(s *protocol.WorkloadStatus) { s.Revision = 4 }, protocol.Nack_MALFORMED},
		"altered": {
			func(s *protocol.WorkloadStatus) { s.OwnerRefusal.Payload[3] ^= 1 },
			protocol.Nack_SIGNATURE_INVALID,
		},
		"signed by the hub": {
			func(s *protocol.WorkloadStatus) { _ = s.RefuseAsOwner(w.me.ID, w.state.signer) },
			protocol.Nack_SIGNATURE_INVALID,
		},
		"of another node": {
			func(s *protocol.WorkloadStatus) { _ = s.RefuseAsOwner("n2", w.node.signer) },
			protocol.Nack_MALFORMED,
		},
		"why it went back, at the new": {func(s *protocol.WorkloadStatus) {
			s.Status, s.Revision, s.FallbackFromRevision = protocol.WorkloadStatus_READY, 2, 3
		}, 0},
	} {
		s := &protocol.WorkloadStatus{
			MemberId: "m1", InstanceId: "i1", Revision: 3, Status: protocol.WorkloadStatus_FAILED,
			Reason: protocol.WorkloadStatus_OWNER_REFUSED, Detail: "Not here.",
		}
		require.NoError(t, s.RefuseAsOwner(w.me.ID, w.node.signer))
		c.change(s)
		v, err := protocol.VerifyOwnerRefusal(s, w.me.ID, w.node.pub)
		if c.says != 0 {
			require.Equal(t, c.says, protocol.RefusalOf(err), name)
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, "Not here.", v.Message().GetRule(), name)
	}
}

// An envelope is stored as it came. Beside a good signature it holds nothing that no key can have made.
func TestASignatureOfAnotherLengthIsRefused(t *testing.T) {
	w := newWorld(t)
	signed := func(payloadType string, m proto.Message, by key) *protocol.Envelope {
		env, err := protocol.SignMessage(payloadType, m, by.signer)
		require.NoError(t, err)
		return env
	}
	status := &protocol.WorkloadStatus{
		MemberId: "m1", InstanceId: "i1", Revision: 3, Status: protocol.WorkloadStatus_FAILED,
		Reason: protocol.WorkloadStatus_OWNER_REFUSED,
	}
	require.NoError(t, status.RefuseAsOwner(w.me.ID, w.node.signer))
	documents := map[string]struct {
		envelope *protocol.Envelope
		verify   func(*protocol.Envelope) error
	}{
		"an owner's refusal": {status.GetOwnerRefusal(), func(e *protocol.Envelope) error {
			s := proto.CloneOf(status)
			s.OwnerRefusal = e
			_, err := protocol.VerifyOwnerRefusal(s, w.me.ID, w.node.pub)
			return err
		}},
		"a usage segment": {
			signed(protocol.PayloadSegment, &protocol.UsageSegment{NodeId: w.me.ID, Number: 1}, w.node),
			func(e *protocol.Envelope) error { _, err := protocol.VerifySegment(e, w.node.pub); return err },
		},
		"a trust bundle": {
			signed(protocol.PayloadBundle, w.message(1), w.root),
			func(e *protocol.Envelope) error {
				_, err := protocol.VerifyBundle(e, protocol.Fingerprint(w.root.pub))
				return err
			},
		},
	}
	id, signature := protocol.KeyID(w.node.pub), bytes.Repeat([]byte{1}, ed25519.SignatureSize)
	besides := map[string]*protocol.Signature{
		"500 KiB of junk":          {KeyId: id, Signature: make([]byte, 500<<10)},
		"a signature of 63 bytes":  {KeyId: id, Signature: signature[1:]},
		"no signature":             {KeyId: id},
		"a key id of a KiB":        {KeyId: strings.Repeat("a", 1<<10), Signature: signature},
		"a key id in upper case":   {KeyId: strings.Repeat("A", len(id)), Signature: signature},
		"a key id that is no text": {KeyId: strings.Repeat("\x00", len(id)), Signature: signature},
		"no key id":                {Signature: signature},
	}
	for name, d := range documents {
		require.NoError(t, d.verify(d.envelope), name)
		unknown := proto.CloneOf(d.envelope)
		unknown.Signatures = append(unknown.Signatures, &protocol.Signature{
			KeyId:     protocol.KeyID(newKey(t).pub),
			Signature: signature,
		})
		require.NoError(t, d.verify(unknown), "%s: a key that the verifier does not know may have signed, too", name)
		for what, s := range besides {
			long := proto.CloneOf(d.envelope)
			long.Signatures = append(long.Signatures, s)
			require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(d.verify(long)), "%s with %s", name, what)
		}
	}
}

func TestEnvelopeJSONRoundTrip(t *testing.T) {
	w := newWorld(t)
	data, err := protocol.EnvelopeToJSON(w.bundle.Envelope())
	require.NoError(t, err)
	back, err := protocol.EnvelopeFromJSON(data)
	require.NoError(t, err)
	require.True(t, proto.Equal(w.bundle.Envelope(), back))
}

func TestPeerIDTakesExactlyOneIdentity(t *testing.T) {
	node, hub := protocol.NodeSPIFFE("test.example", "n1"), protocol.HubSPIFFE("test.example", "h1")
	cert := func(uris ...string) *x509.Certificate {
		c := &x509.Certificate{}
		for _, u := range uris {
			parsed := *node
			if u == "hub" {
				parsed = *hub
			}
			c.URIs = append(c.URIs, &parsed)
		}
		return c
	}
	id, err := protocol.PeerID(cert("node"), "test.example", protocol.KindNode)
	require.NoError(t, err)
	require.Equal(t, "n1", id)
	for _, c := range []*x509.Certificate{cert(), cert("node", "hub"), cert("hub")} {
		_, err := protocol.PeerID(c, "test.example", protocol.KindNode)
		require.Error(t, err)
	}
	_, err = protocol.PeerID(cert("node"), "other.example", protocol.KindNode)
	require.Error(t, err)
}

func FuzzVerifyState(f *testing.F) {
	w := newWorld(f)
	env, err := protocol.SignMessage(protocol.PayloadState, w.desired(), w.state.signer)
	require.NoError(f, err)
	seed, err := proto.Marshal(env)
	require.NoError(f, err)
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) {
		e := &protocol.Envelope{}
		if proto.Unmarshal(data, e) != nil {
			return
		}
		v, err := protocol.VerifyState(e, w.bundle, w.me)
		if err == nil {
			require.Equal(t, env.GetPayload(), v.Envelope().GetPayload(), "only what was signed is verified")
		}
		_, _ = protocol.VerifyBundle(e, protocol.Fingerprint(w.root.pub))
		_, _ = protocol.VerifySegment(e, w.node.pub)
	})
}

func FuzzEnvelopeFromJSON(f *testing.F) {
	f.Add([]byte(`{"payloadType":"a","payload":"YQ==","signatures":[{"keyid":"x","sig":"eQ=="}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		env, err := protocol.EnvelopeFromJSON(data)
		if err != nil {
			return
		}
		_, err = protocol.EnvelopeToJSON(env)
		require.NoError(t, err)
	})
}
