package manifest

import (
	"errors"
	"path"
	"slices"
	"strconv"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/requirement"
	"github.com/gpuaas/gpuaas/protocol"
)

// FeatureEnvironments is Python packages that a tenant chooses, installed once for all instances of a project.
const FeatureEnvironments = "environments"

// EnvironmentService is the name of the service that installs an environment and ends.
const EnvironmentService = "environment"

const (
	// DefaultBuildTimeoutSeconds is what an absent build_timeout_seconds means.
	DefaultBuildTimeoutSeconds = 900
	// buildStopGraceSeconds is all that an interrupted build gets: nothing of it is kept.
	buildStopGraceSeconds = 1
)

// Environment lets a tenant add Python packages to the main service. They are installed by its image's own pip into a
// virtual environment that sees the packages of the image, and that the service has read-only.
type Environment struct {
	// Path is where the environment is in the container.
	Path string `json:"path"`
	// Python is the interpreter of the image; its pip and venv install.
	Python string `json:"python"`
	// MaxSizeMiB bounds what an environment holds.
	MaxSizeMiB uint64 `json:"max_size_mib"`
	// BuildTimeoutSeconds bounds the installation, which does not count for readiness_timeout_seconds; Parse fills it.
	BuildTimeoutSeconds uint32 `json:"build_timeout_seconds,omitempty"`
}

// checkEnvironment finds what contradicts itself in the environment of a manifest.
func (m Manifest) checkEnvironment(f *findings) {
	e, at := m.Version.RuntimeProfile.Environment, "/version/runtime_profile/environment"
	if e == nil {
		return
	}
	if path.Clean(e.Python) != e.Python {
		f.add(at+"/python", "must be a clean path")
	}
	for i, s := range m.Version.RuntimeProfile.Services {
		if s.Name == EnvironmentService || slices.Contains(s.Aliases, EnvironmentService) {
			f.add(m.Version.RuntimeProfile.pointer(i)+"/name", "is the name of the service that installs the environment")
		}
	}
	if m.parameterSchemas()[protocol.PackageIndexParameter] != nil {
		f.add("/version/parameters/properties/"+protocol.PackageIndexParameter, "is the platform's own beside an environment")
	}
	main := m.Version.RuntimeProfile.MainService()
	if path.Clean(e.Path) != e.Path || slices.Contains([]string{"/", "/etc", "/run", "/usr", "/bin", "/lib"}, e.Path) ||
		isPlatforms(e.Path) {
		f.add(at+"/path", "must be a clean absolute path that holds nothing of the system")
		return
	}
	others := main.mountPoints("")
	for _, file := range main.Files {
		others = append(others, mountPoint{path: file.Path})
	}
	if slices.ContainsFunc(others, mountPoint{path: e.Path}.overlaps) {
		f.add(at+"/path", "is, holds or lies in a volume, an image, a scratch directory or a file")
	}
}

// canonicalEnvironment returns the requirements that an instance gets, or what is wrong with them.
func (m Manifest) canonicalEnvironment(requirements []string) ([]string, *fault.Field) {
	const at = "/environment/requirements"
	if len(requirements) == 0 {
		return nil, nil
	}
	if m.Version.RuntimeProfile.Environment == nil {
		return nil, &fault.Field{Pointer: at, Reason: "the version takes none"}
	}
	canonical, err := requirement.Canonical(requirements)
	if bad, is := errors.AsType[*requirement.Error](err); is && bad.Index >= 0 {
		return nil, &fault.Field{Pointer: at + "/" + strconv.Itoa(bad.Index), Reason: bad.Reason}
	} else if is {
		return nil, &fault.Field{Pointer: at, Reason: bad.Reason}
	}
	return canonical, nil
}

// addEnvironment gives the main service its environment, and adds the service that installs it.
func (m Manifest) addEnvironment(services []*protocol.Service, requirements []string) ([]*protocol.Service, error) {
	canonical, bad := m.canonicalEnvironment(requirements)
	if bad != nil {
		return nil, shapeRefused(bad.Pointer, bad.Reason)
	}
	if len(canonical) == 0 {
		return services, nil
	}
	e := m.Version.RuntimeProfile.Environment
	message := func(builds bool) *protocol.Environment {
		return &protocol.Environment{
			Requirements:        canonical,
			Path:                e.Path,
			Python:              e.Python,
			SizeBytes:           e.MaxSizeMiB * mebibyte,
			BuildTimeoutSeconds: e.BuildTimeoutSeconds,
			Builds:              builds,
		}
	}
	main := services[m.Version.RuntimeProfile.mainIndex()]
	main.Environment = message(false)
	main.DependsOn = append(main.DependsOn, &protocol.Dependency{
		Service: EnvironmentService, Condition: protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY,
	})
	r := main.GetResources()
	// It has what the main service leaves unused until it starts. Its root is read-only: it writes to the environment.
	return append(services, &protocol.Service{
		Name:         EnvironmentService,
		Image:        main.GetImage(),
		ImageVariant: main.GetImageVariant(),
		Environment:  message(true),
		Resources: &protocol.Resources{
			CpuMillis: r.GetCpuMillis(), MemoryBytes: r.GetMemoryBytes(), Pids: r.GetPids(), DiskBytes: r.GetDiskBytes(),
		},
		StopGraceSeconds: buildStopGraceSeconds,
		User:             main.GetUser(),
		ReadOnlyRoot:     true,
		RestartPolicy:    protocol.Service_NEVER,
	}), nil
}

// environmentOf reads the requirements of an instance from its services.
func (m Manifest) environmentOf(services []*protocol.Service) []string {
	if i := m.Version.RuntimeProfile.mainIndex(); i >= 0 && i < len(services) {
		return services[i].GetEnvironment().GetRequirements()
	}
	return nil
}

// countServices is how many services a workload with these requirements has.
func (m Manifest) countServices(requirements []string) int {
	count := len(m.Version.RuntimeProfile.All())
	if len(requirements) > 0 {
		count++
	}
	return count
}
