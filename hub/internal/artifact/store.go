package artifact

import (
	"context"
	"errors"
	"path"
	"regexp"
	"strings"
	"sync"

	"github.com/distribution/distribution/v3/registry/storage/driver"
	"github.com/opencontainers/go-digest"
)

const (
	// storeName is the name of the store in the distribution library.
	storeName = "gpuaas"
	// storeRoot is the root of the layout that the distribution library documents in registry/storage/paths.go.
	storeRoot        = "/docker/registry/v2"
	repositoriesRoot = storeRoot + "/repositories"
	blobsRoot        = storeRoot + "/blobs"
)

// store is the storage driver for pushes and pulls: it counts the bytes of each owner, refuses those above a limit, and
// records which digests are in use, so that Collect keeps them.
type store struct {
	driver.StorageDriver
	space *space
	uses  *uses
	// digestIn finds the digest in a path.
	digestIn *regexp.Regexp
	// tags is locked for writing while a tag is checked and removed, for reading while one is set.
	tags sync.RWMutex
}

func newStore(inner driver.StorageDriver, space *space, uses *uses) *store {
	return &store{
		StorageDriver: inner, space: space, uses: uses,
		digestIn: regexp.MustCompile(`/(sha256|sha384|sha512)/(?:[0-9a-f]{2}/)?([0-9a-f]{64,128})(?:/|$)`),
	}
}

// place is what a path of the store stands for; parts that it does not have are empty.
type place struct {
	repository string
	// upload is the directory of an unfinished upload.
	upload string
	// data is true for the content of an upload, false for the files beside it.
	data   bool
	digest digest.Digest
	// link is true for the link of a repository to a blob: a layer, configuration or manifest.
	link bool
	// tag is true where writing the path sets a tag.
	tag bool
}

func (s *store) placeOf(p string) place {
	var out place
	if found := s.digestIn.FindStringSubmatch(p); found != nil {
		out.digest = digest.NewDigestFromEncoded(digest.Algorithm(found[1]), found[2])
	}
	rest, ok := strings.CutPrefix(p, repositoriesRoot+"/")
	if !ok {
		return out
	}
	for _, kind := range []string{"/_layers", "/_manifests", "/_uploads"} {
		name, below, ok := strings.Cut(rest, kind+"/")
		if !ok {
			continue
		}
		out.repository = name
		switch {
		case kind == "/_uploads":
			id, file, _ := strings.Cut(below, "/")
			out.upload, out.data = repositoriesRoot+"/"+name+kind+"/"+id, file == "data"
		case path.Base(below) == "link" && !strings.HasPrefix(below, "tags/"):
			out.link = out.digest != ""
		case strings.HasSuffix(below, "/current/link"):
			out.tag = true
		}
		return out
	}
	return out
}

// isAbsent reports whether the driver found nothing at a path.
func isAbsent(err error) bool { return errors.As(err, new(driver.PathNotFoundError)) }

func blobPath(d digest.Digest) string {
	return path.Join(blobsRoot, d.Algorithm().String(), d.Encoded()[:2], d.Encoded(), "data")
}

// use runs one operation on a path and records the use of its digest before; an absent digest is not used.
func (s *store) use(p string, operation func(at place) error) error {
	at := s.placeOf(p)
	if at.digest == "" {
		return operation(at)
	}
	undo := s.uses.begin(at.digest)
	err := operation(at)
	if isAbsent(err) {
		undo()
	}
	return err
}

// GetContent is part of driver.StorageDriver.
func (s *store) GetContent(ctx context.Context, p string) (content []byte, err error) {
	err = s.use(p, func(place) (err error) {
		content, err = s.StorageDriver.GetContent(ctx, p)
		return err
	})
	return content, err
}

// Stat is part of driver.StorageDriver.
func (s *store) Stat(ctx context.Context, p string) (info driver.FileInfo, err error) {
	err = s.use(p, func(place) (err error) {
		info, err = s.StorageDriver.Stat(ctx, p)
		return err
	})
	return info, err
}

// PutContent is part of driver.StorageDriver. A link adds its blob to the repository's owner.
func (s *store) PutContent(ctx context.Context, p string, content []byte) error {
	return s.use(p, func(at place) error {
		if at.tag {
			s.tags.RLock()
			defer s.tags.RUnlock()
		}
		if !at.link {
			if err := s.space.reserve(int64(len(content))); err != nil {
				return refuse(ctx, err)
			}
			return s.StorageDriver.PutContent(ctx, p, content)
		}
		info, err := s.StorageDriver.Stat(ctx, blobPath(at.digest))
		if err != nil {
			return err
		}
		if err := s.space.link(at.repository, at.digest, info.Size()); err != nil {
			return refuse(ctx, err)
		}
		return s.StorageDriver.PutContent(ctx, p, content)
	})
}

// Writer is part of driver.StorageDriver. The content of uploads counts from its first byte.
func (s *store) Writer(ctx context.Context, p string, appending bool) (driver.FileWriter, error) {
	w, err := s.StorageDriver.Writer(ctx, p, appending)
	at := s.placeOf(p)
	if err != nil || !at.data {
		return w, err
	}
	s.space.resume(at.repository, at.upload, w.Size())
	return &uploadWriter{FileWriter: w, ctx: ctx, space: s.space, at: at}, nil
}

// Move is part of driver.StorageDriver.
func (s *store) Move(ctx context.Context, from, to string) error {
	return s.use(to, func(place) error { return s.StorageDriver.Move(ctx, from, to) })
}

// Delete is part of driver.StorageDriver.
func (s *store) Delete(ctx context.Context, p string) error {
	err := s.StorageDriver.Delete(ctx, p)
	if at := s.placeOf(p + "/"); at.upload != "" && err == nil {
		s.space.drop(at.upload)
	}
	return err
}

// uploadWriter counts the bytes of one upload.
type uploadWriter struct {
	driver.FileWriter
	ctx   context.Context //nolint:containedctx // of the request that the writer was opened in; Write has none
	space *space
	at    place
}

// Write is part of driver.FileWriter.
func (w *uploadWriter) Write(p []byte) (int, error) {
	if err := w.space.grow(w.at.repository, w.at.upload, int64(len(p))); err != nil {
		return 0, refuse(w.ctx, err)
	}
	return w.FileWriter.Write(p)
}
