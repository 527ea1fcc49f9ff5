package artifact

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/distribution/distribution/v3"
	"github.com/distribution/reference"
	godigest "github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/imagesign"
)

const (
	// maxConfigBytes bounds an image's configuration that is read.
	maxConfigBytes = 4 << 20
	// maxIndexEntries bounds the images of one index that are read; an index with more is refused.
	maxIndexEntries = 64
)

// Media types of Docker's schema 2, which registries treat like their OCI counterparts.
const (
	dockerManifest     = "application/vnd.docker.distribution.manifest.v2+json"
	dockerManifestList = "application/vnd.docker.distribution.manifest.list.v2+json"
)

// platformName is os/architecture[/variant]; it is stored and shown, so that it must be short and text.
var platformName = regexp.MustCompile(`^[\w.-]{1,32}/[\w.-]{1,32}(/[\w.-]{1,32})?$`)

// Image is what the registry holds under a digest.
type Image struct {
	MediaType string
	SizeBytes int64
	Platforms []string
	// Signatures are those of the .sig tag, unchecked.
	Signatures []Signature
}

// Signature is one layer of a .sig tag.
type Signature struct {
	Payload       []byte
	PayloadDigest string
	Signature     []byte
}

// Inspect reads the image under the digest, its platforms, size and signatures, from the registry's own storage.
func (r *Registry) Inspect(ctx context.Context, repository, digest string) (Image, error) {
	d, err := godigest.Parse(digest)
	if err != nil || d.Algorithm() != godigest.SHA256 {
		return Image{}, fault.New(fault.Malformed, codeDigestMalformed, "The digest must be sha256:<hex>.", err).WithField(
			"/digest",
			"is not sha256:<64 hex digits>").Permanent()
	}
	named, err := reference.WithName(repository)
	if err != nil {
		return Image{}, fault.New(fault.Malformed, fault.CodeRepositoryMalformed, "The repository name cannot be used.",
			err).WithField("/repository", "is not a repository name").Permanent()
	}
	repo, err := r.content.Repository(ctx, named)
	if err != nil {
		return Image{}, fmt.Errorf("open repository %s: %w", repository, err)
	}
	manifests, err := repo.Manifests(ctx)
	if err != nil {
		return Image{}, fmt.Errorf("open manifests of %s: %w", repository, err)
	}
	in := inspector{repo: repo, manifests: manifests, seen: map[godigest.Digest]bool{}}
	if err := in.add(ctx, d, true); err != nil {
		return Image{}, err
	}
	if !slices.ContainsFunc(in.image.Platforms, func(p string) bool { return strings.HasPrefix(p, "linux/") }) {
		return Image{}, unsupported("has no image for Linux")
	}
	if in.image.Signatures, err = in.signatures(ctx, digest); err != nil {
		return Image{}, err
	}
	return in.image, nil
}

type inspector struct {
	repo      distribution.Repository
	manifests distribution.ManifestService
	image     Image
	seen      map[godigest.Digest]bool
}

// document is the part of a manifest or an index that matters here.
type document struct {
	Config    v1.Descriptor   `json:"config"`
	Layers    []v1.Descriptor `json:"layers"`
	Manifests []v1.Descriptor `json:"manifests"`
}

func (in *inspector) read(ctx context.Context,
	d godigest.Digest,
) (mediaType string, size int64, doc document, err error) {
	m, err := in.manifests.Get(ctx, d)
	if err != nil {
		if isUnknown(err) {
			return "", 0, document{}, notPushed()
		}
		return "", 0, document{}, fmt.Errorf("read manifest %s: %w", d, err)
	}
	mediaType, raw, err := m.Payload()
	if err != nil {
		return "", 0, document{}, fmt.Errorf("read manifest %s: %w", d, err)
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return "", 0, document{}, fmt.Errorf("decode manifest %s: %w", d, err)
	}
	return mediaType, int64(len(raw)), doc, nil
}

