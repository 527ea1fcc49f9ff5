package runtime

import (
	"fmt"
	"path"
	"regexp"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// What the node itself checks of a service, whatever its manifest says.
const (
	maxAliases      = 16
	maxDependencies = 64
	maxFiles        = 32
	maxFilesBytes   = 1 << 20
)

// namePattern is harmless in a line of /etc/hosts, in a path and in a label.
var namePattern = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,252})$`)

func checkNames(s *protocol.Service) error {
	if len(s.GetAliases()) > maxAliases || len(s.GetDependsOn()) > maxDependencies {
		return badSpec(fmt.Sprintf("A service may have %d aliases and %d dependencies.", maxAliases, maxDependencies))
	}
	for _, name := range slices.Concat(NamesOf(s), dependenciesOf(s)) {
		if !namePattern.MatchString(name) {
			return badSpec(fmt.Sprintf("%q is no name of a service.", name))
		}
	}
	return nil
}

func dependenciesOf(s *protocol.Service) []string {
	names := make([]string, 0, len(s.GetDependsOn()))
	for _, d := range s.GetDependsOn() {
		names = append(names, d.GetService())
	}
	return names
}

// checkCapabilities admits what a manifest may ask for. None of it opens the network: members are told apart by the
// addresses of their packets, so no container may choose its own (CAP_NET_RAW, CAP_NET_ADMIN).
func checkCapabilities(s *protocol.Service) error {
	for _, c := range s.GetCapabilities() {
		if !slices.Contains(manifest.Capabilities(), c) {
			return badSpec(fmt.Sprintf("A service may not have the capability %q.", c))
		}
	}
	return nil
}

// capabilitiesOf gives root those of each container and those that were added, and another user the latter alone, which
// it keeps through execve.
func capabilitiesOf(s *protocol.Service, u user) *specs.LinuxCapabilities {
	if u.uid != 0 {
		added := s.GetCapabilities()
		return &specs.LinuxCapabilities{
			Bounding: added, Effective: added, Inheritable: added, Permitted: added, Ambient: added,
		}
	}
	caps := slices.Concat(capabilities(), s.GetCapabilities())
	return &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}
}

func checkFiles(s *protocol.Service) error {
	total := 0
	seen := map[string]bool{}
	for _, f := range s.GetFiles() {
		at := f.GetPath()
		if path.Clean(at) != at || !path.IsAbs(at) || at == "/" || manifest.NodeOwns(at) || seen[at] {
			return badSpec(fmt.Sprintf("A file needs an absolute, clean path of its own that is not part of the system, not %q.",
				at))
		}
		if f.GetMode()&^0o777 != 0 {
			return badSpec(fmt.Sprintf("The mode of file %s has more than permission bits.", at))
		}
		seen[at] = true
		total += len(f.GetContent())
	}
	if len(s.GetFiles()) > maxFiles || total > maxFilesBytes {
		return badSpec(fmt.Sprintf("A service may have %d files of %d bytes in all.", maxFiles, maxFilesBytes))
	}
	return nil
}

// Peer is a service that a container reaches by its names.
type Peer struct {
	IP    string
	Names []string
}

// NamesOf are the host names of a service.
func NamesOf(s *protocol.Service) []string {
	return slices.Concat([]string{s.GetName()}, s.GetAliases())
}
