package artifact

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/distribution/distribution/v3"
	"github.com/distribution/distribution/v3/registry/storage"
	"github.com/distribution/reference"
	"github.com/jackc/pgx/v5"
	"github.com/opencontainers/go-digest"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// CollectGrace is how long Collect keeps what was pushed, pulled or resolved. It is longer than a publish intent and
// its last token, so that a push finds at its end what it found at its beginning.
const CollectGrace = 2 * IntentLifetime

// Ref is the digest of an image in a repository.
type Ref struct{ Repository, Digest string }

// Roots are what Collect keeps.
type Roots struct {
	// Images are kept with everything that they refer to, and with their signatures.
	Images []Ref
	// Repositories have an open publish intent; all of their content is kept.
	Repositories []string
}

// RootsOf lists the artifacts that are not retired or revoked, and the repositories that may be pushed to.
func RootsOf(ctx context.Context, tx db.Tx, now time.Time) (Roots, error) {
	images, err := db.Select(ctx, tx, pgx.RowToStructByPos[Ref],
		`SELECT DISTINCT repository, digest FROM artifacts WHERE status NOT IN ('retired', 'revoked')`)
	if err != nil {
		return Roots{}, err
	}
	repositories, err := db.Select(ctx, tx, pgx.RowTo[string],
		`SELECT DISTINCT repository FROM publish_intents WHERE expires_at > $1`, now.Add(-tokenLifetime))
	return Roots{Images: images, Repositories: repositories}, err
}

// RefsIn finds the image references (repository@digest) in the text of a manifest, whatever its schema.
func RefsIn(text []byte) []Ref {
	var out []Ref
	for _, found := range regexp.MustCompile(`([a-z0-9][a-z0-9._/-]*)@(sha256:[0-9a-f]{64})`).FindAllSubmatch(text, -1) {
		out = append(out, Ref{string(found[1]), string(found[2])})
	}
	return out
}

// Collected is what Collect removed.
type Collected struct {
	Manifests, Layers, Blobs int
	// Bytes is the size of the removed blobs.
	Bytes int64
}

// Collect removes what no root reaches and nothing has used within CollectGrace. Pushes and pulls go on: each removal
// checks the last use again while new uses of the digest wait. A repository that cannot be read is kept.
func (r *Registry) Collect(ctx context.Context) (Collected, error) {
	cutoff := r.conf.Now().Add(-CollectGrace)
	var out Collected
	if r.store.uses.since.After(cutoff) {
		return out, nil
	}
	roots, err := r.conf.Roots(ctx)
	if err != nil {
		return out, err
	}
	repositories, err := r.repositories(ctx)
	if err != nil {
		return out, err
	}
	m := marker{
		r: r, blobs: map[digest.Digest]bool{}, links: map[string]map[digest.Digest]bool{}, whole: map[string]bool{},
	}
	images := map[string][]string{}
	for _, ref := range roots.Images {
		images[ref.Repository] = append(images[ref.Repository], ref.Digest)
	}
	for _, name := range repositories {
		if err := m.mark(ctx, name, images[name], slices.Contains(roots.Repositories, name)); err != nil {
			return out, err
		}
	}
	s := sweeper{r: r, marked: m, cutoff: cutoff, vacuum: storage.NewVacuum(ctx, r.driver)}
	for _, name := range repositories {
		if m.whole[name] {
			continue
		}
		if err := s.sweepRepository(ctx, name); err != nil {
			return s.out, err
		}
	}
	if err := s.sweepBlobs(ctx); err != nil {
		return s.out, err
	}
	r.store.uses.forget(cutoff)
	r.intents.forget(cutoff)
	return s.out, r.measure(ctx)
}

