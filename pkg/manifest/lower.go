package manifest

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Shape is the part of an allocation that one member gets. A size of zero means the manifest's default.
type Shape struct {
	CPUMillis   uint32
	MemoryBytes uint64
	DiskBytes   uint64
	ShmBytes    uint64
	// Variant is the name of the image variant; empty: the first of the accelerators' vendor.
	Variant string
	// AcceleratorVendor is none (or empty), nvidia or amd.
	AcceleratorVendor string
	// AcceleratorIDs are the stable ids of the accelerators claimed for the member.
	AcceleratorIDs []string
	// AcceleratorSharing is how it shares them; empty where it has them to itself.
	AcceleratorSharing string
	// Ports are the ports of the node that were chosen.
	Ports []PortChoice
	// Volumes are the volumes that were chosen.
	Volumes []VolumeChoice
	// Environment is the requirements of the environment that was chosen; none where there is none.
	Environment []string
	// Recreate keeps services that start first from that, for want of room.
	Recreate bool
}

const mebibyte = 1 << 20

// Inputs are what the tenant chose.
type Inputs struct {
	Parameters map[string]any
	// ConfigJSON is the config as the containers get it; empty means {}. CheckConfig has accepted it.
	ConfigJSON string
}

// Lower turns a manifest, the tenant's inputs and a shape into the services that a node runs. The same input gives the
// same services everywhere: Admits relies on it. The main service gets the shape, the others their defaults.
func Lower(m Manifest, in Inputs, shape Shape) ([]*protocol.Service, error) {
	p := m.Version.RuntimeProfile
	if p.Kind != RuntimeLaunchableOCI && p.Kind != RuntimeDockerCompose {
		return nil, fault.New(fault.Unprocessable, CodeInvalid, "Only launchable_oci and docker_compose apps can be run.",
			nil).WithField("/version/runtime_profile/kind", "is not supported").Permanent()
	}
	values, err := m.resolveParameters(in.Parameters)
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(p.checkPorts(shape.Ports), m.checkVolumeChoice(shape.Volumes)); err != nil {
		return nil, err
	}
	var out []*protocol.Service
	main := p.mainIndex()
	for i, s := range p.All() {
		own, choose := shape, m.variantFor
		if i != main {
			own, choose = Shape{Ports: shape.Ports, Volumes: shape.Volumes}, s.onlyVariant
		}
		variant, err := choose(own)
		if err != nil {
			return nil, err
		}
		lowered, err := s.lower(own, variant, values)
		if err != nil {
			return nil, err
		}
		m.lowerUpgrade(lowered, shape)
		out = append(out, lowered)
	}
	out, err = m.addEnvironment(out, shape.Environment)
	for _, s := range out {
		s.Config = m.config(in.ConfigJSON)
		if m.Version.Secrets.OnChange != "" && !s.GetEnvironment().GetBuilds() {
			s.Secrets = &protocol.Secrets{OnChange: m.Version.Secrets.onChange(), Signal: m.Version.Secrets.Signal}
		}
	}
	return out, err
}

// onlyVariant is the image of a service beside the main one.
func (s Service) onlyVariant(Shape) (Variant, error) {
	if len(s.ImageVariants) != 1 {
		return Variant{}, shapeRefused("services", s.Name+" must have one image")
	}
	return s.ImageVariants[0], nil
}

