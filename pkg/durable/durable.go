// Package durable writes files whose content and name are on the disk when the call returns, so that a power cut loses
// neither.
package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Create writes a file that must not exist: otherwise its error is fs.ErrExist. The file is there whole or not at all.
func Create(path string, data []byte, mode fs.FileMode) error {
	return write(path, data, mode, asMade, takeName)
}

// CreateOwned is Create for a file that belongs to the owner of its directory, also where root writes it: a command
// that an operator runs beside a service must not leave files that the service cannot read.
func CreateOwned(path string, data []byte, mode fs.FileMode) error {
	return write(path, data, mode, asDirectory, takeName)
}

// Replace writes a file in one step: a reader finds the old content or the new one.
func Replace(path string, data []byte, mode fs.FileMode) error {
	return write(path, data, mode, asMade, os.Rename)
}

// ReplaceOwned is Replace for a file that belongs to the owner of its directory, as CreateOwned says.
func ReplaceOwned(path string, data []byte, mode fs.FileMode) error {
	return write(path, data, mode, asDirectory, os.Rename)
}

func asMade(*os.File) error { return nil }

// asDirectory gives a file to the owner of its directory. Only root may.
func asDirectory(f *os.File) error {
	if os.Geteuid() != 0 {
		return nil
	}
	info, err := os.Stat(filepath.Dir(f.Name()))
	if err != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok || owner.Uid == 0 {
		return nil
	}
	return f.Chown(int(owner.Uid), int(owner.Gid))
}

// write writes a temporary file beside path, own gives it to its owner, and rename gives it that name.
func write(path string, data []byte, mode fs.FileMode, own func(*os.File) error, rename func(from, to string) error,
) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, own(f), f.Chmod(mode), f.Sync(), f.Close()); err == nil {
		err = rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return SyncDir(filepath.Dir(path))
}

// takeName renames a file to a name that must not be taken.
func takeName(from, to string) error {
	switch err := os.Link(from, to); {
	case err == nil:
		return os.Remove(from)
	case errors.Is(err, fs.ErrExist):
		return err
	}
	return os.Rename(from, to) // a file system without links, as on a USB stick; the name was free
}

// SyncDir syncs the names of a directory.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
