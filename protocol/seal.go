package protocol

import (
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/hpke"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
)

// sealedKey is the one key of the object that stands in a workload's parameters in place of a secret one.
const sealedKey = "$sealed"

// SecretReferenceKey is the one key of a reference to a secret of the project, which only the hub has: a node gets the
// parameter sealed.
const SecretReferenceKey = "$secret"

// PackageIndexParameter is the name under which the package index of a project is sealed for a workload with an
// environment.
const PackageIndexParameter = "package_index"

// InstanceIdentityParameter is the name under which the service account of an app instance is sealed for its workload.
const InstanceIdentityParameter = "service-account.json"

// sealedInfo binds what is sealed to its use, so that it opens nowhere else: node, member and parameter.
func sealedInfo(nodeID, memberID, name string) []byte {
	return fmt.Appendf(nil, "gpuaas parameter v1\x00%s\x00%s\x00%s", nodeID, memberID, name)
}

// SealingKeyPair opens what was sealed to a node (RFC 9180: DHKEM(X25519, HKDF-SHA256), ChaCha20-Poly1305).
type SealingKeyPair struct {
	nodeID string
	key    hpke.PrivateKey
}

// DeriveSealingKey derives the key pair of a node from a secret of its own, of at least 32 bytes.
func DeriveSealingKey(nodeID string, secret []byte) (SealingKeyPair, error) {
	key, err := hpke.DHKEM(ecdh.X25519()).DeriveKeyPair(secret)
	return SealingKeyPair{nodeID, key}, err
}

// Sign wraps the public key in an envelope, signed by the node's own key.
func (p SealingKeyPair) Sign(signer Signer) (*Envelope, error) {
	return SignMessage(PayloadSealingKey, &SealingKey{NodeId: p.nodeID, X25519: p.key.PublicKey().Bytes()}, signer)
}

// Open returns a secret parameter of a member.
func (p SealingKeyPair) Open(memberID, name string, sealed []byte) ([]byte, error) {
	return hpke.Open(p.key, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), sealedInfo(p.nodeID, memberID, name), sealed)
}

// VerifySealingKey checks that a sealing key is signed by the node's own key, and that one can seal to it: a point of
// low order is a key to nothing.
func VerifySealingKey(env *Envelope, nodeID string, node ed25519.PublicKey) (Verified[*SealingKey], error) {
	v, err := verifyOfNode(env, PayloadSealingKey, MaxSealingKeyBytes, node, &SealingKey{})
	if err == nil && v.message.GetNodeId() != nodeID {
		return Verified[*SealingKey]{}, Refuse(Nack_MALFORMED, "the sealing key is of another node")
	}
	if err == nil {
		if _, sealErr := Seal(v, "", "", nil); sealErr != nil {
			return Verified[*SealingKey]{}, Refuse(Nack_MALFORMED, "nothing can be sealed to the sealing key")
		}
	}
	return v, err
}

// Seal seals a secret parameter of a member to the node.
func Seal(to Verified[*SealingKey], memberID, name string, secret []byte) ([]byte, error) {
	key, err := hpke.DHKEM(ecdh.X25519()).NewPublicKey(to.Message().GetX25519())
	if err != nil {
		return nil, err
	}
	info := sealedInfo(to.Message().GetNodeId(), memberID, name)
	return hpke.Seal(key, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), info, secret)
}

// SealedValue is what stands in parameters in place of a secret one.
func SealedValue(sealed []byte) any {
	return map[string]any{sealedKey: base64.StdEncoding.EncodeToString(sealed)}
}

// AsSealed reads a SealedValue; ok is false for any other value.
func AsSealed(value any) (sealed []byte, ok bool) {
	object, _ := value.(map[string]any)
	text, is := object[sealedKey].(string)
	if !is || len(object) != 1 {
		return nil, false
	}
	sealed, err := base64.StdEncoding.DecodeString(text)
	return sealed, err == nil
}

// HasSealedKey reports whether an object has the key of a SealedValue, and perhaps others.
func HasSealedKey(object map[string]any) bool {
	_, has := object[sealedKey]
	return has
}

// SealedParameters returns the sealed ones of a workload's parameters, by name.
func SealedParameters(parametersJSON string) map[string][]byte {
	var all map[string]any
	if json.Unmarshal([]byte(parametersJSON), &all) != nil {
		return nil // Admits refuses such a workload
	}
	var out map[string][]byte
	for name, value := range all {
		if sealed, ok := AsSealed(value); ok {
			if out == nil {
				out = map[string][]byte{}
			}
			out[name] = sealed
		}
	}
	return out
}

// AsSecretReference reads the name of a secret that stands in place of a secret parameter; ok is false for any other
// value.
func AsSecretReference(value any) (name string, ok bool) {
	object, _ := value.(map[string]any)
	name, ok = object[SecretReferenceKey].(string)
	return name, ok && len(object) == 1
}

// IdentityReference stands in place of the service account of an app instance: it refers to no secret of the project.
func IdentityReference() any { return map[string]any{SecretReferenceKey: ""} }

// IsIdentityReference reports whether a value is an IdentityReference.
func IsIdentityReference(value any) bool {
	name, ok := AsSecretReference(value)
	return ok && name == ""
}

// SecretReferences returns the names of the secrets that parameters refer to, by parameter.
func SecretReferences(parametersJSON string) map[string]string {
	if !strings.Contains(parametersJSON, SecretReferenceKey) {
		return nil
	}
	var all map[string]any
	if json.Unmarshal([]byte(parametersJSON), &all) != nil {
		return nil // Admits refuses such a workload
	}
	out := map[string]string{}
	for parameter, value := range all {
		if name, ok := AsSecretReference(value); ok {
			out[parameter] = name
		}
	}
	return out
}

// WithSealed puts sealed values in place of parameters.
func WithSealed(parametersJSON string, sealed map[string][]byte) (string, error) {
	all := map[string]any{}
	if err := json.Unmarshal([]byte(parametersJSON), &all); err != nil {
		return "", err
	}
	for name, value := range sealed {
		all[name] = SealedValue(value)
	}
	out, err := json.Marshal(all)
	return string(out), err
}