func (s Service) lower(shape Shape, variant Variant, values map[string]any) (*protocol.Service, error) {
	resources, err := s.Resources.lower(shape)
	if err != nil {
		return nil, err
	}
	command, commandErr := arguments(s.Command, values)
	args, argsErr := arguments(s.Args, values)
	env, envErr := s.environment(values)
	if err := cmp.Or(commandErr, argsErr, envErr); err != nil {
		return nil, err
	}
	out := &protocol.Service{
		Name:             s.Name,
		Image:            variant.ImageRef,
		ImageVariant:     variant.Name,
		Command:          command,
		Args:             args,
		Env:              env,
		Resources:        resources,
		Readiness:        s.Readiness.lower(),
		Liveness:         s.Liveness.lower(),
		StopGraceSeconds: s.stopGrace(),
		User:             s.User,
		ReadOnlyRoot:     s.ReadOnlyRoot,
		WorkingDir:       s.WorkingDir,
		Aliases:          slices.Clone(s.Aliases),
		RestartPolicy:    restartPolicies()[s.Restart],
		Capabilities:     slices.Clone(s.Capabilities),
	}
	for _, port := range s.Ports {
		out.Ports = append(out.Ports, &protocol.Port{
			Name: port.Name, ContainerPort: port.Container, Protocol: port.Protocol,
			Expose: port.Expose, HostPort: hostPortOf(shape.Ports, port.Name),
		})
	}
	for _, dir := range s.Scratch {
		out.Scratch = append(out.Scratch, &protocol.Scratch{Path: dir.Path, SizeBytes: dir.SizeMiB * mebibyte})
	}
	for _, v := range s.Volumes {
		mount, err := v.lower(shape.Volumes)
		if err != nil {
			return nil, err
		}
		out.Volumes = append(out.Volumes, mount)
	}
	for _, m := range s.ImageMounts {
		out.ImageMounts = append(out.ImageMounts, &protocol.ImageMount{Image: m.ImageRef, Path: m.Path})
	}
	for _, file := range s.Files {
		out.Files = append(out.Files, &protocol.File{Path: file.Path, Content: file.Content, Mode: file.mode()})
	}
	for _, d := range s.DependsOn {
		out.DependsOn = append(out.DependsOn, &protocol.Dependency{
			Service: d.Service, Condition: dependencyConditions()[d.Condition],
		})
	}
	return out, nil
}

// lower is nil for no probe.
func (p Probe) lower() *protocol.Probe {
	if p.Kind == "" {
		return nil
	}
	return &protocol.Probe{
		Kind: p.Kind, Port: p.Port, Path: p.Path, Command: slices.Clone(p.Command),
		PeriodMillis: p.PeriodMillis, TimeoutMillis: p.TimeoutMillis,
		FailureThreshold: p.FailureThreshold, StartPeriodMillis: p.StartPeriodMillis,
	}
}

func restartPolicies() map[string]protocol.Service_RestartPolicy {
	return map[string]protocol.Service_RestartPolicy{
		RestartAlways:    protocol.Service_ALWAYS,
		RestartOnFailure: protocol.Service_ON_FAILURE,
		RestartNever:     protocol.Service_NEVER,
	}
}

func dependencyConditions() map[string]protocol.Dependency_Condition {
	return map[string]protocol.Dependency_Condition{
		ServiceStarted:   protocol.Dependency_SERVICE_STARTED,
		ServiceHealthy:   protocol.Dependency_SERVICE_HEALTHY,
		ServiceCompleted: protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY,
	}
}

// mode is what the schema's pattern lets through, and DefaultFileMode for nothing.
func (f File) mode() uint32 {
	bits, err := strconv.ParseUint(cmp.Or(f.Mode, DefaultFileMode), 8, 9)
	if err != nil {
		return 0
	}
	return uint32(bits)
}

// config is nil where the version takes none.
func (m Manifest) config(json string) *protocol.Config {
	if m.Version.ConfigSchema == nil {
		return nil
	}
	c := m.Version.Config
	return &protocol.Config{Json: cmp.Or(json, "{}"), OnChange: c.onChange(), Signal: c.Signal}
}

func (c Config) onChange() protocol.Config_OnChange {
	switch c.OnChange {
	case ConfigSignal:
		return protocol.Config_SIGNAL
	case ConfigNone:
		return protocol.Config_NONE
	default:
		return protocol.Config_RESTART
	}
}

func (s ServiceProfile) stopGrace() uint32 {
	if s.StopGraceSeconds == nil {
		return DefaultStopGraceSeconds
	}
	return *s.StopGraceSeconds
}

func shapeRefused(pointer, reason string) error {
	return fault.New(fault.Unprocessable, CodeShapeRefused, "The version does not run on this capacity.", nil).WithField(
		pointer,
		reason).Permanent()
}

