package runtime

import (
	"errors"
	"io"
	"io/fs"
	"os"
)

// logRotation is the last rotation of a log by this process.
type logRotation struct {
	number uint64
	// from is where the rotated log begins in the log before it was cut; kept is false where there was no space for it.
	from int64
	kept bool
}

func (r *Runtime) rotationsOf(id string) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rotations[id].number
}

// logCursor reads a log on, through its rotations.
type logCursor struct {
	r   *Runtime
	id  string
	log *os.File
	// at is how far the log has been read.
	at int64
	// rotations are those that count already; rotated is the log that the last of them has kept, as far as it is unread.
	rotations uint64
	rotated   *os.File
}

// Read reads what was written since, and ends where there is no more. A rotation does not copy and cut the log
// meanwhile.
func (c *logCursor) Read(p []byte) (int, error) {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	for {
		if c.rotated != nil {
			if n, err := c.rotated.Read(p); n > 0 || !errors.Is(err, io.EOF) {
				return n, err
			}
			c.close()
		}
		last := c.r.rotations[c.id]
		if last.number <= c.rotations { // no new one; a log that was removed has none at all
			n, err := c.log.ReadAt(p, c.at)
			c.at += int64(n)
			return n, err
		}
		if err := c.follow(last); err != nil {
			return 0, err
		}
	}
}

// follow goes on with what a rotation has kept, and then with the cut log.
func (c *logCursor) follow(last logRotation) error {
	skip := max(c.at-last.from, 0)
	if last.number != c.rotations+1 {
		skip = 0 // the one before has cut what was read
	}
	c.at, c.rotations = 0, last.number
	if !last.kept {
		return nil
	}
	rotated, err := os.Open(c.r.rotatedPath(c.id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	c.rotated = rotated
	_, err = rotated.Seek(skip, io.SeekStart)
	return err
}

func (c *logCursor) close() {
	if c.rotated != nil {
		_ = c.rotated.Close()
		c.rotated = nil
	}
}
