package state

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// need says how much free space a change asks for.
type need int

const (
	// acquiring changes start or keep something new: they need the whole reserve on the disk.
	acquiring need = iota
	// measuring changes record usage of running containers. On a full disk they go into half of the reserve file; when
	// that is full they fail, and the next sample includes their usage.
	measuring
	// releasing changes end something. They never fail for want of space: they go to the disk, to the reserve file, or,
	// where that is not usable, stay in memory until there is space again.
	releasing
)

// releaseShare is the part of the reserve on the disk that a change which is not acquiring leaves free: Badger maps its
// files, and a disk that is full to the last block would kill the process.
const releaseShare = 2

// minFreeFiles is how many inodes must be free for an acquiring change: containers, logs and the store's own files need
// some.
const minFreeFiles = 1024

// spareName is a file that only occupies space: Close removes it on a full disk, so that Badger can write its last
// table.
const (
	spareName  = "spare"
	spareBytes = 2 * memTableBytes
)

func allocate(path string, size int64) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fallocate(int(file.Fd()), 0, 0, size), file.Close())
}

// checkSpace refuses a write of this many bytes when the disk would be left with less than the reserve.
func (s *Store) checkSpace(kind need, bytes uint64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.dir, &fs); err != nil {
		return fault.New(fault.Unavailable, codeStateUnusable, fmt.Sprintf("The free space under %s cannot be read.", s.dir),
			err)
	}
	least := s.minFree
	if kind != acquiring {
		least /= releaseShare
	}
	free := fs.Bavail * uint64(fs.Bsize)
	// A file system that does not count files says 0 of 0.
	if kind == acquiring && fs.Files > 0 && fs.Ffree < minFreeFiles {
		return fault.New(fault.Unavailable, fault.CodeDiskFull, fmt.Sprintf("The disk under %s has %d free inodes, %d are "+
			"needed. Remove some files; what runs goes on.", s.dir, fs.Ffree, minFreeFiles), nil)
	}
	if free >= least+bytes {
		return nil
	}
	return fault.New(fault.Unavailable, fault.CodeDiskFull, fmt.Sprintf(
		"The disk under %s has %d MiB free, %d are needed. Free some space; what runs goes on, and usage that was measured "+
			"is kept.",
		s.dir, free>>20, (least+bytes)>>20), nil)
}

// Full returns an error when the disk has no space for acquiring changes.
func (s *Store) Full() error { return s.checkSpace(acquiring, 0) }

// DefaultLargeBytes is the size of the store, without unsent usage, above which the node reports a condition.
const DefaultLargeBytes = 256 << 20

// Oversized returns an error when the store takes more of the disk than it should.
func (s *Store) Oversized() error {
	used, err := usedBytes(s.dir)
	if err != nil {
		return err
	}
	if limit := s.largeBytes + s.Spool().UnsentBytes; used > limit {
		return fmt.Errorf("the store in %s takes %d MiB, expected are at most %d", s.dir, used>>20, limit>>20)
	}
	return nil
}

// usedBytes counts allocated blocks: Badger's files are sparse.
func usedBytes(dir string) (int64, error) {
	var total int64
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // Badger has removed it meanwhile
		}
		const blockBytes = 512
		total += st.Blocks * blockBytes
		return err
	})
	return total, err
}

// copyStore copies the files of a store that is not open, without their holes.
func copyStore(from, to string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || slices.Contains([]string{reserveName, spareName, highestName}, e.Name()) {
			continue
		}
		if err := copySparse(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func copySparse(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	const blockBytes = 64 << 10
	block, zeros := make([]byte, blockBytes), make([]byte, blockBytes)
	var at int64
	for {
		n, err := io.ReadFull(in, block)
		if n > 0 && !bytes.Equal(block[:n], zeros[:n]) {
			if _, err := out.WriteAt(block[:n], at); err != nil {
				return errors.Join(err, out.Close())
			}
		}
		at += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return errors.Join(out.Truncate(at), out.Close())
		}
		if err != nil {
			return errors.Join(err, out.Close())
		}
	}
}