// repositories lists all repositories; the library's own list leaves out those without a manifest.
func (r *Registry) repositories(ctx context.Context) ([]string, error) {
	var out []string
	var below func(dir string) error
	below = func(dir string) error {
		entries, err := r.list(ctx, dir)
		if err != nil {
			return fmt.Errorf("list repositories: %w", err)
		}
		isRepository := false
		for _, entry := range entries {
			if strings.HasPrefix(path.Base(entry), "_") {
				isRepository = true
			} else if err := below(entry); err != nil {
				return err
			}
		}
		if name, ok := strings.CutPrefix(dir, repositoriesRoot+"/"); ok && isRepository {
			out = append(out, name)
		}
		return nil
	}
	return out, below(repositoriesRoot)
}

// list lists a directory; an absent one is empty.
func (r *Registry) list(ctx context.Context, dir string) ([]string, error) {
	entries, err := r.driver.List(ctx, dir)
	if isAbsent(err) {
		return nil, nil
	}
	return entries, err
}

// size returns the size of a file; an absent one has none.
func (r *Registry) size(ctx context.Context, file string) (bytes int64, exists bool, err error) {
	info, err := r.driver.Stat(ctx, file)
	if isAbsent(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	return info.Size(), true, nil
}

// repository is one repository, with the services that list its content.
type repository struct {
	distribution.Repository
	manifests distribution.ManifestService
	revisions distribution.ManifestEnumerator
	layers    distribution.ManifestEnumerator
}

func openRepository(ctx context.Context, registry distribution.Namespace, name string) (repository, error) {
	named, err := reference.WithName(name)
	if err != nil {
		return repository{}, err
	}
	repo, err := registry.Repository(ctx, named)
	if err != nil {
		return repository{}, err
	}
	manifests, err := repo.Manifests(ctx)
	if err != nil {
		return repository{}, err
	}
	out := repository{Repository: repo, manifests: manifests}
	var lists, listsLayers bool
	out.revisions, lists = manifests.(distribution.ManifestEnumerator)
	out.layers, listsLayers = repo.Blobs(ctx).(distribution.ManifestEnumerator)
	if !lists || !listsLayers {
		return repository{}, errors.New("the registry's storage cannot list the content of a repository")
	}
	return out, nil
}

// digests lists the digests of an enumeration; one without a directory has none.
func digests(ctx context.Context, of distribution.ManifestEnumerator) ([]digest.Digest, error) {
	var out []digest.Digest
	err := of.Enumerate(ctx, func(d digest.Digest) error {
		out = append(out, d)
		return nil
	})
	if isAbsent(err) {
		return nil, nil
	}
	return out, err
}

// tags lists the repository's tags; one without any has none.
func (p repository) tags(ctx context.Context) ([]string, error) {
	tags, err := p.Tags(ctx).All(ctx)
	if err != nil && isUnknown(err) {
		return nil, nil
	}
	return tags, err
}

// marker finds what Collect keeps.
type marker struct {
	r *Registry
	// blobs are kept, whichever repositories link to them.
	blobs map[digest.Digest]bool
	// links are kept, by repository.
	links map[string]map[digest.Digest]bool
	// whole repositories are kept as they are.
	whole map[string]bool
}

func (m marker) keep(name string, d digest.Digest) (first bool) {
	m.blobs[d] = true
	if m.links[name] == nil {
		m.links[name] = map[digest.Digest]bool{}
	}
	first = !m.links[name][d]
	m.links[name][d] = true
	return first
}

// mark keeps the images of a repository; all of its content where a push may be in progress.
func (m marker) mark(ctx context.Context, name string, images []string, open bool) error {
	repo, err := openRepository(ctx, m.r.raw, name)
	if err != nil {
		return fmt.Errorf("open repository %s: %w", name, err)
	}
	pushing, err := m.r.hasUploads(ctx, name)
	if err != nil {
		return err
	}
	if open || pushing {
		return m.markAll(ctx, repo, name)
	}
	for _, d := range images {
		err = errors.Join(err, m.markManifest(ctx, repo, name, digest.Digest(d)))
	}
	err = errors.Join(err, m.markSignatures(ctx, repo, name))
	if err != nil {
		m.r.log.WarnContext(ctx, "a repository cannot be read; nothing of it is collected",
			slog.String("repository", name), slog.Any("error", err))
		return m.markAll(ctx, repo, name)
	}
	return nil
}

func (m marker) markAll(ctx context.Context, repo repository, name string) error {
	m.whole[name] = true
	for _, of := range []distribution.ManifestEnumerator{repo.revisions, repo.layers} {
		found, err := digests(ctx, of)
		if err != nil {
			return fmt.Errorf("list the content of %s: %w", name, err)
		}
		for _, d := range found {
			m.keep(name, d)
		}
	}
	return nil
}

// markManifest keeps a manifest or index with all that it refers to. An absent one is ignored.
func (m marker) markManifest(ctx context.Context, repo repository, name string, d digest.Digest) error {
	if err := d.Validate(); err != nil {
		return err
	}
	if !m.keep(name, d) {
		return nil
	}
	manifest, err := repo.manifests.Get(ctx, d)
	if err != nil {
		if isUnknown(err) {
			return nil
		}
		return err
	}
	for _, ref := range manifest.References() {
		isManifest, err := repo.manifests.Exists(ctx, ref.Digest)
		if err != nil {
			return err
		}
		if !isManifest {
			m.keep(name, ref.Digest)
		} else if err := m.markManifest(ctx, repo, name, ref.Digest); err != nil {
			return err
		}
	}
	return nil
}

// markSignatures keeps the images whose tag names a kept digest: cosign's signatures, attestations and SBOMs.
func (m marker) markSignatures(ctx context.Context, repo repository, name string) error {
	tags, err := repo.tags(ctx)
	if err != nil {
		return fmt.Errorf("list the tags of %s: %w", name, err)
	}
	for again := true; again; {
		again = false
		for _, tag := range tags {
			hex, ok := strings.CutPrefix(tag, "sha256-")
			hex, _, _ = strings.Cut(hex, ".")
			if !ok || !m.links[name][digest.NewDigestFromEncoded(digest.SHA256, hex)] {
				continue
			}
			found, err := repo.Tags(ctx).Get(ctx, tag)
			if err != nil && !isUnknown(err) {
				return fmt.Errorf("read the tag %s of %s: %w", tag, name, err)
			}
			if err != nil || m.links[name][found.Digest] {
				continue
			}
			again = true
			if err := m.markManifest(ctx, repo, name, found.Digest); err != nil {
				return err
			}
		}
	}
	return nil
}

// sweeper removes what the marker has not kept.
type sweeper struct {
	r      *Registry
	marked marker
	cutoff time.Time
	vacuum storage.Vacuum
	out    Collected
}

func (s *sweeper) sweepRepository(ctx context.Context, name string) error {
	repo, err := openRepository(ctx, s.r.raw, name)
	if err != nil {
		return fmt.Errorf("open repository %s: %w", name, err)
	}
	revisions, err := digests(ctx, repo.revisions)
	if err != nil {
		return fmt.Errorf("list the manifests of %s: %w", name, err)
	}
	tags, err := repo.tags(ctx)
	if err != nil {
		return fmt.Errorf("list the tags of %s: %w", name, err)
	}
	removed, err := s.sweep(revisions, s.marked.links[name], func(d digest.Digest) error {
		return s.removeManifest(ctx, repo, name, d, tags)
	})
	s.out.Manifests += removed
	if err != nil {
		return fmt.Errorf("remove the manifests of %s: %w", name, err)
	}
	layers, err := digests(ctx, repo.layers)
	if err != nil {
		return fmt.Errorf("list the layers of %s: %w", name, err)
	}
	removed, err = s.sweep(layers, s.marked.links[name], func(d digest.Digest) error {
		return s.r.driver.Delete(ctx, path.Join(repositoriesRoot, name, "_layers", d.Algorithm().String(), d.Encoded()))
	})
	s.out.Layers += removed
	if err != nil {
		return fmt.Errorf("remove the layers of %s: %w", name, err)
	}
	return nil
}

// sweep removes the digests that are neither kept nor used since the cutoff, and returns how many it removed.
func (s *sweeper) sweep(found []digest.Digest, kept map[digest.Digest]bool,
	remove func(digest.Digest) error,
) (removed int, err error) {
	for _, d := range found {
		if kept[d] {
			continue
		}
		unused, err := s.r.store.uses.ifUnused(d, s.cutoff, func() error { return remove(d) })
		if err != nil {
			return removed, fmt.Errorf("%s: %w", d, err)
		}
		if unused {
			removed++
		}
	}
	return removed, nil
}

func (s *sweeper) removeManifest(ctx context.Context, repo repository, name string, d digest.Digest,
	tags []string,
) error {
	s.r.store.tags.Lock()
	defer s.r.store.tags.Unlock()
	for _, tag := range tags {
		current, err := repo.Tags(ctx).Get(ctx, tag)
		if err != nil && !isUnknown(err) {
			return err
		}
		if err == nil && current.Digest == d {
			if err := repo.Tags(ctx).Untag(ctx, tag); err != nil {
				return err
			}
		}
	}
	return s.vacuum.RemoveManifest(name, d, tags)
}

func (s *sweeper) sweepBlobs(ctx context.Context) error {
	var unmarked []digest.Digest
	err := s.r.raw.Blobs().Enumerate(ctx, func(d digest.Digest) error {
		if !s.marked.blobs[d] {
			unmarked = append(unmarked, d)
		}
		return nil
	})
	if err != nil && !isAbsent(err) {
		return fmt.Errorf("list blobs: %w", err)
	}
	s.out.Blobs, err = s.sweep(unmarked, nil, func(d digest.Digest) error {
		bytes, _, err := s.r.size(ctx, blobPath(d))
		if err == nil {
			err = s.vacuum.RemoveBlob(d.String())
		}
		if err == nil {
			s.out.Bytes += bytes
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("remove blobs: %w", err)
	}
	return nil
}

// hasUploads reports whether an upload to the repository was begun and not ended.
func (r *Registry) hasUploads(ctx context.Context, name string) (bool, error) {
	uploads, err := r.list(ctx, path.Join(repositoriesRoot, name, "_uploads"))
	return len(uploads) > 0, err
}

// measure reads from the disk what each owner stores.
func (r *Registry) measure(ctx context.Context) error {
	r.store.space.begin()
	found := map[string]map[digest.Digest]int64{}
	names, err := r.repositories(ctx)
	if err != nil {
		return fmt.Errorf("measure the registry: %w", err)
	}
	for _, name := range names {
		owner, _ := OrgSlugOf(name)
		if found[owner] == nil {
			found[owner] = map[digest.Digest]int64{}
		}
		if err := r.measureRepository(ctx, name, found[owner]); err != nil {
			return fmt.Errorf("measure %s: %w", name, err)
		}
	}
	r.store.space.replace(found)
	return nil
}

// measureRepository adds the blobs of a repository to found, and counts its unfinished uploads.
func (r *Registry) measureRepository(ctx context.Context, name string, found map[digest.Digest]int64) error {
	repo, err := openRepository(ctx, r.raw, name)
	if err != nil {
		return err
	}
	for _, of := range []distribution.ManifestEnumerator{repo.revisions, repo.layers} {
		linked, err := digests(ctx, of)
		if err != nil {
			return err
		}
		for _, d := range linked {
			bytes, exists, err := r.size(ctx, blobPath(d))
			if err != nil {
				return err
			}
			if exists {
				found[d] = bytes
			}
		}
	}
	uploads, err := r.list(ctx, path.Join(repositoriesRoot, name, "_uploads"))
	if err != nil {
		return err
	}
	for _, dir := range uploads {
		bytes, exists, err := r.size(ctx, path.Join(dir, "data"))
		if err != nil {
			return err
		}
		if exists {
			r.store.space.known(name, dir, bytes)
		}
	}
	return nil
}
