package artifact

import (
	"fmt"
	"math"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// space counts the bytes of each owner of repositories: blobs that its repositories link to, each once, and unfinished
// uploads. It is in memory only; measure reads it from the disk at the start and after each collection.
type space struct {
	dir string
	// minFree is how many bytes stay free on the file system, for its other users.
	minFree int64

	mu     sync.Mutex
	owners map[string]*ownerSpace
	// uploads holds the unfinished ones by their directory.
	uploads map[string]*upload
	// since holds what was linked since begin, while measure reads the disk; nil otherwise.
	since map[string]map[digest.Digest]int64
}

type ownerSpace struct {
	blobs map[digest.Digest]int64
	bytes int64
	// uploading is the sum of the owner's uploads.
	uploading int64
	limit     int64
}

type upload struct {
	owner string
	bytes int64
}

// spaceError refuses to store more.
type spaceError struct {
	// full is true for the file system, false for the owner's quota.
	full        bool
	used, limit int64
}

// Error is part of error.
func (e *spaceError) Error() string {
	if e.full {
		return "the registry's disk is nearly full"
	}
	return fmt.Sprintf("the org's quota registry_bytes is %d, %d are in use", e.limit, e.used)
}

// owner returns the owner of a repository; the caller holds mu.
func (s *space) owner(repository string) (string, *ownerSpace) {
	name, _ := OrgSlugOf(repository)
	o := s.owners[name]
	if o == nil {
		o = &ownerSpace{blobs: map[digest.Digest]int64{}, limit: math.MaxInt64}
		s.owners[name] = o
	}
	return name, o
}

// setLimit sets the owner's quota.
func (s *space) setLimit(repository string, limit int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, o := s.owner(repository)
	o.limit = limit
}

// used returns the bytes of the owner.
func (s *space) used(ownerSlug string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.owners[ownerSlug]; o != nil {
		return o.bytes + o.uploading
	}
	return 0
}

// fits returns an error where n more bytes exceed the owner's quota or the free space.
func (s *space) fits(repository string, n int64) error {
	s.mu.Lock()
	_, o := s.owner(repository)
	used, limit := o.bytes+o.uploading, o.limit
	s.mu.Unlock()
	if n > limit-used {
		return &spaceError{used: used, limit: limit}
	}
	return s.reserve(n)
}

// reserve returns an error where n more bytes leave less than minFree on the file system.
func (s *space) reserve(n int64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.dir, &fs); err != nil {
		return fmt.Errorf("look for space in the registry's directory: %w", err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free-n < s.minFree { //nolint:unconvert // its type depends on the platform
		return &spaceError{full: true}
	}
	return nil
}

// resume counts an upload that has stored size bytes so far.
func (s *space) resume(repository, dir string, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name, o := s.owner(repository)
	u := s.uploads[dir]
	if u == nil {
		u = &upload{owner: name}
		s.uploads[dir] = u
	}
	o.uploading += size - u.bytes
	u.bytes = size
}

// known counts an upload that was found on the disk, unless it is counted already.
func (s *space) known(repository, dir string, size int64) {
	s.mu.Lock()
	counted := s.uploads[dir] != nil
	s.mu.Unlock()
	if !counted {
		s.resume(repository, dir, size)
	}
}

// grow counts n more bytes of an upload before they are written.
func (s *space) grow(repository, dir string, n int64) error {
	if err := s.reserve(n); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, o := s.owner(repository)
	if used := o.bytes + o.uploading; n > o.limit-used {
		return &spaceError{used: used, limit: o.limit}
	}
	if u := s.uploads[dir]; u != nil {
		u.bytes += n
		o.uploading += n
	}
	return nil
}

// drop ends an upload that was stored as a blob or abandoned.
func (s *space) drop(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.uploads[dir]; u != nil {
		s.owners[u.owner].uploading -= u.bytes
		delete(s.uploads, dir)
	}
}

// link adds a blob to the repository's owner. Unfinished uploads do not count against the quota here: one of them may
// be this blob, and each is linked later.
func (s *space) link(repository string, d digest.Digest, size int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	name, o := s.owner(repository)
	if s.since != nil {
		if s.since[name] == nil {
			s.since[name] = map[digest.Digest]int64{}
		}
		s.since[name][d] = size
	}
	if _, held := o.blobs[d]; held {
		return nil
	}
	if size > o.limit-o.bytes {
		return &spaceError{used: o.bytes, limit: o.limit}
	}
	o.blobs[d] = size
	o.bytes += size
	return nil
}

// begin records what is linked until replace.
func (s *space) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.since = map[string]map[digest.Digest]int64{}
}

// replace sets the blobs of each owner to those found on the disk and those linked since begin.
func (s *space) replace(found map[string]map[digest.Digest]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.owners {
		o.blobs, o.bytes = map[digest.Digest]int64{}, 0
	}
	for _, blobs := range []map[string]map[digest.Digest]int64{found, s.since} {
		for name, of := range blobs {
			o := s.owners[name]
			if o == nil {
				o = &ownerSpace{blobs: map[digest.Digest]int64{}, limit: math.MaxInt64}
				s.owners[name] = o
			}
			for d, size := range of {
				if _, held := o.blobs[d]; !held {
					o.blobs[d] = size
					o.bytes += size
				}
			}
		}
	}
	s.since = nil
}
