// Package containerfiles is the process that copies files into and out of a container, or opens its devices. The agent
// starts its own program for it, with the ids of the container's user and in the container's cgroup; the process gives
// up all else before it opens a path. It finds paths as the container does: no link leads out of the container's root.
package containerfiles

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/filecopy"
)

// Name is the first argument of the process, In, Out or Devices the second. A path in the container follows, for
// Devices any number of them.
const (
	Name    = "container-files"
	In      = "in"
	Out     = "out"
	Devices = "devices"
)

// DeviceLost is the exit code of Devices where the container cannot open a device; stderr says which and why.
const DeviceLost = 3

// The files that the process is started with: the container's root directory, and a pipe that ends when the process is
// in the container's cgroup.
const (
	rootFD = 3
	holdFD = 4
)

// oomScore makes the kernel kill a copy before the app whose memory it shares.
const oomScore = "1000"

// Run copies the tar stream of stdin into the container, or the files of the container to stdout, or opens devices. It
// is the whole program: what it returns is the exit code.
func Run(args []string) int {
	if len(args) < 2 || args[0] != Devices && (len(args) > 2 || args[0] != In && args[0] != Out) {
		fmt.Fprintln(os.Stderr, "a copy needs a direction and a path")
		return 2
	}
	// The agent passes on the umask and the OOM score of a daemon.
	syscall.Umask(0)
	err := os.WriteFile("/proc/self/oom_score_adj", []byte(oomScore), 0)
	if err == nil {
		_, err = io.Copy(io.Discard, os.NewFile(holdFD, "hold"))
	}
	if err == nil {
		err = giveUpRights()
	}
	if err == nil && args[0] == Devices {
		return openDevices(args[1:])
	}
	var left filecopy.Report
	if err == nil {
		left, err = run(args[0], path.Clean(args[1]))
	}
	if text := left.String(); text != "" {
		fmt.Fprintln(os.Stderr, text)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// giveUpRights clears the capabilities of all threads. The kernel has done so for all users but root, which is the user
// of a container without a user namespace.
func giveUpRights() error {
	if os.Getuid() != 0 {
		return nil
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	//nolint:gosec // the kernel reads both
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)),
		uintptr(unsafe.Pointer(&none)), 0)
	if errno != 0 {
		return fmt.Errorf("give up capabilities: %w", errno)
	}
	return nil
}

// openDevices opens each device as the container would. A node that is gone, that the cgroup refuses or whose device
// fails is lost; any other error is the driver's own matter.
func openDevices(paths []string) (code int) {
	for _, device := range paths {
		fd, err := unix.Openat2(rootFD, device, &unix.OpenHow{
			Flags:   unix.O_RDWR | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err == nil {
			_ = unix.Close(fd)
			continue
		}
		if slices.Contains([]error{unix.EPERM, unix.EACCES, unix.ENOENT, unix.EIO}, err) {
			fmt.Fprintf(os.Stderr, "%s: %s\n", device, err)
			code = DeviceLost
		}
	}
	return code
}

func run(direction, file string) (left filecopy.Report, err error) {
	if direction == Out {
		return copyOut(file)
	}
	dir, as, err := destination(file)
	if err != nil {
		return left, err
	}
	defer func() { _ = dir.Close() }()
	return filecopy.Unpack(dir, as, os.Stdin)
}

func copyOut(file string) (left filecopy.Report, err error) {
	dir, err := openDir(path.Dir(file))
	if err != nil {
		return left, err
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Lstat(path.Base(file))
	if err != nil {
		return left, err
	}
	if info.Mode().Type() == fs.ModeSymlink {
		return left, fmt.Errorf("%s is a symbolic link; name what it leads to", file)
	}
	if info.IsDir() {
		whole, err := openDir(file) // it may be the root of a file system of the kernel
		if err != nil {
			return left, err
		}
		_ = whole.Close()
	}
	return filecopy.Pack(dir, path.Base(file), os.Stdout)
}

// destination is the directory that a stream is unpacked in, and the name of what is unpacked: its own in a directory
// that is there, else the path's.
func destination(file string) (dir *os.Root, as string, err error) {
	dir, err = openDir(file)
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return dir, "", err
	}
	dir, err = openDir(path.Dir(file))
	return dir, path.Base(file), err
}

// openDir opens a directory of the container.
func openDir(dir string) (*os.Root, error) {
	fd, err := unix.Openat2(rootFD, dir, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var on unix.Statfs_t
	if err := unix.Fstatfs(fd, &on); err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	if slices.Contains([]int64{
		unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
	}, int64(on.Type)) {
		return nil, fmt.Errorf("%s: files of the kernel are not copied", dir)
	}
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", fd))
}
