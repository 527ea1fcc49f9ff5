package manifest

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Verified is a valid manifest whose publisher was checked. Only Verify makes one; Admits refuses its zero value.
type Verified struct {
	manifest  Manifest
	publisher protocol.Publisher
	digest    [sha256.Size]byte
	ok        bool
}

// OK reports whether this came from Verify.
func (v Verified) OK() bool { return v.ok }

// Manifest returns the document. Callers do not change it.
func (v Verified) Manifest() Manifest { return v.manifest }

// Publisher returns who signed it and for which repositories.
func (v Verified) Publisher() protocol.Publisher { return v.publisher }

// Digest returns the SHA-256 of the signed document.
func (v Verified) Digest() [sha256.Size]byte { return v.digest }

// Sign validates a document and wraps its very bytes in an envelope signed by the publisher.
func Sign(doc []byte, signer protocol.Signer) (*protocol.Envelope, error) {
	if _, err := Parse(doc); err != nil {
		return nil, err
	}
	env, err := protocol.Sign(protocol.PayloadManifest, doc, signer)
	if err != nil {
		return nil, fmt.Errorf("sign the manifest: %w", err)
	}
	return env, nil
}

// Verify checks the publisher's signature first and parses afterwards: no stranger's document reaches the parser. Every
// image of the manifest must lie below a prefix that was delegated to the publisher, and its version must not be older
// than the trust bundle's lowest one of the app: otherwise a thief of the state key could start versions with known
// faults. The error is a *fault.Error, or a protocol refusal.
func Verify(env, delegation *protocol.Envelope, b protocol.Bundle, now time.Time) (Verified, error) {
	return Parsed(nil).Verify(env, delegation, b, now)
}

// Parsed holds manifests by the SHA-256 of their document, so that one which many workloads name is parsed once. It
// grows with each valid document. Callers do not use it at the same time, and do not change what it holds.
type Parsed map[[sha256.Size]byte]Manifest

func (p Parsed) parse(doc []byte) (Manifest, error) {
	digest := sha256.Sum256(doc)
	if m, known := p[digest]; known {
		return m, nil
	}
	m, err := Parse(doc)
	if err == nil && p != nil {
		p[digest] = m
	}
	return m, err
}

// Verify is Verify for a document that p may hold. Signatures are checked each time.
func (p Parsed) Verify(env, delegation *protocol.Envelope, b protocol.Bundle, now time.Time) (Verified, error) {
	doc, publisher, err := protocol.VerifyPublisher(env, delegation, b, now)
	if err != nil {
		return Verified{}, err
	}
	m, err := p.parse(doc)
	if err != nil {
		return Verified{}, err
	}
	if floor := b.MinVersion(m.App.Slug); floor != "" && Older(m.Version.Version, floor) {
		return Verified{}, invalid(fault.Unprocessable, CodeTooOld, "The version may not start any more.", []fault.Field{{
			Pointer: "/version/version", Reason: "is older than " + floor + ", the lowest version of the app that the " +
				"platform accepts",
		}})
	}
	var fields []fault.Field
	for _, image := range m.Images() {
		if !belowPrefix(image.Ref, publisher.RepositoryPrefixes) {
			fields = append(fields, fault.Field{
				Pointer: image.Pointer,
				Reason:  "lies outside the repositories that were delegated to the publisher",
				Hint:    "the delegation covers " + strings.Join(publisher.RepositoryPrefixes, ", "),
			})
		}
	}
	if len(fields) > 0 {
		return Verified{}, invalid(fault.Unprocessable, CodeInvalid, "The publisher may not speak for every image of this "+
			"manifest.", fields)
	}
	return Verified{manifest: m, publisher: publisher, digest: sha256.Sum256(doc), ok: true}, nil
}

func belowPrefix(imageRef string, prefixes []string) bool {
	repository, _, _ := strings.Cut(imageRef, "@")
	return slices.ContainsFunc(prefixes, func(prefix string) bool {
		return strings.HasSuffix(prefix, "/") && strings.HasPrefix(repository, prefix)
	})
}
