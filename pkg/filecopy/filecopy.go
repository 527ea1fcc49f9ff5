// Package filecopy packs files below a directory as a tar stream and unpacks such a stream. Neither side trusts the
// other: nothing leaves the directory by a symbolic link, special files are never made, and a copy is bounded. It keeps
// modes and times; who copies owns the copy.
package filecopy

import (
	"archive/tar"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// MaxBytes bounds the content of one copy.
	MaxBytes = 64 << 30
	// MaxFiles bounds its files and directories, maxDepth their nesting.
	MaxFiles = 100_000
	maxDepth = 100
	// listed is how many names of a directory are held at once.
	listed = 256
)

// errChanged is what a file is reported with that is shorter than it was.
var errChanged = errors.New("changed while it was copied")

// Report says what a copy left out.
type Report struct {
	// Special counts sockets, pipes and devices, Links the symbolic links that lead out of what is copied.
	Special, Links int
}

// String is empty where nothing was left out.
func (r Report) String() string {
	var out []string
	if r.Special > 0 {
		out = append(out, fmt.Sprintf("%d special files", r.Special))
	}
	if r.Links > 0 {
		out = append(out, fmt.Sprintf("%d symbolic links that lead out of it", r.Links))
	}
	if len(out) == 0 {
		return ""
	}
	return "left out: " + strings.Join(out, ", ")
}

// Pack writes the file or directory of this name in root as a tar stream. Symbolic links are packed as such.
func Pack(root *os.Root, name string, to io.Writer) (Report, error) {
	p := packer{root: root, tar: tar.NewWriter(to)}
	if !single(name) {
		return p.report, fmt.Errorf("%q names no file in a directory", name)
	}
	err := p.pack(name, 0)
	if err == nil {
		err = p.tar.Close()
	}
	return p.report, err
}

// single reports whether a name is that of a directory's entry.
func single(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

type packer struct {
	budget

	root   *os.Root
	tar    *tar.Writer
	report Report
}

// budget is what of the bounds a copy has used.
type budget struct {
	files int
	bytes int64
}

func (b *budget) add(bytes int64) error {
	b.files++
	if b.files > MaxFiles || bytes < 0 || bytes > MaxBytes-b.bytes {
		return fmt.Errorf("a copy has at most %d files and %d GiB", MaxFiles, MaxBytes>>30)
	}
	b.bytes += bytes
	return nil
}

func (p *packer) pack(name string, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%s: directories are nested deeper than %d", name, maxDepth)
	}
	info, err := p.root.Lstat(name)
	if err != nil {
		return err
	}
	switch mode := info.Mode(); {
	case mode.IsRegular():
		return p.packFile(name)
	case mode.IsDir():
		if err := p.header(info, name+"/", ""); err != nil {
			return err
		}
		return p.packEntries(name, depth)
	case mode.Type() == fs.ModeSymlink:
		target, err := p.root.Readlink(name)
		if err != nil {
			return err
		}
		return p.header(info, name, target)
	}
	p.report.Special++
	return nil
}

func (p *packer) header(info fs.FileInfo, name, target string) error {
	size := int64(0)
	if info.Mode().IsRegular() {
		size = info.Size()
	}
	if err := p.add(size); err != nil {
		return err
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	h.Name, h.Mode, h.Format = name, int64(info.Mode().Perm()), tar.FormatPAX
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	return p.tar.WriteHeader(h)
}

func (p *packer) packFile(name string) error {
	// A file that has become a pipe meanwhile does not block the copy.
	f, err := p.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s: %w", name, errChanged)
	}
	if err := p.header(info, name, ""); err != nil {
		return err
	}
	if _, err := io.CopyN(p.tar, f, info.Size()); errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: %w", name, errChanged)
	} else if err != nil {
		return err
	}
	return nil
}

