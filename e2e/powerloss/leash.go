package powerloss

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
)

// leash is a shell that unmounts a disk and removes its files when this program has ended, in whatever way: a program
// that is killed leaves no mount, and so no loop device.
type leash struct {
	shell *exec.Cmd
	held  io.Closer
}

func newLeash(dir, point string) (leash, error) {
	const script = `read -r _
for at in "$1" "$2"/device-*; do while umount -il "$at" 2>/dev/null; do :; done; done
rm -rf -- "$2"`
	l := leash{shell: exec.Command("/bin/sh", "-c", script, "sh", point, dir)}
	l.shell.Stderr = os.Stderr
	l.shell.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what kills the program's group does not kill it
	var err error
	if l.held, err = l.shell.StdinPipe(); err == nil {
		err = l.shell.Start()
	}
	if err != nil {
		return l, fmt.Errorf("start the shell that cleans up: %w", err)
	}
	return l, nil
}

// release ends the shell.
func (l leash) release() error { return errors.Join(l.held.Close(), l.shell.Wait()) }
