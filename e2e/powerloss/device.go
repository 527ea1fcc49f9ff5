package powerloss

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// deviceFile is the one file of the FUSE file system.
const deviceFile = "device"

// loopMajor is the major number of loop devices (Documentation/admin-guide/devices.txt of the kernel).
const loopMajor = 7

// device is a block device of the kernel in front of a cache: a loop device on a file of a FUSE file system of ours.
// The kernel turns the loop device's flushes into FSYNC requests, and everything else into READ and WRITE.
type device struct {
	cache  *cache
	server *fuse.Server
	dir    string
	loop   *os.File
}

func attach(c *cache, dir string) (_ *device, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	d := &device{cache: c, dir: dir}
	options := &fs.Options{MountOptions: fuse.MountOptions{
		DirectMountStrict: true, FsName: deviceFile, Name: "powerloss", MaxWrite: 1 << 20,
		Logger: log.New(io.Discard, "", 0), // it tells of the connection's end, which is ours
	}}
	if d.server, err = serve(dir, &root{cache: c}, options); err != nil {
		return nil, fmt.Errorf("mount the device's file: %w", err)
	}
	if d.loop, err = attachLoop(filepath.Join(dir, deviceFile)); err != nil {
		_ = d.detach()
		return nil, err
	}
	return d, nil
}

// serve is fs.Mount with a connection that no other program inherits. One that did, and waits for the disk, would keep
// the kernel waiting for answers after this program was killed.
func serve(dir string, r fs.InodeEmbedder, options *fs.Options) (*fuse.Server, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	server, err := fs.Mount(dir, r, options)
	if err != nil {
		return nil, err
	}
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return nil, err
	}
	for _, path := range open {
		number, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			return nil, err
		}
		if target, _ := os.Readlink(path); target == "/dev/fuse" {
			unix.CloseOnExec(number)
		}
	}
	return server, nil
}

// detach gives the loop device back. It is free when nothing is mounted from it any more; so is the file system.
func (d *device) detach() error {
	if d.loop != nil {
		_ = d.loop.Close() // it clears itself after its last user
		d.loop = nil
	}
	return unix.Unmount(d.dir, unix.MNT_DETACH)
}

// attachLoop returns a loop device on the file, which the kernel frees when nothing uses it any more.
func attachLoop(path string) (*os.File, error) {
	backing, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = backing.Close() }()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = control.Close() }()
	config := &unix.LoopConfig{Fd: uint32(backing.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
	for {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a loop device: %w", err)
		}
		name := fmt.Sprintf("/dev/loop%d", number)
		// In a sandbox, the kernel does not make the node.
		node := int(unix.Mkdev(loopMajor, uint32(number)))
		if err := unix.Mknod(name, unix.S_IFBLK|0o600, node); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("make %s: %w", name, err)
		}
		loop, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), config)
		if err == nil {
			return loop, nil
		}
		_ = loop.Close()
		if err != unix.EBUSY { //nolint:errorlint // a bare number of the kernel: another process took the device
			return nil, fmt.Errorf("configure %s: %w", name, err)
		}
	}
}

// root is the directory with the device's file.
type root struct {
	fs.Inode

	cache *cache
}

var _ fs.NodeOnAdder = (*root)(nil)

// OnAdd adds the file.
func (r *root) OnAdd(ctx context.Context) {
	file := r.NewPersistentInode(ctx, &file{cache: r.cache}, fs.StableAttr{Mode: syscall.S_IFREG})
	r.AddChild(deviceFile, file, false)
}

// file is the device as a file.
type file struct {
	fs.Inode

	cache *cache
}

var (
	_ fs.NodeGetattrer = (*file)(nil)
	_ fs.NodeSetattrer = (*file)(nil)
	_ fs.NodeOpener    = (*file)(nil)
	_ fs.NodeReader    = (*file)(nil)
	_ fs.NodeWriter    = (*file)(nil)
	_ fs.NodeFsyncer   = (*file)(nil)
)

// Getattr says how large the device is.
func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size, out.Nlink = syscall.S_IFREG|0o600, uint64(f.cache.bytes), 1
	return 0
}

// Setattr changes nothing: times are of no use here.
func (f *file) Setattr(ctx context.Context, h fs.FileHandle, _ *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	return f.Getattr(ctx, h, out)
}

// Open lets the kernel bypass its own cache: the loop device's users have one.
func (f *file) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

// Read reads what was written last, durable or not.
func (f *file) Read(_ context.Context, _ fs.FileHandle, to []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	n, err := f.cache.read(to, off)
	return fuse.ReadResultData(to[:n]), fs.ToErrno(err)
}

// Write keeps the data in the volatile cache.
func (f *file) Write(_ context.Context, _ fs.FileHandle, from []byte, off int64) (uint32, syscall.Errno) {
	if err := f.cache.write(from, off); err != nil {
		return 0, fs.ToErrno(err)
	}
	return uint32(len(from)), 0
}

// Fsync makes everything durable that was written.
func (f *file) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return fs.ToErrno(f.cache.flush())
}
