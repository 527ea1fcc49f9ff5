package protocol_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/protocol"
)

func signBundle(t require.TestingT, m *protocol.TrustBundle, signers ...key) *protocol.Envelope {
	var by []protocol.Signer
	for _, k := range signers {
		by = append(by, k.signer)
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, m, by...)
	require.NoError(t, err)
	return env
}

// withRoot is the world's bundle with another root role.
func (w *world) withRoot(version uint64, threshold uint32, keys ...key) *protocol.TrustBundle {
	m := w.message(version)
	m.Roles[0] = &protocol.Role{Name: protocol.RoleRoot, Threshold: threshold}
	for _, k := range keys {
		m.Roles[0].Keys = append(m.Roles[0].Keys, k.public())
	}
	return m
}

func TestABundleThePinnedRootDidNotSignIsRefused(t *testing.T) {
	w := newWorld(t)
	byKey := protocol.Fingerprint(w.root.pub)
	root, thief, second, third := w.root, newKey(t), newKey(t), newKey(t)
	revoked := w.withRoot(1, 1, root, thief)
	revoked.RevokedKeyIds = []string{protocol.KeyID(root.pub)}
	three := w.withRoot(1, 2, root, second, third)
	byRole := protocol.RootRoleDigest(three.Roles[0])
	const unsigned = protocol.Nack_SIGNATURE_INVALID
	relabelled := signBundle(t, w.withRoot(1, 1, root, thief), thief, thief)
	relabelled.Signatures[0].KeyId = protocol.KeyID(root.pub)
	cases := map[string]struct {
		env  *protocol.Envelope
		pin  string
		want protocol.Nack_Reason
	}{
		"signed by the pinned key":               {signBundle(t, w.message(1), root), byKey, 0},
		"the pinned key is only listed":          {signBundle(t, w.withRoot(1, 1, root, thief), thief), byKey, unsigned},
		"under the pinned key's id":              {relabelled, byKey, unsigned},
		"signed by the pinned key, not listed":   {signBundle(t, w.withRoot(1, 1, thief), root, thief), byKey, unsigned},
		"the pinned key is listed and revoked":   {signBundle(t, revoked, root, thief), byKey, unsigned},
		"2 of 3, the pinned key did not sign":    {signBundle(t, three, second, third), byKey, unsigned},
		"2 of 3, the pinned key signed":          {signBundle(t, three, root, third), byKey, 0},
		"2 of 3, only the pinned key":            {signBundle(t, three, root), byKey, unsigned},
		"2 of 3, the pinned key twice":           {signBundle(t, three, root, root), byKey, unsigned},
		"2 of 3 by the digest of the role":       {signBundle(t, three, second, third), byRole, 0},
		"digest of the role, too few signatures": {signBundle(t, three, second), byRole, unsigned},
		"digest of the role, another threshold": {
			signBundle(t, w.withRoot(1, 1, root, second, third), second), byRole,
			unsigned,
		},
		"digest of the role, one more key": {
			signBundle(t, w.withRoot(1, 2, root, second, third, thief), second, thief),
			byRole, unsigned,
		},
		"a role's digest given as a key's": {signBundle(t, three, root, third), protocol.FingerprintPrefix +
			strings.TrimPrefix(byRole, protocol.RootRolePrefix), unsigned},
		"no pin":       {signBundle(t, w.message(1), root), "", protocol.Nack_MALFORMED},
		"a short pin":  {signBundle(t, w.message(1), root), "sha256:00", protocol.Nack_MALFORMED},
		"another form": {signBundle(t, w.message(1), root), "md5:" + protocol.KeyID(root.pub), protocol.Nack_MALFORMED},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b, err := protocol.VerifyBundle(c.env, c.pin)
			require.Equal(t, c.want, protocol.RefusalOf(err), "%v", err)
			require.Equal(t, c.want == 0, b.Valid())
		})
	}
}

