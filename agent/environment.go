package agent

import (
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/requirement"
	"github.com/gpuaas/gpuaas/protocol"
)

// buildGrace is how long after its timeout an installation may take to end by itself.
const buildGrace = 30 * time.Second

// EnvironmentID names an environment on a node. It begins with the project's id: no project has the environment of
// another, whose index it may not read. ParseEnvironmentID takes it apart.
func EnvironmentID(projectID, digest string) string { return projectID + "." + digest }

// ParseEnvironmentID returns what EnvironmentID was given.
func ParseEnvironmentID(id string) (projectID, digest string) {
	projectID, digest, _ = strings.Cut(id, ".")
	return projectID, digest
}

// environmentID names the environment of a service; it is empty for a service without one.
func environmentID(projectID string, s *protocol.Service) string {
	e := s.GetEnvironment()
	if e == nil {
		return ""
	}
	return EnvironmentID(projectID, requirement.Digest(requirement.Base{
		ImageDigest: manifest.DigestOf(s.GetImage()),
		Platform:    runtime.GOOS + "/" + runtime.GOARCH,
		Python:      e.GetPython(),
		Path:        e.GetPath(),
	}, e.GetRequirements()))
}

// EnvironmentIDs are the environments that the workload or its fallback use.
func (w Workload) EnvironmentIDs() []string {
	var ids []string
	for _, s := range w.Services {
		if s.Environment != "" && !s.BuildsEnvironment {
			ids = append(ids, s.Environment)
		}
	}
	if w.Fallback != nil {
		ids = append(ids, w.Fallback.EnvironmentIDs()...)
	}
	return ids
}

// indexBuilds finds which member installs each environment: it has a container that does, or an action that may be
// making one.
func (d *differ) indexBuilds() {
	d.building = map[string]string{}
	for _, c := range d.observed.Containers {
		if c.Environment != "" && !c.ExitRecorded {
			d.building[c.Environment] = c.MemberID
		}
	}
	for _, w := range d.workloads {
		for _, s := range w.Services {
			if s.BuildsEnvironment && d.building[s.Environment] == "" && d.busy(w.MemberID, s.Name) {
				d.building[s.Environment] = w.MemberID
			}
		}
	}
}

// installs are the services that install environments of an upgrade beside the containers of its fallback. Before they
// are done, nothing else of the upgrade starts, and no container of the fallback that it replaces is stopped.
func (d *differ) installs(w Workload) []Service {
	if !d.serves(w) {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(w.Services), func(s Service) bool {
		return !s.BuildsEnvironment || d.completed(w, s)
	})
}

// mayBuild reports whether no other member installs the service's environment, and counts the service as the one that
// does.
func (d *differ) mayBuild(w Workload, s Service) bool {
	if !s.BuildsEnvironment {
		return true
	}
	if by := d.building[s.Environment]; by != "" && by != w.MemberID {
		return false
	}
	d.building[s.Environment] = w.MemberID
	return true
}
