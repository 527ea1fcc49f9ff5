package manifest

import (
	"cmp"
	"math"
	"slices"
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
	// Ports are the ports of the node that were chosen.
	Ports []PortChoice
}

const mebibyte = 1 << 20

// Inputs are what the tenant chose.
type Inputs struct {
	Parameters map[string]any
	// ConfigJSON is the config as the containers get it; empty means {}. CheckConfig has accepted it.
	ConfigJSON string
}

// Lower turns a manifest, the tenant's inputs and a shape into the services that a node runs. The same input gives the
// same services everywhere: Admits relies on it.
func Lower(m Manifest, in Inputs, shape Shape) ([]*protocol.Service, error) {
	p := m.Version.RuntimeProfile
	if p.Kind != RuntimeLaunchableOCI {
		return nil, fault.New(fault.Unprocessable, CodeInvalid, "Only launchable_oci apps can be run.", nil).
			WithField("/version/runtime_profile/kind", "is not supported").Permanent()
	}
	values, err := m.resolveParameters(in.Parameters)
	if err != nil {
		return nil, err
	}
	variant, err := m.variantFor(shape)
	if err != nil {
		return nil, err
	}
	resources, err := p.Resources.lower(shape)
	if err != nil {
		return nil, err
	}
	command, err := p.command(values)
	if err != nil {
		return nil, err
	}
	env, err := p.environment(values)
	if err != nil {
		return nil, err
	}
	s := &protocol.Service{
		Name:         ServiceName,
		Image:        variant.ImageRef,
		ImageVariant: variant.Name,
		Command:      command,
		Env:          env,
		Resources:    resources,
		Readiness: &protocol.Probe{
			Kind: p.Readiness.Kind, Port: p.Readiness.Port, Path: p.Readiness.Path, Command: slices.Clone(p.Readiness.Command),
			PeriodMillis: p.Readiness.PeriodMillis, TimeoutMillis: p.Readiness.TimeoutMillis,
		},
		StopGraceSeconds: p.stopGrace(),
		User:             p.User,
		ReadOnlyRoot:     p.ReadOnlyRoot,
		WorkingDir:       p.WorkingDir,
		Config:           m.config(in.ConfigJSON),
	}
	if err := p.checkPorts(shape.Ports); err != nil {
		return nil, err
	}
	for _, port := range p.Ports {
		s.Ports = append(s.Ports, &protocol.Port{
			Name: port.Name, ContainerPort: port.Container, Protocol: port.Protocol,
			Expose: port.Expose, HostPort: hostPortOf(shape.Ports, port.Name),
		})
	}
	for _, dir := range p.Scratch {
		s.Scratch = append(s.Scratch, &protocol.Scratch{Path: dir.Path, SizeBytes: dir.SizeMiB * mebibyte})
	}
	return []*protocol.Service{s}, nil
}

// config is nil where the version takes none.
func (m Manifest) config(json string) *protocol.Config {
	if m.Version.ConfigSchema == nil {
		return nil
	}
	c := &protocol.Config{Json: cmp.Or(json, "{}"), OnChange: protocol.Config_RESTART, Signal: m.Version.Config.Signal}
	switch m.Version.Config.OnChange {
	case ConfigSignal:
		c.OnChange = protocol.Config_SIGNAL
	case ConfigNone:
		c.OnChange = protocol.Config_NONE
	}
	return c
}

func (p RuntimeProfile) stopGrace() uint32 {
	if p.StopGraceSeconds == nil {
		return DefaultStopGraceSeconds
	}
	return *p.StopGraceSeconds
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
	case !slices.Contains(m.Version.Compatibility.SupportedAccelerators, vendor):
		return Variant{}, shapeRefused("accelerator_vendor", "the version supports "+
			strings.Join(m.Version.Compatibility.SupportedAccelerators, ", "))
	}
	for _, v := range m.Version.RuntimeProfile.ImageVariants {
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
	}, cmp.Or(cpuErr, memoryErr, diskErr, shmErr)
}

func clampUint32(v uint64) uint32 {
	if v > math.MaxUint32 {
		return math.MaxUint32
	}
	return uint32(v)
}

func (p RuntimeProfile) command(values map[string]any) ([]string, error) {
	var out []string
	for _, a := range p.Command {
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

func (p RuntimeProfile) environment(values map[string]any) ([]*protocol.EnvVar, error) {
	var out []*protocol.EnvVar
	for _, e := range p.Env {
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
