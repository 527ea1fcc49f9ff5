package protocol

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// A pin is what a node knows of the root before it has seen a trust bundle. It has two forms.
const (
	// FingerprintPrefix starts the fingerprint of one root key; the key id follows, and that key must have signed.
	FingerprintPrefix = "sha256:"
	// RootRolePrefix starts the digest of a whole root role, keys and threshold: as many of its keys must have signed.
	RootRolePrefix = "root-role-sha256:"
)

// Fingerprint is the pin of one root key: what an operator compares and writes into cloud-init.
func Fingerprint(root ed25519.PublicKey) string { return FingerprintPrefix + KeyID(root) }

// RootRoleDigest is the pin of a whole root role: SHA-256 over its threshold and its sorted key ids, a line each.
func RootRoleDigest(root *Role) string {
	ids := make([]string, 0, len(root.GetKeys()))
	for _, k := range root.GetKeys() {
		ids = append(ids, k.GetKeyId())
	}
	slices.Sort(ids)
	sum := sha256.Sum256([]byte(fmt.Sprintf("gpuaas root role v1\n%d\n%s\n", root.GetThreshold(),
		strings.Join(ids, "\n"))))
	return RootRolePrefix + hex.EncodeToString(sum[:])
}

// NormalizePin returns a pin in its canonical form. 64 hex digits without a prefix are a fingerprint.
func NormalizePin(pin string) (string, error) {
	pin = strings.ToLower(strings.TrimSpace(pin))
	prefix, digits := FingerprintPrefix, strings.TrimPrefix(pin, FingerprintPrefix)
	if rest, ok := strings.CutPrefix(pin, RootRolePrefix); ok {
		prefix, digits = RootRolePrefix, rest
	}
	if raw, err := hex.DecodeString(digits); err != nil || len(raw) != sha256.Size {
		return "", Refuse(Nack_MALFORMED, "a root fingerprint is %s or %s followed by 64 hex digits", FingerprintPrefix,
			RootRolePrefix)
	}
	return prefix + digits, nil
}

// VerifyBundle accepts a bundle that its own root role signed and that the pin names: the pinned key is one of the
// signers, or the pinned digest is that of the root role. This is the one place where trust comes from outside: the pin
// reached the node by another way than the bundle.
func VerifyBundle(env *Envelope, pin string) (Bundle, error) {
	want, err := NormalizePin(pin)
	if err != nil {
		return Bundle{}, err
	}
	b, err := parseBundle(env)
	if err != nil {
		return Bundle{}, err
	}
	if strings.HasPrefix(want, RootRolePrefix) {
		if RootRoleDigest(b.roles[RoleRoot]) != want {
			return Bundle{}, Refuse(Nack_SIGNATURE_INVALID, "the trust bundle has another root role than the one that was given")
		}
		return b, nil
	}
	// A listed key proves nothing: root keys are public, and anybody can list one beside an own key.
	signers, err := b.signers(env, RoleRoot)
	if err != nil {
		return Bundle{}, err
	}
	if !slices.Contains(signers, strings.TrimPrefix(want, FingerprintPrefix)) {
		return Bundle{}, Refuse(Nack_SIGNATURE_INVALID, "the trust bundle is not signed by the root key with the "+
			"fingerprint "+
			"that was given")
	}
	return b, nil
}

// VerifyChain verifies the first bundle by the pin and each further one as the successor of the one before it. It
// returns the last one.
func VerifyChain(pin string, chain ...*Envelope) (Bundle, error) {
	if len(chain) == 0 {
		return Bundle{}, Refuse(Nack_SIGNATURE_INVALID, "there is no trust bundle")
	}
	b, err := VerifyBundle(chain[0], pin)
	for _, env := range chain[1:] {
		if err != nil {
			return Bundle{}, err
		}
		b, err = b.Succeed(env)
	}
	if err != nil {
		return Bundle{}, err
	}
	return b, nil
}
