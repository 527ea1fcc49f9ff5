package artifact

import (
	"fmt"
	"math"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// space counts what each owner of repositories stores: blobs that its repositories link to, each once, and unfinished
// uploads. It is kept in memory; what is on the disk is read at the start and after each collection.
type space struct {
	dir string
	// minFree is what must stay free on the file system, for what else lies there.
	minFree int64

	mu     sync.Mutex
	owners map[string]*ownerSpace
	// uploads holds the unfinished ones by their directory.
	uploads map[string]*upload
	// since holds what was linked while the disk is being read; nil otherwise.
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

// spaceError says why nothing more is stored.
type spaceError struct {
	// full means the file system, otherwise the owner's quota.
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

// owner is called with mu held.
func (s *space) owner(repository string) (string, *ownerSpace) {
	name, _ := OrgSlugOf(repository)
	o := s.owners[name]
	if o == nil {
		o = &ownerSpace{blobs: map[digest.Digest]int64{}, limit: math.MaxInt64}
		s.owners[name] = o
	}
	return name, o
}

// setLimit takes the owner's quota as it is now.
func (s *space) setLimit(repository string, limit int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, o := s.owner(repository)
	o.limit = limit
}

// used is what the owner stores.
func (s *space) used(ownerSlug string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.owners[ownerSlug]; o != nil {
		return o.bytes + o.uploading
	}
	return 0
}

// fits reports as an error that n more bytes exceed the owner's quota or the reserve.
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

// reserve reports as an error that n more bytes leave too little on the file system.
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

// resume begins or goes on with an upload of which size bytes are stored.
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

// drop ends an upload, because it was stored as a blob or given up.
func (s *space) drop(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.uploads[dir]; u != nil {
		s.owners[u.owner].uploading -= u.bytes
		delete(s.uploads, dir)
	}
}

// link adds a blob to what the repository's owner stores. Unfinished uploads do not count against it: one of them may
// be this very blob, and each is linked in its turn.
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

// begin notes what is linked from now on, until replace.
func (s *space) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.since = map[string]map[digest.Digest]int64{}
}

// replace takes what was found on the disk, and what was linked since begin, for what each owner stores.
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
