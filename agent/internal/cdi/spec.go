package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

const (
	// LibraryDir is where containers have the driver's libraries. It holds nothing else, so that a search path with it
	// replaces no library of the image. NVIDIA's own images search there already.
	LibraryDir = "/usr/local/nvidia/lib64"
	// maxLinks bounds how many links lead to one file.
	maxLinks = 8
)

// FromSpec takes what these devices need from a CDI spec of a driver below root, and nothing that could reach more than
// devices and files of the driver. The spec comes from another process. No hook is run: mounts do what two of NVIDIA's
// hooks do in the container's file system as root of the host, and any other hook is refused.
func FromSpec(spec *specs.Spec, ids []string, root string) (Edits, error) {
	r := reader{root: root, files: map[string]string{}, links: map[string]string{}, folders: map[string]bool{}}
	all := []specs.ContainerEdits{spec.ContainerEdits}
	for _, id := range ids {
		i := slices.IndexFunc(spec.Devices, func(d specs.Device) bool { return d.Name == id })
		if i < 0 {
			return Edits{}, fmt.Errorf("the spec does not describe %s", id)
		}
		own := spec.Devices[i].ContainerEdits
		if !slices.ContainsFunc(own.DeviceNodes, func(n *specs.DeviceNode) bool { return n != nil && IsNode(n.Path) }) {
			return Edits{}, fmt.Errorf("the spec has no device node for %s", id)
		}
		all = append(all, own)
	}
	for _, e := range all {
		if err := r.read(e); err != nil {
			return Edits{}, err
		}
	}
	edits := Edits{Nodes: r.nodes, Mounts: r.mounts()}
	if len(r.folders) > 0 {
		edits.LibraryDirs = []string{LibraryDir}
	}
	return edits, nil
}

// reader collects the edits of a spec.
type reader struct {
	root  string
	nodes []Node
	// files are the host's files by where the spec mounts them, links the targets of links, folders the directories in
	// which libraries are to be found.
	files, links map[string]string
	folders      map[string]bool
}

func (r *reader) read(e specs.ContainerEdits) error {
	var errs []error
	if len(e.DeviceNodes) > maxNodes || len(e.Mounts) > maxMounts || len(e.Hooks) > maxMounts {
		return errors.New("the spec has too many device nodes, mounts or hooks")
	}
	for _, n := range e.DeviceNodes {
		errs = append(errs, r.readNode(n))
	}
	for _, m := range e.Mounts {
		errs = append(errs, r.readMount(m))
	}
	for _, h := range e.Hooks {
		errs = append(errs, r.readHook(h))
	}
	return errors.Join(errs...)
}

// readNode reads the numbers from the node itself. Nodes that no container gets, such as those of displays, are left
// out.
func (r *reader) readNode(n *specs.DeviceNode) error {
	if n == nil || !IsNode(n.Path) || slices.ContainsFunc(r.nodes, func(o Node) bool { return o.Path == n.Path }) {
		return nil
	}
	host := cmp.Or(n.HostPath, n.Path)
	if host != n.Path && host != filepath.Join(r.root, n.Path) {
		return fmt.Errorf("device node %s is not the driver's %s", host, n.Path)
	}
	var stat unix.Stat_t
	if err := unix.Lstat(host, &stat); err != nil {
		return fmt.Errorf("device node %s: %w", host, err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return fmt.Errorf("%s is no character device", host)
	}
	r.nodes = append(r.nodes, Node{Path: n.Path, Major: unix.Major(stat.Rdev), Minor: unix.Minor(stat.Rdev)})
	return nil
}

// readMount takes a file below the driver's root that every user of the host may read. Anything else that drivers have
// (sockets, directories, libraries of 32 bits) is left out.
func (r *reader) readMount(m *specs.Mount) error {
	if m == nil || !isClean(m.HostPath) || !isClean(m.ContainerPath) {
		return errors.New("the spec mounts a path that is not absolute and clean")
	}
	real, err := filepath.EvalSymlinks(m.HostPath)
	if err != nil {
		return err
	}
	if r.root != "/" && (!strings.HasPrefix(m.HostPath, r.root+"/") || !strings.HasPrefix(real, r.root+"/")) {
		return fmt.Errorf("%s is not below the driver's root %s", m.HostPath, r.root)
	}
	info, err := os.Lstat(real)
	if err != nil {
		return err
	}
	switch {
	case !info.Mode().IsRegular() || isReserved(m.ContainerPath) || is32Bit(real):
		return nil
	case info.Mode().Perm()&0o004 == 0:
		return fmt.Errorf("%s is not readable by every user of the host", real)
	}
	r.files[m.ContainerPath] = real
	return nil
}

// is32Bit reports whether the file is a program or library of 32 bits, which containers cannot run (ELF-64 Object File
// Format, e_ident).
func is32Bit(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	var ident [5]byte
	_, err = f.Read(ident[:])
	return err == nil && string(ident[:]) == "\x7fELF\x01"
}

// readHook takes the links of create-symlinks (--link target::link) and the directories of update-ldcache (--folder).
func (r *reader) readHook(h *specs.Hook) error {
	if h == nil || len(h.Args) < 2 {
		return errors.New("the spec has a hook without a name")
	}
	for i := 2; i+1 < len(h.Args); i += 2 {
		option, value := h.Args[i], h.Args[i+1]
		switch h.Args[1] + " " + option {
		case "create-symlinks --link":
			target, link, _ := strings.Cut(value, "::")
			if !path.IsAbs(target) {
				target = path.Join(path.Dir(link), target)
			}
			r.links[path.Clean(link)] = path.Clean(target)
		case "update-ldcache --folder":
			r.folders[path.Clean(value)] = true
		case "update-ldcache --ldconfig-path":
		default:
			return fmt.Errorf("the spec has a hook that no container gets: %s %s", h.Args[1], option)
		}
	}
	return nil
}

// mounts bind each file, and instead of each link the file that it leads to. Libraries lie in a directory of their own.
func (r *reader) mounts() []Mount {
	for _, link := range slices.Sorted(maps.Keys(r.links)) {
		target := link
		for range maxLinks {
			next, is := r.links[target]
			if !is {
				break
			}
			target = next
		}
		if file, known := r.files[target]; known && r.files[link] == "" && isClean(link) && !isReserved(link) {
			r.files[link] = file
		}
	}
	var all []Mount
	seen := map[string]bool{}
	for _, at := range slices.Sorted(maps.Keys(r.files)) {
		m := Mount{Source: r.files[at], Destination: at}
		if r.folders[path.Dir(at)] {
			m.Destination = path.Join(LibraryDir, path.Base(at))
		}
		if !seen[m.Destination] {
			seen[m.Destination] = true
			all = append(all, m)
		}
	}
	return all
}
