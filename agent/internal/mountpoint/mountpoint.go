// Package mountpoint ends the mounts of a directory and tells whether it has one. Containers that were given a mount
// keep it.
package mountpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Unmount unmounts everything that is mounted on dir. A directory that is not there has no mounts.
func Unmount(dir string) error {
	for {
		err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
}

// Remove unmounts everything that is mounted on dir and removes the directory, which must be empty then. One that is
// not there is removed.
func Remove(dir string) error {
	if err := Unmount(dir); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Is reports whether something is mounted on dir. It compares the mounts of dir and of its parent.
func Is(dir string) (bool, error) {
	var own, parent unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &own)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err == nil {
		err = unix.Statx(unix.AT_FDCWD, filepath.Dir(dir), unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &parent)
	}
	return err == nil && own.Mnt_id != parent.Mnt_id, err
}
