package runtime

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	continuity "github.com/containerd/continuity/fs"
	"github.com/containerd/continuity/sysx"
	"golang.org/x/sys/unix"
)

// inheritedDirs are the directories that a layer has files in without an entry of their own. Unpacking on a parent
// copies their attributes from the layers below; unpacking aside does so afterwards. A value says whether the
// directory's own entry followed later, which sets all but the extended attributes.
type inheritedDirs map[string]bool

// note records, before an entry is unpacked below root, which of its parent directories are missing.
func (d inheritedDirs) note(root string, entry *tar.Header) error {
	parent, base := filepath.Split(entry.Name)
	dir, err := continuity.RootPath(root, parent)
	if err != nil {
		return err
	}
	if entry.Typeflag == tar.TypeDir {
		own := strings.TrimPrefix(filepath.Join(dir, filepath.Join("/", base)), root)
		if _, noted := d[own]; noted {
			d[own] = true
		}
	}
	for ; len(dir) > len(root); dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); err == nil {
			return nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		d[strings.TrimPrefix(dir, root)] = false
	}
	return nil
}

// complete copies the attributes from the nearest of the lower directories that has each one. One that no layer has an
// entry for belongs to the containers' root.
func (d inheritedDirs) complete(upper string, lower []string, ids idShift) error {
	for name, hasEntry := range d {
		dir := filepath.Join(upper, name)
		if now, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) || err == nil && !now.IsDir() {
			continue // a later entry has replaced it
		} else if err != nil {
			return err
		}
		from, info, err := nearestDir(name, lower)
		if err != nil {
			return err
		}
		if from == "" && !hasEntry {
			if err := ids.dir(dir); err != nil {
				return err
			}
		}
		if from == "" {
			continue
		}
		if !hasEntry {
			if err := inherit(info, dir); err != nil {
				return err
			}
		}
		if err := copyXattrs(dir, from); err != nil {
			return err
		}
	}
	return nil
}

// nearestDir returns no directory where the nearest layer that has the name has something else there.
func nearestDir(name string, lower []string) (string, os.FileInfo, error) {
	for _, l := range lower {
		from, err := continuity.RootPath(l, name)
		if err != nil {
			return "", nil, err
		}
		info, err := os.Lstat(from)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return "", nil, err
		case !info.IsDir():
			return "", nil, nil
		default:
			return from, info, nil
		}
	}
	return "", nil, nil
}

// inherit gives a directory the owner and mode of another.
func inherit(from os.FileInfo, dir string) error {
	st, is := from.Sys().(*syscall.Stat_t)
	if !is {
		return fmt.Errorf("no owner of %s", from.Name())
	}
	if err := os.Lchown(dir, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	return os.Chmod(dir, from.Mode())
}

// copyXattrs copies what the kernel's overlay file system would copy, but replaces nothing.
func copyXattrs(to, from string) error {
	names, err := sysx.LListxattr(from)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list extended attributes of %s: %w", from, err)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return strings.HasPrefix(n, "trusted.") })
	for _, name := range names {
		value, err := sysx.LGetxattr(from, name)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read extended attribute %s of %s: %w", name, from, err)
		}
		if err := unix.Lsetxattr(to, name, value, unix.XATTR_CREATE); err != nil && !errors.Is(err, unix.EEXIST) &&
			!errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("set extended attribute %s of %s: %w", name, to, err)
		}
	}
	return nil
}
