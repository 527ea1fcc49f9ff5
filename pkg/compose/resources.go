package compose

import (
	"cmp"
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func mapKeys[K comparable, V any](m map[K]V) iter.Seq[K] { return maps.Keys(m) }

// mebibytes rounds up: an app never gets less than its file says. A negative size, which compose-go also makes of one
// beyond an int64, becomes a size that no manifest may have.
func mebibytes(n types.UnitBytes) uint64 {
	if n < 0 {
		n = math.MaxInt64
	}
	return (uint64(n) + 1<<20 - 1) >> 20
}

// cpuMillis rounds up, too. Compose keeps cores in 32 bits: what the file says is the shortest number with that value.
func cpuMillis(cores types.NanoCPUs) uint64 {
	const tolerance = 1e-6 // of the multiplication
	written, _ := strconv.ParseFloat(strconv.FormatFloat(float64(cores), 'g', -1, 32), 64)
	millis := math.Ceil(written*1000 - tolerance)
	if math.IsNaN(millis) || millis > math.MaxUint32 {
		return math.MaxUint32 // more than any manifest may have
	}
	if millis > 0 {
		return uint64(max(millis, manifest.MinCPUMillis))
	}
	return 0
}

// resources takes the limits of a service as its default and most, and the reservations as the least that a tenant may
// choose for the main service.
func (c *converter) resources(name string, s types.ServiceConfig, main bool) manifest.Resources {
	var limits, reserved types.Resource
	if s.Deploy != nil {
		limits, reserved = orNone(s.Deploy.Resources.Limits), orNone(s.Deploy.Resources.Reservations)
	}
	out := manifest.Resources{
		CPUMillis: bounds(cpuMillis(reserved.NanoCPUs), cpuMillis(cmp.Or(limits.NanoCPUs, types.NanoCPUs(s.CPUS))),
			sizes{least: 100, main: 1000, mainMost: 64_000, beside: 500}, main),
		MemoryMiB: bounds(mebibytes(cmp.Or(reserved.MemoryBytes, s.MemReservation)),
			mebibytes(cmp.Or(limits.MemoryBytes, s.MemLimit)),
			sizes{least: 128, main: 1024, mainMost: 1 << 20, beside: 256}, main),
	}
	if pids := cmp.Or(limits.Pids, s.PidsLimit); pids < 0 {
		c.refuse("must be a limit", "", "services", name, "pids_limit")
	} else {
		out.PidsMax = uint32(min(pids, math.MaxUint32))
	}
	if n := mebibytes(s.ShmSize); n > 0 {
		out.ShmMiB = manifest.Range{Min: n, Default: n, Max: n}
	}
	out.Accelerators = c.accelerators(name, s, reserved, main)
	return out
}

func orNone(r *types.Resource) types.Resource {
	if r == nil {
		return types.Resource{}
	}
	return *r
}

// sizes are what a service has for which the file says nothing.
type sizes struct{ least, main, mainMost, beside uint64 }

func bounds(least, limit uint64, otherwise sizes, main bool) manifest.Range {
	switch {
	case limit > 0:
		return manifest.Range{Min: cmp.Or(least, limit), Default: limit, Max: limit}
	case main:
		return manifest.Range{
			Min: cmp.Or(least, otherwise.least), Default: max(otherwise.main, least), Max: max(otherwise.mainMost, least),
		}
	}
	size := max(otherwise.beside, least)
	return manifest.Range{Min: size, Default: size, Max: size}
}

// accelerators are the devices that the main service asks for.
func (c *converter) accelerators(name string, s types.ServiceConfig, reserved types.Resource,
	main bool,
) manifest.Range {
	at, devices := []string{"services", name, "gpus"}, slices.Concat(s.Gpus, reserved.Devices)
	if len(s.Gpus) == 0 {
		at = []string{"services", name, "deploy", "resources", "reservations", "devices"}
	}
	switch {
	case len(devices) == 0:
		return manifest.Range{}
	case !main:
		c.refuse("belongs to the main service", "", at...)
	case len(devices) > 1:
		c.refuse("must be one request", "", at...)
	}
	d := devices[0]
	if driver := d.Driver; driver != "" && driver != manifest.AcceleratorNVIDIA && driver != manifest.AcceleratorAMD {
		c.refuse("must be of the driver nvidia or amd", "", append(at, "0")...)
	}
	switch n := int64(d.Count); {
	case n == -1 || n == 0:
		return manifest.Range{Min: 1, Default: 1, Max: manifest.MaxAccelerators}
	case n > 0 && n <= manifest.MaxAccelerators:
		return manifest.Range{Min: uint64(n), Default: uint64(n), Max: uint64(n)}
	}
	c.refuse("must be at most "+strconv.Itoa(manifest.MaxAccelerators), "", append(at, "0", "count")...)
	return manifest.Range{}
}

// vendor is that of the accelerators that a service asks for.
func (c *converter) vendor(s types.ServiceConfig) string {
	devices := s.Gpus
	if len(devices) == 0 && s.Deploy != nil {
		devices = orNone(s.Deploy.Resources.Reservations).Devices
	}
	if len(devices) > 0 && devices[0].Driver == manifest.AcceleratorAMD {
		return manifest.AcceleratorAMD
	}
	return manifest.AcceleratorNVIDIA
}
