package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// leashFile is the number of the file that init reads until the program outside has ended: a pipe without a writer.
const leashFile = 3

// fiThaw is a request of ioctl(2) that x/sys lacks (linux/fs.h).
const fiThaw = 0xC0045878

// disks are the block devices with a mounted file system, by major and minor number.
type disks map[string]bool

// endWithOutside ends the processes of the sandbox when the program outside has ended, in whatever way.
func endWithOutside(machine disks) {
	_, _ = io.Copy(io.Discard, os.NewFile(leashFile, "leash"))
	// Their exit ends the wait of init, which does the rest.
	_ = kill(machine)
}

// end ends every process of the sandbox and returns when they are gone; the mounts go with init. A file system that is
// frozen would stay for good, with its loop device, and so would a process that writes to it.
func end(machine disks) error {
	if err := kill(machine); err != nil {
		return err
	}
	for {
		_, err := syscall.Wait4(-1, nil, 0, nil)
		if errors.Is(err, syscall.ECHILD) {
			break
		}
		if err != nil && !errors.Is(err, syscall.EINTR) {
			return fmt.Errorf("wait for the processes of the sandbox: %w", err)
		}
	}
	return thaw(machine) // the last of them may have frozen one
}

func kill(machine disks) error {
	if err := syscall.Kill(-1, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("end the processes of the sandbox: %w", err)
	}
	return thaw(machine)
}

// thaw ends the freeze of every mounted file system but those of the machine's disks.
func thaw(machine disks) error {
	return eachDisk(func(device, point string) error {
		if machine[device] {
			return nil
		}
		dir, err := os.Open(point)
		if err != nil {
			return err
		}
		defer func() { _ = dir.Close() }()
		// EINVAL: it is not frozen.
		if err := unix.IoctlSetInt(int(dir.Fd()), fiThaw, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("thaw %s: %w", point, err)
		}
		return nil
	})
}

func mountedDisks() (disks, error) {
	all := disks{}
	return all, eachDisk(func(device, _ string) error {
		all[device] = true
		return nil
	})
}

// eachDisk calls do for each mount of a block device; others have the major number 0 (proc_pid_mountinfo(5)).
func eachDisk(do func(device, point string) error) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var errs []error
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 5 || strings.HasPrefix(fields[2], "0:") {
			continue
		}
		errs = append(errs, do(fields[2], unescape.Replace(fields[4])))
	}
	return errors.Join(errs...)
}
