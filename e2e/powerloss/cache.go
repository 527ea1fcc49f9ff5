package powerloss

import (
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"syscall"
)

const (
	// pageBytes is the unit in which the device caches what is written, sectorBytes what it writes in one piece.
	pageBytes   = 4096
	sectorBytes = 512
)

// cache is a device's volatile write cache in front of the file that holds what is durable. A flush writes all of it;
// what was not flushed when the power fails is lost, in part or as a whole.
type cache struct {
	mu  sync.Mutex
	off bool
	// released is closed to fail the requests that arrived after the power failed.
	released chan struct{}
	file     *os.File
	bytes    int64
	dirty    map[int64]*[pageBytes]byte
	flushes  int
}

func newCache(file *os.File, bytes int64) *cache {
	return &cache{file: file, bytes: bytes, dirty: map[int64]*[pageBytes]byte{}, released: make(chan struct{})}
}

// do runs a request. Those that arrive after the power failed wait until release and fail then: no process learns of
// the failure before it can be killed.
func (c *cache) do(request func() error) error {
	c.mu.Lock()
	if c.off {
		c.mu.Unlock()
		<-c.released
		return syscall.EIO
	}
	defer c.mu.Unlock()
	return request()
}

func (c *cache) read(to []byte, off int64) (n int, err error) {
	err = c.do(func() error {
		for n < len(to) && off+int64(n) < c.bytes {
			at := off + int64(n)
			page, in := at/pageBytes, at%pageBytes
			part := to[n:min(len(to), n+int(pageBytes-in))]
			if cached, ok := c.dirty[page]; ok {
				copy(part, cached[in:])
			} else if _, err := c.file.ReadAt(part, at); err != nil {
				return err
			}
			n += len(part)
		}
		return nil
	})
	return n, err
}

func (c *cache) write(from []byte, off int64) error {
	return c.do(func() error {
		if off+int64(len(from)) > c.bytes {
			return syscall.ENOSPC
		}
		for len(from) > 0 {
			page, in := off/pageBytes, off%pageBytes
			cached, ok := c.dirty[page]
			if !ok {
				cached = new([pageBytes]byte)
				if _, err := c.file.ReadAt(cached[:], page*pageBytes); err != nil {
					return err
				}
				c.dirty[page] = cached
			}
			n := copy(cached[in:], from)
			from, off = from[n:], off+int64(n)
		}
		return nil
	})
}

func (c *cache) flush() error {
	return c.do(func() error {
		for page, content := range c.dirty {
			if _, err := c.file.WriteAt(content[:], page*pageBytes); err != nil {
				return err
			}
		}
		clear(c.dirty)
		c.flushes++
		return nil
	})
}

// cut fails the power. Of what was not flushed, the device had written some: in half of the cuts nothing, in the others
// each page with an even chance, a page in two as far as a random sector.
func (c *cache) cut(random *rand.Rand) (lost int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = true
	some := random.IntN(2) == 1
	for _, page := range slices.Sorted(maps.Keys(c.dirty)) {
		keep := 0
		if some && random.IntN(2) == 1 {
			keep = pageBytes
			if random.IntN(2) == 1 {
				keep = random.IntN(pageBytes/sectorBytes) * sectorBytes
			}
		}
		if keep < pageBytes {
			lost++
		}
		if _, err := c.file.WriteAt(c.dirty[page][:keep], page*pageBytes); err != nil {
			return lost, err
		}
	}
	clear(c.dirty)
	return lost, nil
}

// release fails the requests that wait.
func (c *cache) release() { close(c.released) }
