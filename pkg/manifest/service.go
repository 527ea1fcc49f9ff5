package manifest

import (
	"fmt"
	"slices"
)

// Service is one container of a docker_compose app.
type Service struct {
	// Name is the host name by which the other services reach this one.
	Name string `json:"name"`
	// Aliases are further host names.
	Aliases   []string     `json:"aliases,omitempty"`
	DependsOn []Dependency `json:"depends_on,omitempty"`
	// Restart is RestartAlways, RestartOnFailure or RestartNever; empty means RestartAlways.
	Restart string `json:"restart,omitempty"`
	ServiceProfile
}

// ServiceProfile describes one container.
type ServiceProfile struct {
	ImageVariants []Variant `json:"image_variants,omitempty"`
	// Command replaces the entry point of the image, and its arguments.
	Command []Argument `json:"command,omitempty"`
	// Args follow the command, or the image's entry point where there is none.
	Args      []Argument `json:"args,omitempty"`
	Env       []EnvVar   `json:"env,omitempty"`
	Ports     []Port     `json:"ports,omitempty"`
	Resources Resources  `json:"resources,omitzero"`
	Readiness Probe      `json:"readiness,omitzero"`
	// Liveness decides when the container is replaced; without it the container is alive as long as its first process.
	Liveness Probe `json:"liveness,omitzero"`
	// StopGraceSeconds lies between the polite signal and the kill. Nil: DefaultStopGraceSeconds.
	StopGraceSeconds *uint32   `json:"stop_grace_seconds,omitempty"`
	Scratch          []Scratch `json:"scratch,omitempty"`
	Volumes          []Volume  `json:"volumes,omitempty"`
	// ImageMounts are file systems of further images, read-only: models, data sets, programs. A node has one copy of each.
	ImageMounts []ImageMount `json:"image_mounts,omitempty"`
	Files       []File       `json:"files,omitempty"`
	// User is uid:gid inside the container's user namespace; empty: as the image says.
	User         string `json:"user,omitempty"`
	ReadOnlyRoot bool   `json:"read_only_root,omitempty"`
	WorkingDir   string `json:"working_dir,omitempty"`
	// Capabilities are those beside what each container has, of a listed set.
	Capabilities []string `json:"capabilities,omitempty"`
}

// ImageMount is the file system of an image at a path of a container.
type ImageMount struct {
	ImageRef string `json:"image_ref"`
	Path     string `json:"path"`
}

// Dependency lets a service wait for another one.
type Dependency struct {
	Service string `json:"service"`
	// Condition is ServiceStarted, ServiceHealthy or ServiceCompleted; Parse fills ServiceStarted.
	Condition string `json:"condition,omitempty"`
}

// Values of Dependency.Condition, as in the Compose specification.
const (
	ServiceStarted   = "service_started"
	ServiceHealthy   = "service_healthy"
	ServiceCompleted = "service_completed_successfully"
)

// Values of Service.Restart.
const (
	RestartAlways    = "always"
	RestartOnFailure = "on_failure"
	RestartNever     = "never"
)

// File is a read-only file that the publisher gives a container.
type File struct {
	Path    string `json:"path"`
	Content string `json:"content"`
	// Mode is the permission bits in octal; Parse fills DefaultFileMode.
	Mode string `json:"mode,omitempty"`
}

// Capabilities returns those that a service may have beside what each container has. None reaches beyond the
// container's user namespace, and none lets it send packets of its own making.
func Capabilities() []string {
	return []string{"CAP_FSETID", "CAP_IPC_LOCK", "CAP_SETPCAP", "CAP_SYS_CHROOT", "CAP_SYS_NICE"}
}

// DefaultFileMode lets every user of the container read a file.
const DefaultFileMode = "0444"

// All returns the services of the profile, as many as a workload has and in the same order.
func (p RuntimeProfile) All() []Service {
	if p.Kind == RuntimeDockerCompose || IsExternal(p.Kind) {
		return p.Services
	}
	return []Service{{Name: ServiceName, ServiceProfile: p.ServiceProfile}}
}

// MainService returns the service that gets the chosen resources and the accelerators.
func (p RuntimeProfile) MainService() Service {
	all := p.All()
	if i := p.mainIndex(); i >= 0 {
		return all[i]
	}
	return Service{}
}

// mainIndex is -1 where Main names no service; Parse refuses that.
func (p RuntimeProfile) mainIndex() int {
	if p.Kind != RuntimeDockerCompose && !IsExternal(p.Kind) {
		return 0
	}
	return slices.IndexFunc(p.Services, func(s Service) bool { return s.Name == p.Main })
}

// pointer is where a service of All stands in the document.
func (p RuntimeProfile) pointer(i int) string {
	if p.Kind == RuntimeDockerCompose {
		return fmt.Sprintf("/version/runtime_profile/services/%d", i)
	}
	return "/version/runtime_profile"
}

// Image is an image of a manifest, with the JSON pointer of its reference.
type Image struct{ Pointer, Ref string }

// Images returns the images of all services.
func (m Manifest) Images() []Image {
	var images []Image
	for i, s := range m.Version.RuntimeProfile.All() {
		for j, v := range s.ImageVariants {
			at := fmt.Sprintf("%s/image_variants/%d/image_ref", m.Version.RuntimeProfile.pointer(i), j)
			images = append(images, Image{at, v.ImageRef})
		}
		for j, mounted := range s.ImageMounts {
			at := fmt.Sprintf("%s/image_mounts/%d/image_ref", m.Version.RuntimeProfile.pointer(i), j)
			images = append(images, Image{at, mounted.ImageRef})
		}
	}
	return images
}

func (s *ServiceProfile) fillDefaults() {
	for i := range s.Ports {
		orElse(&s.Ports[i].Protocol, "http")
		orElse(&s.Ports[i].Expose, "private")
	}
	for i := range s.Files {
		orElse(&s.Files[i].Mode, DefaultFileMode)
	}
	for i := range s.Volumes {
		orElse(&s.Volumes[i].Scope, VolumeOfInstance)
	}
	orElse(&s.Resources.PidsMax, DefaultPidsMax)
	s.Readiness.fillDefaults()
	s.Liveness.fillDefaults()
	if s.StopGraceSeconds == nil {
		grace := uint32(DefaultStopGraceSeconds)
		s.StopGraceSeconds = &grace
	}
}

func (p *Probe) fillDefaults() {
	if p.Kind != "" {
		orElse(&p.PeriodMillis, DefaultProbePeriodMillis)
		orElse(&p.TimeoutMillis, DefaultProbeTimeoutMillis)
	}
}