// variantFor never falls back to another kind of accelerator: the tenant would pay for one that the image cannot use.
func (m Manifest) variantFor(shape Shape) (Variant, error) {
	vendor := shape.AcceleratorVendor
	if vendor == "" {
		vendor = AcceleratorNone
	}
	switch {
	case vendor == AcceleratorNone && len(shape.AcceleratorIDs) > 0:
		return Variant{}, shapeRefused("accelerator_vendor", "accelerators were given without their vendor")
	case vendor != AcceleratorNone && len(shape.AcceleratorIDs) == 0:
		return Variant{}, shapeRefused("accelerator_count", "a vendor was given without accelerators")
	case vendor == AcceleratorNone && m.Version.Compatibility.MinGPUCount > 0:
		return Variant{}, shapeRefused("accelerator_count", m.AcceleratorBounds().outside(0, 1))
	case vendor != AcceleratorNone && m.AcceleratorBounds().outside(uint64(len(shape.AcceleratorIDs)), 1) != "":
		return Variant{}, shapeRefused("accelerator_count",
			m.AcceleratorBounds().outside(uint64(len(shape.AcceleratorIDs)), 1))
	case m.againstSharing(shape.AcceleratorSharing) != "":
		return Variant{}, shapeRefused("accelerator_sharing", m.againstSharing(shape.AcceleratorSharing))
	case shape.AcceleratorSharing != "" && (vendor != AcceleratorNVIDIA || len(shape.AcceleratorIDs) != 1):
		return Variant{}, shapeRefused("accelerator_sharing", "is for one slice of an NVIDIA GPU")
	case !slices.Contains(m.Version.Compatibility.SupportedAccelerators, vendor):
		return Variant{}, shapeRefused("accelerator_vendor", "the version supports "+
			strings.Join(m.Version.Compatibility.SupportedAccelerators, ", "))
	}
	for _, v := range m.Version.RuntimeProfile.MainService().ImageVariants {
		if v.Accelerator == vendor && (shape.Variant == "" || v.Name == shape.Variant) {
			return v, nil
		}
	}
	return Variant{}, shapeRefused("accelerator_vendor", "the version has no image for it")
}

// within checks value against the range, whose numbers count units of the value's base unit.
func within(r Range, value, unit uint64, pointer string) (uint64, error) {
	if value == 0 {
		return r.Default * unit, nil
	}
	if reason := r.outside(value, unit); reason != "" {
		return 0, shapeRefused(pointer, reason)
	}
	return value, nil
}

func (r Resources) lower(shape Shape) (*protocol.Resources, error) {
	cpu, cpuErr := within(r.CPUMillis, uint64(shape.CPUMillis), 1, "cpu_millis")
	memory, memoryErr := within(r.MemoryMiB, shape.MemoryBytes, mebibyte, "memory_bytes")
	disk, diskErr := within(r.DiskMiB.Range, shape.DiskBytes, mebibyte, "disk_bytes")
	shm, shmErr := within(r.ShmMiB, shape.ShmBytes, mebibyte, "shm_bytes")
	return &protocol.Resources{
		CpuMillis:      clampUint32(cpu),
		MemoryBytes:    memory,
		Pids:           r.PidsMax,
		DiskBytes:      disk,
		ShmBytes:       shm,
		AcceleratorIds: slices.Clone(shape.AcceleratorIDs),

		AcceleratorSharing: shape.AcceleratorSharing,
	}, cmp.Or(cpuErr, memoryErr, diskErr, shmErr)
}

func clampUint32(v uint64) uint32 {
	if v > math.MaxUint32 {
		return math.MaxUint32
	}
	return uint32(v)
}

func arguments(list []Argument, values map[string]any) ([]string, error) {
	var out []string
	for _, a := range list {
		if a.Parameter == "" {
			out = append(out, a.Text)
			continue
		}
		v, given := values[a.Parameter]
		if !given || v == nil {
			continue
		}
		text, ok := scalarText(v)
		if !ok {
			return nil, parameterRefused(a.Parameter, "cannot be an argument")
		}
		// Without a prefix the value stands alone, and a leading dash would make an option of it.
		if a.Prefix == "" && strings.HasPrefix(text, "-") {
			return nil, parameterRefused(a.Parameter, "must not start with a dash")
		}
		out = append(out, a.Prefix+text)
	}
	return out, nil
}

func (s ServiceProfile) environment(values map[string]any) ([]*protocol.EnvVar, error) {
	var out []*protocol.EnvVar
	for _, e := range s.Env {
		if e.Value != nil {
			out = append(out, &protocol.EnvVar{Name: e.Name, Value: *e.Value})
			continue
		}
		v, given := values[e.Parameter]
		if !given || v == nil {
			continue
		}
		text, ok := scalarText(v)
		if !ok {
			return nil, parameterRefused(e.Parameter, "cannot be an environment variable")
		}
		out = append(out, &protocol.EnvVar{Name: e.Name, Value: text})
	}
	return out, nil
}

func parameterRefused(name, reason string) error {
	return invalid(fault.Unprocessable, CodeParametersInvalid, "The parameters do not follow the version's schema.",
		[]fault.Field{{Pointer: "/parameters/" + escapePointer(name), Reason: reason}})
}
