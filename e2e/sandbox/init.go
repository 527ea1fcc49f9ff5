package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ownDir is a directory of the machine that the sandbox replaces by one of its own.
type ownDir struct {
	path string
	make func(dir string) error
}

//nolint:gochecknoglobals // a table that never changes
var ownDirs = []ownDir{
	{"/tmp", func(dir string) error { return os.Chmod(dir, 0o777|fs.ModeSticky) }},
	{"/run", makeRun},
	{"/var", makeVar},
	{"/etc", copyEtc},
	{"/dev", makeDev},
}

// makeDev copies the machine's device nodes, but none that were made for a container. The kernel adds the nodes of new
// devices to the machine's /dev alone.
func makeDev(dir string) error {
	if err := unix.Mount("none", dir, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	if err := copyTree("/dev", dir, "--one-file-system --exclude=./gpuaas-*"); err != nil {
		return err
	}
	terminals := filepath.Join(dir, "pts")
	if err := errors.Join(os.MkdirAll(terminals, 0o755), os.MkdirAll(filepath.Join(dir, "shm"), 0o755)); err != nil {
		return err
	}
	return unix.Mount("none", terminals, "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=620,ptmxmode=666,gid=5")
}

// makeRun makes a /run that a reboot would have emptied, with what mount(8) and ip-netns(8) leave there for good when
// they are used.
func makeRun(dir string) error {
	if err := unix.Mount("none", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return err
	}
	names := filepath.Join(dir, "netns")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "mount"), 0o755), os.Mkdir(names, 0o755)); err != nil {
		return err
	}
	if err := unix.Mount(names, names, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", names, "", unix.MS_SHARED|unix.MS_REC, "")
}

// makeVar makes the directories that programs expect below /var (Filesystem Hierarchy Standard 3.0, chapter 5).
func makeVar(dir string) error {
	for _, sub := range []string{"cache", "lib", "local", "log", "opt", "spool"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "tmp"), 0o700); err != nil {
		return err
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o777|fs.ModeSticky); err != nil {
		return err
	}
	if err := errors.Join(os.Symlink("/run", filepath.Join(dir, "run")),
		os.Symlink("/run/lock", filepath.Join(dir, "lock"))); err != nil {
		return err
	}
	// The package manager made the fonts' cache; a browser that finds none makes it again.
	const fonts = "/var/cache/fontconfig"
	if _, err := os.Stat(fonts); err != nil {
		return nil //nolint:nilerr // a machine without fonts has none
	}
	if out, err := exec.Command("cp", "-a", fonts, filepath.Join(dir, "cache")).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", fonts, err, out)
	}
	return nil
}

// copyTree copies a directory's content. A file that is removed meanwhile is left out: tar says so with the status 1,
// where cp fails.
func copyTree(from, to, options string) error {
	const script = `tar -C "$1" $3 -cf - . | tar -C "$2" -xpf -
		status=("${PIPESTATUS[@]}"); [ "${status[0]}" -le 1 ] && [ "${status[1]}" = 0 ]`
	if out, err := exec.Command("bash", "-fc", script, "bash", from, to, options).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// copyEtc copies /etc; resolv.conf often is a link into /run, whose content is not there any more.
func copyEtc(dir string) error {
	if err := copyTree("/etc", dir, ""); err != nil {
		return err
	}
	resolv, err := os.ReadFile("/etc/resolv.conf")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	target := filepath.Join(dir, "resolv.conf")
	if err := os.Remove(target); err != nil {
		return err
	}
	return os.WriteFile(target, resolv, 0o644)
}

// runInit is process 1 of the sandbox: it prepares the namespaces, runs the program inside, reaps every process that
// loses its parent, and ends them all after the program.
func runInit() (code int, err error) {
	// A cgroup namespace belongs to a thread, and so do the processes that the thread starts.
	runtime.LockOSThread()
	unix.CloseOnExec(leashFile)
	base := os.Getenv(baseEnv)
	if err := prepare(base); err != nil {
		return exitTrouble, fmt.Errorf("prepare the sandbox: %w", err)
	}
	machine, err := mountedDisks()
	if err != nil {
		return exitTrouble, fmt.Errorf("prepare the sandbox: %w", err)
	}
	defer func() { err = errors.Join(err, end(machine)) }()
	inside := exec.Command("/proc/self/exe", os.Args[1:]...)
	inside.Args[0] = os.Args[0]
	inside.Env = append(os.Environ(), stageEnv+"="+stageInside)
	inside.Stdin, inside.Stdout, inside.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := inside.Start(); err != nil {
		return exitTrouble, err
	}
	go endWithOutside(machine)
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return exitTrouble, fmt.Errorf("wait for the program: %w", err)
		case pid == inside.Process.Pid && status.Signaled():
			return exitTrouble, fmt.Errorf("the program was ended by %s", status.Signal())
		case pid == inside.Process.Pid:
			return status.ExitStatus(), nil
		}
	}
}

func prepare(base string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	if err := joinCgroups(all, filepath.Base(base)); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a cgroup namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := replaceDirs(base); err != nil {
		return err
	}
	if err := unix.Mount("none", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return err
	}
	if err := unix.Mount("none", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if err := mountCgroups(all); err != nil {
		return err
	}
	if err := unix.Mount("none", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	return prepareNetwork()
}

// prepareNetwork gives the sandbox a name, a loopback interface and the setting of a machine that was never configured.
func prepareNetwork() error {
	if err := unix.Sethostname([]byte("sandbox")); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0o600)
}

// replaceDirs mounts the sandbox's own directories and makes what is kept visible in them again.
func replaceDirs(base string) error {
	cwd, err := os.Getwd()
	if err != nil {
		return err
	}
	kept := Kept()
	// A file descriptor still leads to what a mount hides.
	open := make([]*os.File, len(kept))
	for i, dir := range kept {
		if open[i], err = os.Open(dir); err != nil {
			return err
		}
		defer func() { _ = open[i].Close() }()
	}
	made := make([]*os.File, len(ownDirs))
	for i, own := range ownDirs {
		dir := filepath.Join(base, strings.TrimPrefix(own.path, "/"))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := own.make(dir); err != nil {
			return fmt.Errorf("make %s: %w", own.path, err)
		}
		if made[i], err = os.Open(dir); err != nil {
			return err
		}
		defer func() { _ = made[i].Close() }()
	}
	if err := detach(append(kept, base)); err != nil {
		return err
	}
	for i, own := range ownDirs {
		if err := bind(made[i], own.path); err != nil {
			return err
		}
	}
	for i, dir := range kept {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := bind(open[i], dir); err != nil {
			return err
		}
	}
	// The working directory is reached through the new mounts, too.
	return os.Chdir(cwd)
}

// detach takes the machine's mounts out of the directories that are replaced: one whose mount point the machine removes
// would vanish here, too. What is needed stays.
func detach(needed []string) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points = append(points, fields[4])
		}
	}
	for _, point := range slices.Backward(points) {
		inside := slices.ContainsFunc(ownDirs, func(own ownDir) bool { return strings.HasPrefix(point, own.path+"/") })
		holds := slices.ContainsFunc(needed, func(dir string) bool {
			return strings.HasPrefix(dir+"/", point+"/") || strings.HasPrefix(point, dir+"/")
		})
		if !inside || holds {
			continue
		}
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("detach %s: %w", point, err)
		}
	}
	return nil
}

func bind(from *os.File, at string) error {
	source := fmt.Sprintf("/proc/self/fd/%d", from.Fd())
	if err := unix.Mount(source, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount the own %s: %w", at, err)
	}
	return nil
}
