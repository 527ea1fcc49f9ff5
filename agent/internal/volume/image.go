package volume

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// blockBytes and bytesPerInode are the geometry of each file system: they make the quota of inodes follow its size.
	blockBytes    = 4096
	bytesPerInode = 16384
	// toolTimeout bounds the wait for a program of e2fsprogs. A check of many TiB takes long.
	toolTimeout = time.Hour
	// maxToolOutput bounds how much of its output an error has.
	maxToolOutput = 64 << 10
	// copyBytes is the memory of one copy. There may be as many at a time as volumes.
	copyBytes = 128 << 10
)

// Check reports why this machine cannot have volumes.
func Check() error {
	for _, name := range []string{"mkfs.ext4", "e2fsck", "resize2fs"} {
		if _, err := toolPath(name); err != nil {
			return unsupported("apt-get install e2fsprogs", err)
		}
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return unsupported("modprobe loop", err)
	}
	systems, err := os.ReadFile("/proc/filesystems")
	if err != nil || !strings.Contains(string(systems), "\text4\n") {
		return unsupported("modprobe ext4", err)
	}
	return nil
}

func unsupported(remedy string, cause error) error {
	return fault.New(fault.Unavailable, agent.CodeFeatureMissing, "This node cannot have volumes: "+remedy+
		", and start the agent again.", cause)
}

func toolPath(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	return exec.LookPath(filepath.Join("/usr/sbin", name))
}

// toolOn runs a program of e2fsprogs on an image. The image stays locked until its file is closed and the program has
// ended, which may be after the agent was killed: the next agent must not touch the file system before.
func toolOn(ctx context.Context, image *os.File, name string, args ...string) error {
	if err := lockImage(ctx, image); err != nil {
		return err
	}
	return tool(ctx, image, name, append(args, image.Name())...)
}

// tool runs a program of e2fsprogs, which inherits the locked image if there is one. Nothing kills it: an interrupted
// resize damages the file system. The end of ctx ends only the wait.
func tool(ctx context.Context, locked *os.File, name string, args ...string) error {
	path, err := toolPath(name)
	if err != nil {
		return unsupported("apt-get install e2fsprogs", err)
	}
	// A program that outlives the agent would be ended by its next line of output if that went to a pipe of the agent.
	memory, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	out := os.NewFile(uintptr(memory), name)
	defer func() { _ = out.Close() }()
	cmd := exec.Command(path, args...) //nolint:noctx // it outlives ctx
	cmd.Stdout, cmd.Stderr = out, out
	if locked != nil {
		cmd.ExtraFiles = []*os.File{locked}
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, toolTimeout)
	defer cancel()
	select {
	case err = <-ended:
	case <-ctx.Done():
		return fmt.Errorf("%s still runs: %w", name, ctx.Err())
	}
	exit, failed := errors.AsType[*exec.ExitError](err)
	const repaired = 1 // of e2fsck
	if err != nil && (!failed || name != "e2fsck" || exit.ExitCode() != repaired) {
		said, _ := io.ReadAll(io.NewSectionReader(out, 0, maxToolOutput))
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(said)))
	}
	return nil
}

