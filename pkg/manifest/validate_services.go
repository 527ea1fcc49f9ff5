package manifest

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// checkServices finds what contradicts itself in the services, each for itself and all together.
func (m Manifest) checkServices(f *findings) {
	p := m.Version.RuntimeProfile
	if p.mainIndex() < 0 {
		f.add("/version/runtime_profile/main", "names no service")
	}
	ports, filesBytes := map[string]bool{}, 0
	for i, s := range p.All() {
		at := p.pointer(i)
		s.check(f, at, m.App.Slug)
		for j, port := range s.Ports {
			if ports[port.Name] {
				f.add(fmt.Sprintf("%s/ports/%d/name", at, j), "stands twice")
			}
			ports[port.Name] = true
		}
		for _, file := range s.Files {
			filesBytes += len(file.Content)
		}
		if i != p.mainIndex() {
			s.checkBesideMain(f, at)
		} else if s.Restart != "" && s.Restart != RestartAlways {
			f.add(at+"/restart", "must be always for the main service, which runs as long as the instance")
		}
	}
	if filesBytes > MaxFilesBytes {
		f.add("/version/runtime_profile", fmt.Sprintf("has files of more than %d bytes in all", MaxFilesBytes))
	}
	m.checkSharedVolumes(f)
	p.checkNames(f)
	p.checkDependencies(f)
}

// checkBesideMain makes sure that nothing of a service is left to choose but what the main one has.
func (s ServiceProfile) checkBesideMain(f *findings, at string) {
	for i, v := range s.ImageVariants {
		if v.Accelerator != AcceleratorNone {
			f.add(fmt.Sprintf("%s/image_variants/%d/accelerator", at, i), "must be none beside the main service")
		}
	}
	if s.Resources.Accelerators != (Range{}) {
		f.add(at+"/resources/accelerators", "belongs to the main service")
	}
	if len(s.Resources.AcceleratorSharing) > 0 {
		f.add(at+"/resources/accelerator_sharing", "belongs to the main service")
	}
}

// checkNames makes sure that each host name leads to one service.
func (p RuntimeProfile) checkNames(f *findings) {
	taken := map[string]bool{"localhost": true}
	take := func(at, name string) {
		if taken[name] {
			f.add(at, "stands twice, or is localhost")
		}
		taken[name] = true
	}
	for i, s := range p.Services {
		take(p.pointer(i)+"/name", s.Name)
	}
	for i, s := range p.Services {
		for j, alias := range s.Aliases {
			at := fmt.Sprintf("%s/aliases/%d", p.pointer(i), j)
			take(at, alias)
			if last := alias[strings.LastIndexByte(alias, '.')+1:]; strings.Trim(last, "0123456789") == "" {
				f.add(at, "looks like an address")
			}
		}
	}
}

// checkDependencies makes sure that every service can start once.
func (p RuntimeProfile) checkDependencies(f *findings) {
	index := map[string]int{}
	for i, s := range p.Services {
		index[s.Name] = i
	}
	for i, s := range p.Services {
		named := map[string]bool{}
		for j, d := range s.DependsOn {
			at := fmt.Sprintf("%s/depends_on/%d", p.pointer(i), j)
			on, known := index[d.Service]
			switch {
			case !known:
				f.add(at+"/service", "names no service")
				continue
			case named[d.Service]:
				f.add(at+"/service", "stands twice")
			}
			named[d.Service] = true
			other := p.Services[on]
			if d.Condition == ServiceHealthy && other.Readiness.Kind == "" {
				f.add(at+"/condition", "needs a readiness probe of "+d.Service)
			}
			if d.Condition == ServiceCompleted && (other.Restart == "" || other.Restart == RestartAlways) {
				f.hint(at+"/condition", d.Service+" never completes", "write restart: on_failure or never there")
			}
		}
	}
	p.checkCycle(f, index)
}

// checkCycle names the first service that waits for itself, and the way.
func (p RuntimeProfile) checkCycle(f *findings, index map[string]int) {
	done := make([]bool, len(p.Services))
	var visit func(i int, trail []string) bool
	visit = func(i int, trail []string) bool {
		name := p.Services[i].Name
		if at := slices.Index(trail, name); at >= 0 {
			f.add(p.pointer(i)+"/depends_on", "is a cycle: "+strings.Join(append(trail[at:], name), " waits for "))
			return true
		}
		if done[i] {
			return false
		}
		for _, d := range p.Services[i].DependsOn {
			if on, known := index[d.Service]; known && visit(on, append(slices.Clip(trail), name)) {
				return true
			}
		}
		done[i] = true
		return false
	}
	for i := range p.Services {
		if visit(i, nil) {
			return
		}
	}
}

// NodeOwns says that a node itself puts a file or file system at the path: an app can have none of its own there.
func NodeOwns(name string) bool {
	return isPlatforms(name) || name == "/etc" || name == "/run"
}

func checkFiles(f *findings, at string, s ServiceProfile) {
	for i, file := range s.Files {
		here := fmt.Sprintf("%s/%d", at, i)
		if len(file.Content) > MaxFileBytes {
			f.add(here+"/content", fmt.Sprintf("is larger than %d bytes", MaxFileBytes))
		}
		if path.Clean(file.Path) != file.Path || file.Path == "/" {
			f.add(here+"/path", "must be a clean absolute path below the root")
		}
		if NodeOwns(file.Path) {
			f.add(here+"/path", "is the platform's own")
		}
		for j, other := range s.Files {
			if i != j && (file.Path == other.Path && i > j || strings.HasPrefix(file.Path, other.Path+"/")) {
				f.add(here+"/path", "is another file, or lies below one")
			}
		}
		if slices.ContainsFunc(s.Scratch, func(dir Scratch) bool {
			return isBelow(file.Path, dir.Path) || isBelow(dir.Path, file.Path)
		}) {
			f.add(here+"/path", "lies in a scratch directory, or over one")
		}
	}
}