func (in *inspector) add(ctx context.Context, d godigest.Digest, top bool) error {
	if in.seen[d] {
		return nil
	}
	in.seen[d] = true
	mediaType, size, doc, err := in.read(ctx, d)
	if err != nil {
		return err
	}
	in.image.SizeBytes += size
	switch mediaType {
	case v1.MediaTypeImageIndex, dockerManifestList:
		// An index in an index would make the depth unbounded, and no runtime pulls one.
		if !top || len(doc.Manifests) > maxIndexEntries {
			return unsupported("is an index that nests or has too many entries")
		}
		in.image.MediaType = mediaType
		for _, m := range doc.Manifests {
			// Build attestations lie in an index as images of no platform.
			if m.Platform != nil && m.Platform.OS == "unknown" {
				continue
			}
			if err := in.add(ctx, m.Digest, false); err != nil {
				return err
			}
		}
		return nil
	case v1.MediaTypeImageManifest, dockerManifest:
	default:
		return unsupported("is neither an image nor an index")
	}
	if top {
		in.image.MediaType = mediaType
	}
	in.image.SizeBytes += doc.Config.Size
	for _, l := range doc.Layers {
		in.image.SizeBytes += l.Size
		// Resolving a layer also keeps it from being collected.
		stored, err := in.repo.Blobs(ctx).Stat(ctx, l.Digest)
		switch {
		case isUnknown(err):
			return notPushed()
		case err != nil:
			return fmt.Errorf("look up layer %s: %w", l.Digest, err)
		case stored.Size != l.Size:
			return unsupported("has a layer of another size than its manifest says")
		}
	}
	return in.addPlatform(ctx, doc.Config)
}

func (in *inspector) addPlatform(ctx context.Context, config v1.Descriptor) error {
	raw, err := in.blob(ctx, config.Digest, config.Size, maxConfigBytes)
	if err != nil {
		return err
	}
	var p v1.Platform
	err = json.Unmarshal(raw, &p)
	name := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		name += "/" + p.Variant
	}
	if err != nil || !platformName.MatchString(name) {
		return unsupported("has a configuration without a platform")
	}
	if !slices.Contains(in.image.Platforms, name) {
		in.image.Platforms = append(in.image.Platforms, name)
	}
	return nil
}

func (in *inspector) blob(ctx context.Context, d godigest.Digest, size, limit int64) ([]byte, error) {
	if size > limit {
		return nil, unsupported("has a part that is too large to be read")
	}
	f, err := in.repo.Blobs(ctx).Open(ctx, d)
	if err != nil {
		if isUnknown(err) {
			return nil, notPushed()
		}
		return nil, fmt.Errorf("open blob %s: %w", d, err)
	}
	defer func() { _ = f.Close() }() // opened for reading
	raw, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	if int64(len(raw)) > limit || godigest.FromBytes(raw) != d {
		return nil, unsupported("has a part that is not its digest")
	}
	return raw, nil
}

func (in *inspector) signatures(ctx context.Context, digest string) ([]Signature, error) {
	tag, err := in.repo.Tags(ctx).Get(ctx, imagesign.Tag(digest))
	if err != nil {
		if isUnknown(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("look for signatures of %s: %w", digest, err)
	}
	_, _, doc, err := in.read(ctx, tag.Digest)
	if err != nil {
		return nil, err
	}
	var out []Signature
	for _, l := range doc.Layers {
		if len(out) == imagesign.MaxSignatures {
			break
		}
		sig, err := base64.StdEncoding.DecodeString(l.Annotations[imagesign.AnnotationSignature])
		if l.MediaType != imagesign.MediaTypePayload || err != nil {
			// Kept as one that does not count, so that the state becomes rejected and not unverified.
			out = append(out, Signature{})
			continue
		}
		payload, err := in.blob(ctx, l.Digest, l.Size, imagesign.MaxPayloadBytes)
		if err != nil {
			return nil, err
		}
		out = append(out, Signature{Payload: payload, PayloadDigest: l.Digest.String(), Signature: sig})
	}
	return out, nil
}

func isUnknown(err error) bool {
	return errors.As(err, new(distribution.ErrManifestUnknownRevision)) ||
		errors.As(err, new(distribution.ErrManifestUnknown)) ||
		errors.As(err, new(distribution.ErrTagUnknown)) || errors.As(err, new(distribution.ErrRepositoryUnknown)) ||
		isAbsent(err) || errors.Is(err, distribution.ErrBlobUnknown)
}

func notPushed() error {
	return fault.New(fault.Unprocessable, CodeNotPushed, "The registry does not hold this digest in this repository; "+
		"push it first.", nil).
		WithField("/digest", "was not pushed to the repository").Permanent()
}

func unsupported(reason string) error {
	return fault.New(fault.Unprocessable, CodeUnsupported, "This artifact cannot be run here.", nil).WithField("/digest",
		reason).Permanent()
}
