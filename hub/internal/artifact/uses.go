package artifact

import (
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// uses records when each digest was last read, written or resolved. Collect keeps what is in use, because a client that
// was told that a blob exists does not push it again.
type uses struct {
	now func() time.Time
	// since is when recording began: before it everything counts as used.
	since time.Time

	mu   sync.Mutex
	last map[digest.Digest]use
	turn uint64
}

type use struct {
	at   time.Time
	turn uint64
}

// begin records a use. undo reverts it where the digest turns out to be absent, unless it was used again since.
func (u *uses) begin(d digest.Digest) (undo func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.turn++
	before, known := u.last[d]
	mine := use{at: u.now(), turn: u.turn}
	u.last[d] = mine
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		switch {
		case u.last[d].turn != mine.turn:
		case known:
			u.last[d] = before
		default:
			delete(u.last, d)
		}
	}
}

// ifUnused runs remove unless the digest was used after the cutoff. A use that begins meanwhile waits for it.
func (u *uses) ifUnused(d digest.Digest, cutoff time.Time, remove func() error) (removed bool, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.since.After(cutoff) || u.last[d].at.After(cutoff) {
		return false, nil
	}
	err = remove()
	return err == nil, err
}

// forget drops what was used before the cutoff.
func (u *uses) forget(cutoff time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for d, last := range u.last {
		if last.at.Before(cutoff) {
			delete(u.last, d)
		}
	}
}
