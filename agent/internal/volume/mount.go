package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Requests of ioctl(2) that x/sys lacks (linux/fs.h).
const (
	fiFreeze = 0xC0045877
	fiThaw   = 0xC0045878
	fiTrim   = 0xC0185879
)

const (
	// loopTries bounds the search for a loop device that no other program has taken meanwhile.
	loopTries = 32
	// idleWait bounds how long a volume may still be in use after its last container has ended.
	idleWait = 10 * time.Second
	idlePoll = 10 * time.Millisecond
)

// device is the loop device of an image; empty where it has none. The kernel detaches it when nothing has its file
// system mounted any more, in whatever mount namespace.
func device(image string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(image, &st); err != nil {
		return "", err
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return "", err
	}
	for _, dir := range attached {
		name := "/dev/" + filepath.Base(filepath.Dir(dir))
		dev, err := os.OpenFile(name, os.O_RDONLY, 0)
		if err != nil {
			continue // detached meanwhile
		}
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		_ = dev.Close()
		if err == nil && info.Device == st.Dev && info.Inode == st.Ino {
			return name, nil
		}
	}
	return "", nil
}

// attach connects a loop device to the image. The device stays while dev is open or its file system is mounted.
func attach(image string) (dev *os.File, err error) {
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = control.Close() }()
	for range loopTries {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		dev, err = openLoop(n)
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{Fd: uint32(file.Fd())}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
		if errors.Is(err, unix.EINVAL) { // a file system without direct I/O, under some kernels
			config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
			err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
		}
		if err == nil {
			return dev, nil
		}
		_ = dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
	}
	return nil, errors.New("no free loop device")
}

// updateCapacity gives a loop device the size that its image has now.
func updateCapacity(name string) error {
	dev, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0), dev.Close())
}

// openLoop makes the node in /dev where nothing else has made it.
func openLoop(n int) (*os.File, error) {
	name := "/dev/loop" + strconv.Itoa(n)
	dev, err := os.OpenFile(name, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		const loopMajor = 7
		err = unix.Mknod(name, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajor, uint32(n))))
		if err == nil || errors.Is(err, fs.ErrExist) {
			dev, err = os.OpenFile(name, os.O_RDWR, 0)
		}
	}
	return dev, err
}

// mountImage mounts the image unless it is mounted there; flags are unix.MS_RDONLY or none.
func mountImage(ctx context.Context, image, dir string, flags uintptr) error {
	name, err := device(image)
	if err != nil {
		return err
	}
	if name != "" && isMounted(name, dir) {
		return nil
	}
	if err := mountpoint.Unmount(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // a container's root must walk through it
		return err
	}
	if name == "" {
		locked, err := openLocked(ctx, image)
		if err != nil {
			return err
		}
		defer func() { _ = locked.Close() }()
		dev, err := attach(image)
		if err != nil {
			return fmt.Errorf("attach a loop device: %w", err)
		}
		defer func() { _ = dev.Close() }()
		name = dev.Name()
	}
	if err := unix.Mount(name, dir, "ext4", flags|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME,
		"errors=remount-ro"); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	return nil
}

// makeContent makes the directory for containers, unless the file system has it. It gets its name last: after a crash
// none is there that only root may use.
func makeContent(at string) (content string, err error) {
	content = filepath.Join(at, contentName)
	if _, err := os.Lstat(content); !errors.Is(err, fs.ErrNotExist) {
		return content, err
	}
	unfinished := content + unfinishedSuffix
	if err := os.Mkdir(unfinished, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return content, err
	}
	// As /tmp: services of several users may share a volume.
	if err := os.Chmod(unfinished, os.ModeSticky|os.ModePerm); err != nil {
		return content, err
	}
	return content, os.Rename(unfinished, content)
}

// isMounted reports whether the file system on the device is mounted at dir.
func isMounted(device, dir string) bool {
	var dev, at unix.Stat_t
	return unix.Stat(device, &dev) == nil && unix.Stat(dir, &at) == nil && at.Dev == dev.Rdev
}

// awaitIdle waits until nothing has the image's file system mounted.
func awaitIdle(ctx context.Context, image string) error {
	return await(ctx, errInUse(), func() (bool, error) {
		name, err := device(image)
		return name == "", err
	})
}

// openLocked opens an image for reading, locked until it is closed.
func openLocked(ctx context.Context, image string) (*os.File, error) {
	file, err := os.Open(image)
	if err != nil {
		return nil, err
	}
	if err := lockImage(ctx, file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// lockImage waits until no program of e2fsprogs works on the image: an agent that was killed may have left one. Others
// wait until the file is closed, here and in the programs that inherit it (flock(2)).
func lockImage(ctx context.Context, image *os.File) error {
	busy := fault.New(fault.Conflict, agent.CodeVolumeInUse, "A program of e2fsprogs that an earlier agent started "+
		"still works on the volume.", nil)
	return await(ctx, busy, func() (bool, error) {
		err := unix.Flock(int(image.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}
		return err == nil, err
	})
}

// await waits until free, and returns busy where that takes longer than idleWait.
func await(ctx context.Context, busy error, free func() (bool, error)) error {
	for deadline := time.Now().Add(idleWait); ; {
		is, err := free()
		switch {
		case is || err != nil:
			return err
		case time.Now().After(deadline):
			return busy
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(idlePoll):
		}
	}
}

// freeze makes the image of a mounted file system consistent until thaw.
func freeze(dir string) (thaw func() error, err error) {
	if err := onDir(dir, func(fd uintptr) error { return unix.IoctlSetInt(int(fd), fiFreeze, 0) }); err != nil {
		return nil, fmt.Errorf("freeze the file system: %w", err)
	}
	return func() error { return thawDir(dir) }, nil
}

// thawDir ends a freeze; no error says that there was none.
func thawDir(dir string) error {
	err := onDir(dir, func(fd uintptr) error { return unix.IoctlSetInt(int(fd), fiThaw, 0) })
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

func onDir(dir string, do func(fd uintptr) error) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(do(f.Fd()), f.Close())
}

// trim gives the unused space of a mounted file system back to the host's.
func trim(dir string) error {
	all := struct{ start, length, least uint64 }{length: math.MaxUint64}
	return onDir(dir, func(fd uintptr) error {
		//nolint:gosec // the kernel reads and writes the structure, which outlives the call
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, fiTrim, uintptr(unsafe.Pointer(&all))); errno != 0 {
			return errno
		}
		return nil
	})
}
