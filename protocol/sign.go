package protocol

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"google.golang.org/protobuf/proto"
)

// Payload types of the signed documents.
const (
	PayloadBundle     = "application/vnd.gpuaas.trust-bundle.v1+protobuf"
	PayloadState      = "application/vnd.gpuaas.desired-state.v1+protobuf"
	PayloadLeases     = "application/vnd.gpuaas.leases.v1+protobuf"
	PayloadSegment    = "application/vnd.gpuaas.usage-segment.v1+protobuf"
	PayloadRefusal    = "application/vnd.gpuaas.owner-refusal.v1+protobuf"
	PayloadSealingKey = "application/vnd.gpuaas.sealing-key.v1+protobuf"
	PayloadDelegation = "application/vnd.gpuaas.delegation.v1+protobuf"
	PayloadManifest   = "application/vnd.gpuaas.manifest.v1+yaml"
)

// Signer signs the pre-authentication encoding of a document. It may use a hardware module.
type Signer interface {
	KeyID() string
	Sign(data []byte) ([]byte, error)
}

// KeyID names an Ed25519 key: lower-case hex of the SHA-256 of its 32 raw bytes.
func KeyID(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(pub)
	return hex.EncodeToString(sum[:])
}

type ed25519Signer struct {
	key ed25519.PrivateKey
	id  string
}

// NewEd25519Signer signs with a key in memory.
func NewEd25519Signer(key ed25519.PrivateKey) Signer {
	pub, _ := key.Public().(ed25519.PublicKey)
	return ed25519Signer{key: key, id: KeyID(pub)}
}

func (s ed25519Signer) KeyID() string { return s.id }

func (s ed25519Signer) Sign(data []byte) ([]byte, error) { return ed25519.Sign(s.key, data), nil }

// Sign wraps payload in an envelope with one signature of each signer.
func Sign(payloadType string, payload []byte, signers ...Signer) (*Envelope, error) {
	if len(signers) == 0 {
		return nil, errors.New("sign: no signer")
	}
	env := &Envelope{PayloadType: payloadType, Payload: payload}
	encoded := dsse.PAE(payloadType, payload)
	for _, s := range signers {
		sig, err := s.Sign(encoded)
		if err != nil {
			return nil, fmt.Errorf("sign with key %s: %w", s.KeyID(), err)
		}
		env.Signatures = append(env.Signatures, &Signature{KeyId: s.KeyID(), Signature: sig})
	}
	return env, nil
}

// SignMessage signs the deterministic encoding of a message.
func SignMessage(payloadType string, m proto.Message, signers ...Signer) (*Envelope, error) {
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", payloadType, err)
	}
	return Sign(payloadType, payload, signers...)
}

// envelopeJSON is the JSON form of DSSE 1.0.2.
type envelopeJSON struct {
	PayloadType string          `json:"payloadType"`
	Payload     string          `json:"payload"`
	Signatures  []signatureJSON `json:"signatures"`
}

type signatureJSON struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

// EnvelopeToJSON gives the standard JSON form of DSSE, for files and REST.
func EnvelopeToJSON(env *Envelope) ([]byte, error) {
	out := envelopeJSON{PayloadType: env.GetPayloadType(), Payload: base64.StdEncoding.EncodeToString(env.GetPayload())}
	for _, s := range env.GetSignatures() {
		out.Signatures = append(out.Signatures, signatureJSON{
			KeyID: s.GetKeyId(),
			Sig:   base64.StdEncoding.EncodeToString(s.GetSignature()),
		})
	}
	return json.MarshalIndent(out, "", "  ")
}

// EnvelopeFromJSON reads the standard JSON form of DSSE. It verifies nothing.
func EnvelopeFromJSON(data []byte) (*Envelope, error) {
	if len(data) > 2*MaxEnvelopeBytes {
		return nil, Refuse(Nack_TOO_LARGE, "the envelope is over %d bytes", 2*MaxEnvelopeBytes)
	}
	var in envelopeJSON
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, &RefusalError{Reason: Nack_MALFORMED, Detail: "the envelope is not DSSE JSON", Err: err}
	}
	payload, err := base64.StdEncoding.DecodeString(in.Payload)
	if err != nil {
		return nil, Refuse(Nack_MALFORMED, "the envelope's payload is not base64")
	}
	env := &Envelope{PayloadType: in.PayloadType, Payload: payload}
	for _, s := range in.Signatures {
		sig, err := base64.StdEncoding.DecodeString(s.Sig)
		if err != nil {
			return nil, Refuse(Nack_MALFORMED, "a signature of the envelope is not base64")
		}
		env.Signatures = append(env.Signatures, &Signature{KeyId: s.KeyID, Signature: sig})
	}
	return env, nil
}

// signedBy counts the distinct keys of the list that signed the envelope and were not revoked. A revoked key that did
// sign is distinguished from a wrong signature, so that an admin sees which of the two happened.
func signedBy(env *Envelope, keys []*PublicKey, revoked map[string]bool) (ids []string, sawRevoked bool) {
	encoded := dsse.PAE(env.GetPayloadType(), env.GetPayload())
	seen := map[string]bool{}
	for _, s := range env.GetSignatures() {
		for _, k := range keys {
			if k.GetKeyId() != s.GetKeyId() || seen[k.GetKeyId()] || len(k.GetEd25519()) != ed25519.PublicKeySize {
				continue
			}
			if !ed25519.Verify(k.GetEd25519(), encoded, s.GetSignature()) {
				continue
			}
			seen[k.GetKeyId()] = true
			if revoked[k.GetKeyId()] {
				sawRevoked = true
				continue
			}
			ids = append(ids, k.GetKeyId())
		}
	}
	return ids, sawRevoked
}

func checkShape(env *Envelope, payloadType string, maxBytes int) error {
	switch {
	case env == nil:
		return Refuse(Nack_MALFORMED, "the envelope is missing")
	case len(env.GetPayload()) > maxBytes:
		return Refuse(Nack_TOO_LARGE, "the document has %d bytes, the limit is %d", len(env.GetPayload()), maxBytes)
	case len(env.GetSignatures()) > MaxSignatures:
		return Refuse(Nack_TOO_LARGE, "the document has over %d signatures", MaxSignatures)
	case env.GetPayloadType() != payloadType:
		return Refuse(Nack_MALFORMED, "the document is not a %s", payloadType)
	}
	for _, s := range env.GetSignatures() {
		// An envelope is stored as it came: what no key can have made must not take its room there.
		if !isKeyID(s.GetKeyId()) || len(s.GetSignature()) != ed25519.SignatureSize {
			return Refuse(Nack_SIGNATURE_INVALID, "a signature has a length that Ed25519 does not have, or names no key")
		}
	}
	return nil
}

// isKeyID reports whether id has the form that KeyID gives.
func isKeyID(id string) bool {
	for _, c := range id {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(id) == hex.EncodedLen(sha256.Size)
}