// A bundle of any root role, signed by anyone, verifies only with a valid signature of the pinned key.
func TestEveryBundleThatVerifiesCarriesThePinnedKeysSignature(t *testing.T) {
	w := newWorld(t)
	keys := []key{w.root, newKey(t), newKey(t), newKey(t)}
	rapid.Check(t, func(t *rapid.T) {
		subset := func(label string) (out []key) {
			for i, k := range keys {
				if rapid.Bool().Draw(t, label+string(rune('0'+i))) {
					out = append(out, k)
				}
			}
			return out
		}
		m := w.withRoot(1, rapid.Uint32Range(0, 4).Draw(t, "threshold"), subset("listed")...)
		for _, k := range subset("revoked") {
			m.RevokedKeyIds = append(m.RevokedKeyIds, protocol.KeyID(k.pub))
		}
		signers := subset("signs")
		if len(signers) == 0 {
			signers = keys[:1]
		}
		env := signBundle(t, m, signers...)
		for _, s := range env.GetSignatures() {
			if rapid.Bool().Draw(t, "relabel") {
				s.KeyId = protocol.KeyID(rapid.SampledFrom(keys).Draw(t, "as").pub)
			}
			if rapid.Bool().Draw(t, "alter") {
				s.Signature[rapid.IntRange(0, len(s.Signature)-1).Draw(t, "byte")] ^= 1
			}
		}
		if _, err := protocol.VerifyBundle(env, protocol.Fingerprint(w.root.pub)); err == nil {
			requireSignedBy(t, env, w.root)
		}
	})
}

// requireSignedBy searches the key's signature with another function than the one under test: a key of its own
// verifies the payload as the only member of a role.
func requireSignedBy(t require.TestingT, env *protocol.Envelope, k key) {
	found := false
	for _, s := range env.GetSignatures() {
		again, err := protocol.Sign(env.GetPayloadType(), env.GetPayload(), k.signer)
		require.NoError(t, err)
		// Ed25519 signatures are deterministic (RFC 8032, section 5.1.6).
		found = found || string(again.GetSignatures()[0].GetSignature()) == string(s.GetSignature())
	}
	require.True(t, found, "the pinned key did not sign this bundle")
}

func FuzzVerifyBundle(f *testing.F) {
	w := newWorld(f)
	thief := newKey(f)
	for _, env := range []*protocol.Envelope{
		w.bundle.Envelope(), signBundle(f, w.withRoot(1, 1, w.root, thief), thief), signBundle(f,
			w.withRoot(1, 2, w.root, thief), w.root, thief),
	} {
		seed, err := proto.Marshal(env)
		require.NoError(f, err)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		env := &protocol.Envelope{}
		if proto.Unmarshal(data, env) != nil {
			return
		}
		if _, err := protocol.VerifyBundle(env, protocol.Fingerprint(w.root.pub)); err == nil {
			requireSignedBy(t, env, w.root)
		}
	})
}

func TestAChainLeadsFromThePinToTheLastBundle(t *testing.T) {
	w := newWorld(t)
	second, third := newKey(t), newKey(t)
	first := w.bundle.Envelope()
	rotated := signBundle(t, w.withRoot(2, 1, second), w.root, second)
	last := signBundle(t, w.withRoot(3, 1, second), second)
	pin := protocol.Fingerprint(w.root.pub)

	b, err := protocol.VerifyChain(pin, first, rotated, last)
	require.NoError(t, err)
	require.EqualValues(t, 3, b.Version())

	_, err = protocol.VerifyChain(pin)
	require.Error(t, err)
	_, err = protocol.VerifyChain(pin, last)
	require.Error(t, err, "the pinned key signed the first two only")
	_, err = protocol.VerifyChain(pin, first, last)
	require.Error(t, err, "the bundle in which the root changes is missing")
	_, err = protocol.VerifyChain(pin, first, rotated, signBundle(t, w.withRoot(3, 1, third), third))
	require.Error(t, err)
	_, err = protocol.VerifyChain(pin, first, last, rotated)
	require.Error(t, err)
}