// makeImage makes an image with an empty file system. All of its space is reserved on the host's disk: what a volume
// promises no other program can take.
func (v *Volumes) makeImage(ctx context.Context, path string, size uint64) error {
	file, err := v.reserve(path, size)
	if err != nil {
		return err
	}
	// Without nodiscard, mkfs would give the reserved space back.
	err = toolOn(ctx, file, "mkfs.ext4", "-q", "-F", "-b", strconv.Itoa(blockBytes), "-i", strconv.Itoa(bytesPerInode),
		"-m", "0", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1")
	return errors.Join(err, file.Sync(), file.Close())
}

// reserve makes or grows a file and reserves its space, of which an interrupted growth may have reserved a part. The
// node keeps ReserveBytes for its own files.
func (v *Volumes) reserve(path string, size uint64) (*os.File, error) {
	v.space.Lock()
	defer v.space.Unlock()
	var st unix.Statfs_t
	if err := unix.Statfs(v.cfg.Dir, &st); err != nil {
		return nil, err
	}
	needed := size - min(allocated(path), size)
	if free := st.Bavail * uint64(st.Bsize); free < v.cfg.ReserveBytes || free-v.cfg.ReserveBytes < needed {
		return nil, noSpace(size, nil)
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Fallocate(int(file.Fd()), 0, 0, int64(size)); err != nil {
		_ = file.Close()
		if errors.Is(err, unix.ENOSPC) {
			return nil, noSpace(size, err)
		}
		return nil, fmt.Errorf("reserve space: %w", err)
	}
	return file, nil
}

// allocated is what a file takes of the disk; nothing where there is none.
func allocated(path string) uint64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	const statBytes = 512 // of a block in stat(2)
	return uint64(st.Blocks) * statBytes
}

// fileSystemBytes is the size of the file system in an image, by its superblock (fs/ext4/ext4.h of Linux). A growth
// that was cut off leaves an image that is larger.
func fileSystemBytes(image string) (uint64, error) {
	const at, blocksLow, features, blocksHigh, has64Bits = 1024, 0x4, 0x60, 0x150, 0x80
	file, err := os.Open(image)
	if err != nil {
		return 0, err
	}
	superblock := make([]byte, 1024)
	_, err = file.ReadAt(superblock, at)
	if err := errors.Join(err, file.Close()); err != nil {
		return 0, err
	}
	field := func(offset int) uint64 { return uint64(binary.LittleEndian.Uint32(superblock[offset:])) }
	blocks := field(blocksLow)
	if field(features)&has64Bits != 0 {
		blocks |= field(blocksHigh) << 32
	}
	return blocks * blockBytes, nil
}

func noSpace(size uint64, cause error) error {
	return fault.New(fault.Unavailable, agent.CodeVolumeNoSpace, fmt.Sprintf(
		"The node's disk has no room for the %d MiB of a volume or of its snapshot.", size>>20), cause).Permanent()
}

// copyImage copies an image, with its space reserved, to a path that appears when the copy is complete and durable. It
// shares no blocks with the original: a write to shared blocks needs new space, which the disk may not have.
func (v *Volumes) copyImage(ctx context.Context, from, to string) (err error) {
	src, err := openLocked(ctx, from)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	info, err := src.Stat()
	if err != nil {
		return err
	}
	unfinished := to + unfinishedSuffix
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	dst, err := v.reserve(unfinished, uint64(info.Size()))
	if err != nil {
		return errors.Join(err, removeIfThere(unfinished))
	}
	if err := errors.Join(copyData(ctx, dst, src, info.Size()), dst.Sync(), dst.Close()); err != nil {
		return errors.Join(err, removeIfThere(unfinished))
	}
	if err := os.Rename(unfinished, to); err != nil {
		return errors.Join(err, removeIfThere(unfinished))
	}
	return durable.SyncDir(filepath.Dir(to))
}

// snapshotUpgrade takes the snapshot of an upgrade, in place of that of the upgrade before. The record forgets the old
// one first: after a crash in between, a rollback would otherwise restore the content of another version.
func (v *Volumes) snapshotUpgrade(ctx context.Context, id string, r record) error {
	at := filepath.Join(v.path(id), upgradeName)
	if err := v.snapshot(ctx, id, at+unfinishedSuffix); err != nil {
		return err
	}
	if r.Upgrade != nil {
		r.Upgrade = nil
		if err := v.store(id, r); err != nil {
			return err
		}
	}
	if err := os.Rename(at+unfinishedSuffix, at); err != nil {
		return err
	}
	return durable.SyncDir(v.path(id))
}

// copyData copies what is not a hole.
func copyData(ctx context.Context, dst, src *os.File, size int64) error {
	buffer := make([]byte, copyBytes)
	for at := int64(0); at < size; {
		data, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only holes follow
		}
		if err != nil {
			return err
		}
		hole, err := unix.Seek(int(src.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for at = data; at < hole; {
			if err := ctx.Err(); err != nil {
				return err
			}
			part := buffer[:min(int64(len(buffer)), hole-at)]
			n, err := src.ReadAt(part, at)
			if err != nil && (!errors.Is(err, io.EOF) || n == 0) {
				return err
			}
			if _, err := dst.WriteAt(part[:n], at); err != nil {
				return err
			}
			at += int64(n)
		}
	}
	return nil
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
