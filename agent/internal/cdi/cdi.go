// Package cdi has what containers need to use accelerators: device nodes and files of the driver, as the Container
// Device Interface (CDI) describes them, but without hooks. It checks them and gives them to no container itself:
// agent/internal/accelerator makes them, agent/internal/runtime applies them.
package cdi

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"strings"
)

// Limits on the edits of one container; a machine with eight GPUs needs a tenth of them.
const (
	maxClaims = 256
	maxNodes  = 256
	maxMounts = 512
	maxPath   = 512 // bytes
)

// Edits are the changes that give accelerators to one container.
type Edits struct {
	// Claims are the ids that the container holds alone: its accelerators, and the partitions of those it has whole.
	Claims []string
	// Shared are the accelerators of which the container has a part that no hardware keeps apart from the others.
	Shared []Slice
	// MPS is how a container with a slice reaches its MPS daemon; nil for every other container.
	MPS   *MPS
	Nodes []Node
	// Mounts are files of the driver, bound read-only.
	Mounts []Mount
	// LibraryDirs are directories of the container in which its programs find the driver's libraries.
	LibraryDirs []string
}

// Slice is a part of an accelerator. Only containers of one org, and that share it in one way, have parts of it at a
// time.
type Slice struct {
	// Accelerator is the id of the whole.
	Accelerator string
	// Sharing is one of protocol's; empty for a partition that the driver makes.
	Sharing string
}

// MPS is what a client of an MPS daemon needs, and what it may use.
type MPS struct {
	// PipeDir has the daemon's sockets, ShmDir is its /dev/shm; both are directories of the host.
	PipeDir, ShmDir string
	ThreadPercent   uint64
	MemoryMiB       uint64
}

// Node is a character device. The container gets a node of its own for it, and its cgroup a rule.
type Node struct {
	// Path is where the container sees it.
	Path         string
	Major, Minor uint32
}

// Mount binds a file of the host into the container.
type Mount struct{ Source, Destination string }

// nodePath has the names of all device nodes that a container may get: those of the drivers' compute and render parts.
// The nodes of displays (card0, nvidia-modeset) are not among them, nor those that configure partitions.
var nodePath = regexp.MustCompile(`^/dev/(kfd|dri/renderD\d{1,4}|nvidia\d{1,4}|nvidiactl|nvidia-uvm|nvidia-uvm-tools|` +
	`nvidia-caps/nvidia-cap\d{1,5})$`)

// IsNode reports whether a container may have a device node of this path.
func IsNode(path string) bool { return nodePath.MatchString(path) }

// Merge appends the edits of another driver.
func (e Edits) Merge(other Edits) Edits {
	e.Claims = append(e.Claims, other.Claims...)
	e.Shared = append(e.Shared, other.Shared...)
	e.MPS = cmp.Or(e.MPS, other.MPS)
	e.Nodes = append(e.Nodes, other.Nodes...)
	e.Mounts = append(e.Mounts, other.Mounts...)
	e.LibraryDirs = append(e.LibraryDirs, other.LibraryDirs...)
	return e
}

// Check refuses edits that could reach more than devices and files of drivers.
func (e Edits) Check() error {
	if len(e.Claims) > maxClaims || len(e.Nodes) > maxNodes || len(e.Mounts) > maxMounts ||
		len(e.LibraryDirs) > maxMounts {
		return fmt.Errorf("%d accelerators, %d device nodes or %d mounts are too many", len(e.Claims), len(e.Nodes),
			len(e.Mounts))
	}
	seen := map[string]bool{}
	for _, n := range e.Nodes {
		if !IsNode(n.Path) || seen[n.Path] {
			return fmt.Errorf("%q is no device node that a container may have, or it is named twice", n.Path)
		}
		seen[n.Path] = true
	}
	for _, m := range e.Mounts {
		if !isClean(m.Source) || !isClean(m.Destination) || isReserved(m.Destination) || seen[m.Destination] {
			return fmt.Errorf("%q must not be mounted on %q", m.Source, m.Destination)
		}
		seen[m.Destination] = true
	}
	for _, dir := range e.LibraryDirs {
		if !isClean(dir) || isReserved(dir) || strings.Contains(dir, ":") {
			return fmt.Errorf("%q is no directory of libraries", dir)
		}
	}
	return nil
}

func isClean(p string) bool { return path.IsAbs(p) && path.Clean(p) == p && len(p) <= maxPath }

// isReserved reports whether the runtime itself mounts on the path.
func isReserved(p string) bool {
	first, _, below := strings.Cut(strings.TrimPrefix(p, "/"), "/")
	switch first {
	case "proc", "sys", "dev", "run":
		return true
	}
	return !below // the root, and each directory in it
}
