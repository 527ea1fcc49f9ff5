package manifest

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// FeatureVolumes is volumes: directories that outlive containers.
const FeatureVolumes = "volumes"

// FeatureProjectVolumes is volumes of projects. No key of a manifest belongs to it: a choice needs it.
const FeatureProjectVolumes = "project_volumes"

// MaxVolumes is how many volumes one instance may have.
const MaxVolumes = 16

// Values of Volume.Scope.
const (
	// VolumeOfInstance lives as long as the instance; VolumeOfProject is one that the project has already.
	VolumeOfInstance = "instance"
	VolumeOfProject  = "project"
)

// Volume is a directory that outlives its containers. Services that name the same volume share it.
type Volume struct {
	Name string `json:"name"`
	Path string `json:"path"`
	// SizeMiB is what a volume of the instance holds, or the bounds for the size of the project's.
	SizeMiB Quantity `json:"size_mib"`
	// Scope is VolumeOfInstance or VolumeOfProject; Parse fills the first.
	Scope    string `json:"scope,omitempty"`
	ReadOnly bool   `json:"read_only,omitempty"`
	// SnapshotOnUpgrade keeps the content for a fallback or a rollback to the version before.
	SnapshotOnUpgrade bool `json:"snapshot_on_upgrade,omitempty"`
}

// VolumeChoice is what a tenant chose for a volume of a version.
type VolumeChoice struct {
	Name string `json:"name"`
	// VolumeID is the id of a volume of the project; empty for a volume of the instance.
	VolumeID string `json:"volume_id,omitempty"`
	// SizeMiB of zero is the version's default; the size of a project's volume is its own.
	SizeMiB uint64 `json:"size_mib,omitempty"`
}

func (v VolumeChoice) sameName(w VolumeChoice) bool { return v.Name == w.Name }

// Volumes returns the volumes of all services, each name once, in their order.
func (m Manifest) Volumes() []Volume {
	var all []Volume
	for _, s := range m.Version.RuntimeProfile.All() {
		for _, v := range s.Volumes {
			if !slices.ContainsFunc(all, func(w Volume) bool { return w.Name == v.Name }) {
				all = append(all, v)
			}
		}
	}
	return all
}

func (m Manifest) volume(name string) (Volume, bool) {
	all := m.Volumes()
	i := slices.IndexFunc(all, func(v Volume) bool { return v.Name == name })
	if i < 0 {
		return Volume{}, false
	}
	return all[i], true
}

func (v Volume) lower(chosen []VolumeChoice) (*protocol.VolumeMount, error) {
	var choice VolumeChoice
	if i := slices.IndexFunc(chosen, func(c VolumeChoice) bool { return c.Name == v.Name }); i >= 0 {
		choice = chosen[i]
	}
	if reason := v.refuses(choice); reason != "" {
		return nil, shapeRefused("/volumes", "the volume "+v.Name+" "+reason)
	}
	size, err := within(v.SizeMiB.Range, choice.SizeMiB*mebibyte, mebibyte, "/volumes")
	return &protocol.VolumeMount{
		Name: v.Name, Path: v.Path, SizeBytes: size, VolumeId: choice.VolumeID, ReadOnly: v.ReadOnly,
		SnapshotOnUpgrade: v.SnapshotOnUpgrade,
	}, err
}

// refuses says why a volume cannot be had as chosen; empty where it can.
func (v Volume) refuses(c VolumeChoice) string {
	switch {
	case v.Scope == VolumeOfProject && c.VolumeID == "":
		return "needs the id of a volume of the project"
	case v.Scope != VolumeOfProject && c.VolumeID != "":
		return "lives as long as the instance and cannot be one of the project"
	}
	return ""
}

// findVolumes finds what contradicts the version, or itself, in a choice of volumes.
func (m Manifest) findVolumes(f *findings, chosen []VolumeChoice) {
	for n, c := range chosen {
		at := "/volumes/" + strconv.Itoa(n)
		v, known := m.volume(c.Name)
		switch {
		case !known:
			f.add(at+"/name", "the version has no volume of this name")
			continue
		case slices.ContainsFunc(chosen[n+1:], c.sameName):
			f.add(at+"/name", "is named twice")
		case v.refuses(c) != "":
			f.add(at+"/volume_id", v.refuses(c))
		}
		if reason := v.SizeMiB.outside(c.SizeMiB, 1); c.SizeMiB != 0 && reason != "" {
			f.add(at+"/size_mib", reason)
		}
	}
}

// volumesOf reads the choices of volumes from services.
func volumesOf(services []*protocol.Service) []VolumeChoice {
	var chosen []VolumeChoice
	for _, s := range services {
		for _, v := range s.GetVolumes() {
			c := VolumeChoice{Name: v.GetName(), VolumeID: v.GetVolumeId(), SizeMiB: v.GetSizeBytes() / mebibyte}
			if !slices.ContainsFunc(chosen, c.sameName) {
				chosen = append(chosen, c)
			}
		}
	}
	return chosen
}