func (p *packer) packEntries(name string, depth int) error {
	dir, err := p.root.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	for {
		names, err := dir.Readdirnames(listed)
		for _, n := range names {
			if err := p.pack(path.Join(name, n), depth+1); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Unpack makes the files of a tar stream below root; as replaces the first name of each path, unless it is empty. It
// replaces a file that exists, and keeps what a directory has.
func Unpack(root *os.Root, as string, from io.Reader) (Report, error) {
	u := unpacker{root: root}
	if as != "" && !single(as) {
		return u.report, fmt.Errorf("%q names no file in a directory", as)
	}
	for archive := tar.NewReader(from); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return u.report, nil
		}
		if err == nil {
			err = u.unpack(h, as, archive)
		}
		if err != nil {
			return u.report, err
		}
	}
}

type unpacker struct {
	budget

	root   *os.Root
	report Report
	// parent is the last directory that checkParent has found to be one.
	parent string
}

func (u *unpacker) unpack(h *tar.Header, as string, content io.Reader) error {
	name := path.Clean(h.Name)
	if !fs.ValidPath(name) || name == "." || strings.Count(name, "/") > maxDepth {
		return fmt.Errorf("%q: not a path below the directory", h.Name)
	}
	if as != "" {
		_, below, _ := strings.Cut(name, "/")
		name = path.Join(as, below)
	}
	if err := cmp.Or(u.add(h.Size), u.checkParent(name)); err != nil {
		return err
	}
	mode := fs.FileMode(h.Mode).Perm()
	switch h.Typeflag {
	case tar.TypeDir:
		return u.mkdir(name, mode)
	case tar.TypeSymlink:
		return u.symlink(name, h.Linkname)
	case tar.TypeReg:
		if err := u.clear(name); err != nil {
			return err
		}
		f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, content)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		return u.root.Chtimes(name, h.ModTime, h.ModTime)
	}
	u.report.Special++ // hard links as well: Pack makes none
	return nil
}

// checkParent refuses a name below a symbolic link, which would lead elsewhere. A directory is never replaced by one.
func (u *unpacker) checkParent(name string) error {
	parent := path.Dir(name)
	for dir := parent; dir != "." && dir != u.parent; dir = path.Dir(dir) {
		info, err := u.root.Lstat(dir)
		if err == nil && !info.IsDir() {
			err = fmt.Errorf("%s: is no directory", dir)
		}
		if err != nil {
			return err
		}
	}
	u.parent = parent
	return nil
}

// clear removes what a file or link replaces. A directory, a device, a socket and a pipe are not replaced.
func (u *unpacker) clear(name string) error {
	info, err := u.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if kind := info.Mode().Type(); kind != 0 && kind != fs.ModeSymlink {
		return fmt.Errorf("%s: is there and is no regular file", name)
	}
	return u.root.Remove(name)
}

func (u *unpacker) mkdir(name string, mode fs.FileMode) error {
	err := u.root.Mkdir(name, mode|0o700)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := u.root.Lstat(name)
	if err == nil && !info.IsDir() {
		return fmt.Errorf("%s: is there and is no directory", name)
	}
	return err
}

func (u *unpacker) symlink(name, target string) error {
	if mayLeadOut(name, target) {
		u.report.Links++
		return nil
	}
	if err := u.clear(name); err != nil {
		return err
	}
	return u.root.Symlink(target, name)
}

// mayLeadOut reports whether a symbolic link may lead out of what is copied. None of the directories in its name is a
// link, but one in its target may be: then ".." behind it is not where the target says.
func mayLeadOut(name, target string) bool {
	below := target
	for up := true; up; {
		below, up = strings.CutPrefix(below, "../")
	}
	top, _, _ := strings.Cut(name, "/")
	to := path.Join(path.Dir(name), target)
	return path.IsAbs(target) || below != ".." && slices.Contains(strings.Split(below, "/"), "..") ||
		to != top && !strings.HasPrefix(to, top+"/")
}
