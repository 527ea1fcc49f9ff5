package manifest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Quantity is a Range, or in the document one number, which leaves nothing to choose.
type Quantity struct {
	Range

	fixed bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (q *Quantity) UnmarshalJSON(data []byte) error {
	var n uint64
	if json.Unmarshal(data, &n) == nil {
		*q = Quantity{Range{Min: n, Default: n, Max: n}, true}
		return nil
	}
	q.fixed = false
	return json.Unmarshal(data, &q.Range)
}

// MarshalJSON implements json.Marshaler.
func (q Quantity) MarshalJSON() ([]byte, error) {
	if q.fixed {
		return json.Marshal(q.Default)
	}
	return json.Marshal(q.Range)
}

// Choice is what a tenant chooses of the resources; what is zero, or nil, is left to the version's defaults.
type Choice struct {
	// Accelerators is 0 for an instance that has none, although the version could use some.
	Accelerators *int `json:"accelerators,omitempty"`
	// AcceleratorModel narrows the placement; empty: any that the version has an image for.
	AcceleratorModel string `json:"accelerator_model,omitempty"`
	// AcceleratorSharing asks for a slice of an accelerator that others of the org share, one of protocol's; empty: for
	// accelerators that the instance has to itself.
	AcceleratorSharing string `json:"accelerator_sharing,omitempty"`
	CPUMillis          uint64 `json:"cpu_millis,omitempty"`
	MemoryMiB          uint64 `json:"memory_mib,omitempty"`
	DiskMiB            uint64 `json:"disk_mib,omitempty"`
	ShmMiB             uint64 `json:"shm_mib,omitempty"`
	// Ports are those of the node that were chosen; the node chooses the others.
	Ports []PortChoice `json:"ports,omitempty"`
	// Volumes are those whose size was chosen, and those of the project.
	Volumes []VolumeChoice `json:"volumes,omitempty"`
	// Environment is the requirements of the environment. In an upgrade nil keeps what there is, an empty list removes it.
	Environment []string `json:"environment,omitempty"`
}

// ChoiceOf returns the choice that the services were lowered from: the main one's resources, and the ports of all.
func (m Manifest) ChoiceOf(services []*protocol.Service) Choice {
	main := m.Version.RuntimeProfile.MainService().Name
	i := slices.IndexFunc(services, func(s *protocol.Service) bool { return s.GetName() == main })
	if i < 0 {
		return Choice{Ports: portsOf(services), Volumes: volumesOf(services), Environment: m.environmentOf(services)}
	}
	r := services[i].GetResources()
	count := len(r.GetAcceleratorIds())
	return Choice{
		Accelerators:       &count,
		AcceleratorSharing: r.GetAcceleratorSharing(),
		CPUMillis:          uint64(r.GetCpuMillis()),
		MemoryMiB:          r.GetMemoryBytes() / mebibyte,
		DiskMiB:            r.GetDiskBytes() / mebibyte,
		ShmMiB:             r.GetShmBytes() / mebibyte,
		Ports:              portsOf(services),
		Volumes:            volumesOf(services),
		Environment:        m.environmentOf(services),
	}
}

// Demand returns the CPU and memory that all services have together: the main one what was chosen, the others their
// defaults.
func (m Manifest) Demand(c Choice) (cpuMillis, memoryMiB uint64) {
	main := m.Version.RuntimeProfile.mainIndex()
	for i, s := range m.Version.RuntimeProfile.All() {
		cpu, memory := s.Resources.CPUMillis.Default, s.Resources.MemoryMiB.Default
		if i == main {
			cpu, memory = cmp.Or(c.CPUMillis, cpu), cmp.Or(c.MemoryMiB, memory)
		}
		cpuMillis, memoryMiB = cpuMillis+cpu, memoryMiB+memory
	}
	return cpuMillis, memoryMiB
}

// Else returns the choice with what it leaves open taken from another.
func (c Choice) Else(other Choice) Choice {
	if c.Accelerators == nil || *c.Accelerators > 0 {
		c.AcceleratorModel = cmp.Or(c.AcceleratorModel, other.AcceleratorModel)
		c.AcceleratorSharing = cmp.Or(c.AcceleratorSharing, other.AcceleratorSharing)
	}
	c.Accelerators = cmp.Or(c.Accelerators, other.Accelerators)
	c.CPUMillis, c.MemoryMiB = cmp.Or(c.CPUMillis, other.CPUMillis), cmp.Or(c.MemoryMiB, other.MemoryMiB)
	c.DiskMiB, c.ShmMiB = cmp.Or(c.DiskMiB, other.DiskMiB), cmp.Or(c.ShmMiB, other.ShmMiB)
	for _, p := range other.Ports {
		if !slices.ContainsFunc(c.Ports, p.sameName) {
			c.Ports = append(slices.Clip(c.Ports), p)
		}
	}
	c.Volumes = mergeVolumes(c.Volumes, other.Volumes)
	if c.Environment == nil {
		c.Environment = other.Environment
	}
	return c
}

// CheckChoice checks a choice against the version. The fault names each field that lies outside its bounds.
func (m Manifest) CheckChoice(c Choice) error {
	r := m.Version.RuntimeProfile.MainService().Resources
	f := &findings{}
	for _, one := range []struct {
		name   string
		bounds Range
		value  uint64
	}{
		{"cpu_millis", r.CPUMillis, c.CPUMillis},
		{"memory_mib", r.MemoryMiB, c.MemoryMiB},
		{"disk_mib", r.DiskMiB.Range, c.DiskMiB},
		{"shm_mib", r.ShmMiB, c.ShmMiB},
	} {
		if reason := one.bounds.outside(one.value, 1); one.value != 0 && reason != "" {
			f.add("/resources/"+one.name, reason)
		}
	}
	if c.Accelerators != nil {
		m.checkAccelerators(f, *c.Accelerators, c.AcceleratorModel)
	}
	m.findSharing(f, c)
	m.Version.RuntimeProfile.findPorts(f, c.Ports)
	m.findVolumes(f, c.Volumes)
	if _, bad := m.canonicalEnvironment(c.Environment); bad != nil {
		f.fields = append(f.fields, *bad)
	}
	if len(f.fields) == 0 {
		return nil
	}
	return invalid(fault.Unprocessable, CodeResourcesInvalid, "The resources, ports, volumes or requirements do not lie "+
		"within the bounds of the version.", f.fields)
}

func (m Manifest) checkAccelerators(f *findings, count int, model string) {
	supported := m.Version.Compatibility.SupportedAccelerators
	switch {
	case count == 0 && model != "":
		f.add("/resources/accelerator_model", "needs at least one accelerator")
	case count == 0 && !slices.Contains(supported, AcceleratorNone):
		f.add("/resources/accelerators", m.AcceleratorBounds().outside(0, 1))
	case count == 0:
	case len(supported) == 1 && supported[0] == AcceleratorNone:
		f.add("/resources/accelerators", "the version uses none")
	default:
		if reason := m.AcceleratorBounds().outside(uint64(max(count, 0)), 1); reason != "" {
			f.add("/resources/accelerators", reason)
		}
	}
}

// AcceleratorBounds are the bounds of the number of accelerators of an instance that uses any.
func (m Manifest) AcceleratorBounds() Range {
	if r := m.Version.RuntimeProfile.MainService().Resources.Accelerators; r != (Range{}) {
		return r
	}
	least := uint64(max(1, m.Version.Compatibility.MinGPUCount))
	return Range{Min: least, Default: least, Max: MaxAccelerators}
}

// outside says why a value lies outside the range, whose numbers count units of the value's base unit; empty where it
// does not.
func (r Range) outside(value, unit uint64) string {
	switch {
	case r == Range{} && value > 0:
		return "the version leaves no choice"
	case value < r.Min*unit || value > r.Max*unit:
		return fmt.Sprintf("must lie between %d and %d", r.Min*unit, r.Max*unit)
	}
	return ""
}