// mergeVolumes returns the choices with those that they leave open taken from others.
func mergeVolumes(chosen, others []VolumeChoice) []VolumeChoice {
	for _, v := range others {
		if !slices.ContainsFunc(chosen, v.sameName) {
			chosen = append(slices.Clip(chosen), v)
		}
	}
	return chosen
}

func (m Manifest) forVolumes(chosen []VolumeChoice) []VolumeChoice {
	return slices.DeleteFunc(slices.Clone(chosen), func(c VolumeChoice) bool {
		_, known := m.volume(c.Name)
		return !known
	})
}

// checkVolumes finds what contradicts itself in the volumes of a service.
func checkVolumes(f *findings, at string, s ServiceProfile) {
	names := map[string]bool{}
	for i, v := range s.Volumes {
		here := fmt.Sprintf("%s/%d", at, i)
		if names[v.Name] {
			f.add(here+"/name", "stands twice")
		}
		names[v.Name] = true
		checkRange(f, here+"/size_mib", v.SizeMiB.Range)
		if v.SizeMiB.Min < protocol.MinVolumeBytes/mebibyte {
			f.add(here+"/size_mib", fmt.Sprintf("must be at least %d", protocol.MinVolumeBytes/mebibyte))
		}
		if v.Scope == VolumeOfProject && v.SnapshotOnUpgrade {
			f.add(here+"/snapshot_on_upgrade", "belongs to volumes of the instance: others may use the project's")
		}
	}
}

// mountPoint is a path of a container at which something is mounted, with the JSON pointer that names it.
type mountPoint struct{ pointer, path string }

// mountPoints returns those of a service's volumes, image mounts and scratch directories.
func (s ServiceProfile) mountPoints(at string) []mountPoint {
	var points []mountPoint
	for i, v := range s.Volumes {
		points = append(points, mountPoint{fmt.Sprintf("%s/volumes/%d/path", at, i), v.Path})
	}
	for i, m := range s.ImageMounts {
		points = append(points, mountPoint{fmt.Sprintf("%s/image_mounts/%d/path", at, i), m.Path})
	}
	for i, dir := range s.Scratch {
		points = append(points, mountPoint{fmt.Sprintf("%s/scratch/%d/path", at, i), dir.Path})
	}
	return points
}

// checkMountPoints finds mounts at places that are not the app's, and mounts within each other: one inside a volume
// would be made at a place that the app controls. Scratch directories have a check of their own.
func checkMountPoints(f *findings, at string, s ServiceProfile) {
	points := s.mountPoints(at)
	for i, p := range points[:len(points)-len(s.Scratch)] {
		if path.Clean(p.path) != p.path || p.path == "/" || p.path == "/etc" || p.path == "/run" {
			f.add(p.pointer, "must be a clean absolute path below the root, and neither /etc nor /run")
		}
		if isPlatforms(p.path) {
			f.add(p.pointer, "is the platform's own")
		}
		if slices.ContainsFunc(slices.Delete(slices.Clone(points), i, i+1), p.overlaps) {
			f.add(p.pointer, "is, holds or lies in another volume, image or scratch directory")
		}
		if slices.ContainsFunc(s.Files, func(file File) bool { return strings.HasPrefix(file.Path, p.path+"/") }) {
			f.add(p.pointer, "holds the path of a file of the manifest")
		}
	}
}

// overlaps reports whether one of two mounts is, holds or lies in the other.
func (p mountPoint) overlaps(other mountPoint) bool {
	return isBelow(p.path, other.path) || isBelow(other.path, p.path)
}

// checkSharedVolumes makes sure that services which share a volume say the same of it.
func (m Manifest) checkSharedVolumes(f *findings) {
	all := m.Volumes()
	if len(all) > MaxVolumes {
		f.add("/version/runtime_profile", fmt.Sprintf("has more than %d volumes", MaxVolumes))
	}
	for i, s := range m.Version.RuntimeProfile.All() {
		for j, v := range s.Volumes {
			first, _ := m.volume(v.Name)
			v.Path, v.ReadOnly = first.Path, first.ReadOnly
			if v != first {
				f.add(fmt.Sprintf("%s/volumes/%d", m.Version.RuntimeProfile.pointer(i), j),
					"differs in size, scope or snapshots from the volume of this name of another service")
			}
		}
	}
}

func (m Manifest) checkVolumeChoice(chosen []VolumeChoice) error {
	f := &findings{}
	if m.findVolumes(f, chosen); len(f.fields) == 0 {
		return nil
	}
	return invalid(fault.Unprocessable, CodeShapeRefused, "The version cannot have these volumes.", f.fields)
}
