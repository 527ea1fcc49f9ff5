// Package imagesign is the form in which a publisher signs an image: cosign's simple signing (the .sig tag) with an
// Ed25519 key. It makes, reads and checks payloads; it is pure and knows neither registry nor key file. The
// trust bundle and its delegations say which keys count.
//
// Format: https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md
package imagesign

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

const (
	// MediaTypePayload is the media type of a signature layer, whose content is the payload.
	MediaTypePayload = "application/vnd.dev.cosign.simplesigning.v1+json"
	// AnnotationSignature holds the base64 of the signature over the layer's content.
	AnnotationSignature = "dev.cosignproject.cosign/signature"
	// Scheme is the name of this form in publish intents.
	Scheme = "cosign-simple-signing-ed25519"
	// MaxPayloadBytes bounds a payload that is parsed.
	MaxPayloadBytes = 64 << 10
	// MaxSignatures bounds how many signatures of one image are verified; the rest is ignored.
	MaxSignatures = 16

	payloadType = "cosign container image signature"
)

type payload struct {
	Critical critical       `json:"critical"`
	Optional map[string]any `json:"optional"`
}

type critical struct {
	Identity identity `json:"identity"`
	Image    image    `json:"image"`
	Type     string   `json:"type"`
}

type identity struct {
	DockerReference string `json:"docker-reference"`
}

type image struct {
	DockerManifestDigest string `json:"docker-manifest-digest"`
}

// Tag is where the signatures of an image lie, in the image's own repository.
func Tag(digest string) string { return strings.Replace(digest, ":", "-", 1) + ".sig" }

// Payload says: this digest belongs into this repository. The registry's host is left out, because hubs may move.
func Payload(repository, digest string) ([]byte, error) {
	p := payload{Critical: critical{Identity: identity{repository}, Image: image{digest}, Type: payloadType}}
	out, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode the signature payload: %w", err)
	}
	return out, nil
}

// Errors of Check.
var (
	ErrSignature = errors.New("the signature is not this key's")
	ErrPayload   = errors.New("the signed payload is not a signature of this image in this repository")
)

// Check reports whether key signed payload and payload speaks of this digest in this repository. A signature for one
// repository does not count in another, because publishers are delegated by repository.
func Check(key ed25519.PublicKey, signed, signature []byte, repository, digest string) error {
	if len(key) != ed25519.PublicKeySize || !ed25519.Verify(key, signed, signature) {
		return ErrSignature
	}
	if len(signed) > MaxPayloadBytes {
		return ErrPayload
	}
	var p payload
	dec := json.NewDecoder(bytes.NewReader(signed))
	if err := dec.Decode(&p); err != nil {
		return fmt.Errorf("%w: %w", ErrPayload, err)
	}
	if p.Critical.Type != payloadType || p.Critical.Image.DockerManifestDigest != digest ||
		withoutHost(p.Critical.Identity.DockerReference) != repository {
		return ErrPayload
	}
	return nil
}

// withoutHost drops a registry's host, which has a dot, a colon or is localhost (the rule of docker references).
func withoutHost(reference string) string {
	first, rest, found := strings.Cut(reference, "/")
	if found && (strings.ContainsAny(first, ".:") || first == "localhost") {
		return rest
	}
	return reference
}
