package runtime

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// writebackBytes is how much a pull unpacks before it is written to the disk. The kernel by itself would begin after
// seconds, or once a tenth of the memory is dirty, and leave most of the writing to the end.
const writebackBytes = 128 << 20

// writeback writes what is unpacked to the disk while more is unpacked, so that little is left to write when a layer is
// recorded.
type writeback struct {
	// disk is a directory of the file system. One descriptor serves the whole pull: it reports each failed write since it
	// was opened, also of what the kernel began to write by itself (syncfs(2)).
	disk *os.File
	// unpacked counts the bytes since the last write began.
	unpacked atomic.Int64
	due      chan struct{}
	ended    sync.WaitGroup

	mu  sync.Mutex
	err error
}

func startWriteback(dir string) (*writeback, error) {
	disk, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	w := &writeback{disk: disk, due: make(chan struct{}, 1)}
	w.ended.Go(func() {
		for range w.due {
			_ = w.sync() // kept for the next layer that is recorded
		}
	})
	return w, nil
}

// Write counts unpacked bytes. It never waits and never fails.
func (w *writeback) Write(p []byte) (int, error) {
	if w.unpacked.Add(int64(len(p))) >= writebackBytes {
		select {
		case w.due <- struct{}{}:
		default:
		}
	}
	return len(p), nil
}

// sync writes everything that is dirty on the file system to the disk. After an error it never succeeds again: the
// kernel reports a failed write once, and may have dropped what it did not write.
func (w *writeback) sync() error {
	w.unpacked.Store(0)
	err := unix.Syncfs(int(w.disk.Fd()))
	if err != nil {
		err = &os.PathError{Op: "syncfs", Path: w.disk.Name(), Err: err}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	return w.err
}

// close ends the writing, when no one writes to w any more.
func (w *writeback) close() error {
	close(w.due)
	w.ended.Wait()
	return w.disk.Close()
}
