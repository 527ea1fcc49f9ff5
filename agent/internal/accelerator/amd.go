package accelerator

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// amdDevices has one entry for each GPU that the kernel's amdgpu driver serves, named by PCI address.
	amdDevices = "sys/bus/pci/drivers/amdgpu"
	// kfdNodes has one entry for each processor, and for each GPU or partition that can compute.
	kfdNodes = "sys/class/kfd/kfd/topology/nodes"
	// kfdLinkXGMI is the type of an xGMI link (CRAT_IOLINK_TYPE_XGMI in the kernel's kfd_crat.h).
	kfdLinkXGMI = 11
	// kfdPartitionShift is the first bit of location_id that numbers the partition; those below 16 are bus, device and
	// function.
	kfdPartitionShift = 28
)

var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// amd reads what the amdgpu driver and its compute part, KFD, show in sysfs.
type amd struct{ machine machine }

// computeNode is one KFD node of a GPU: all of it, or one partition.
type computeNode struct {
	partition uint64
	// renderMinor is the device number of its render node, and part of the node's name.
	renderMinor uint64
	cores       uint64
	memoryBytes uint64
	// peers are the PCI addresses of the GPUs that xGMI links of the node lead to.
	peers []string
}

func (a *amd) scan(context.Context) ([]*protocol.Accelerator, error) {
	computes, ids := a.computeNodes(), map[string]string{}
	var found []*protocol.Accelerator
	for _, address := range a.entries(amdDevices) {
		if pciAddress.MatchString(address) {
			g := a.read(address, computes[address])
			found, ids[address] = append(found, g), g.GetId()
		}
	}
	for _, g := range found {
		links := map[string]bool{}
		for _, c := range computes[g.GetPciAddress()] {
			for _, peer := range c.peers {
				if id := ids[peer]; id != "" && id != g.GetId() && !links[id] {
					links[id] = true
					g.Links = append(g.Links, &protocol.AcceleratorLink{PeerId: id, Kind: protocol.LinkXGMI, Count: 1})
				}
			}
		}
		slices.SortFunc(g.GetLinks(), func(a, b *protocol.AcceleratorLink) int {
			return cmp.Compare(a.GetPeerId(), b.GetPeerId())
		})
	}
	return found, nil
}

// read describes the GPU at a PCI address.
func (a *amd) read(address string, computes []computeNode) *protocol.Accelerator {
	device := amdDevices + "/" + address
	text := func(name string) string { return a.machine.text(device + "/" + name) }
	g := &protocol.Accelerator{
		Id: address, Vendor: protocol.VendorAMD, PciAddress: address, NumaNode: a.machine.numaNode(address),
		Model:          cmp.Or(text("product_name"), amdModel(text("device"))),
		DriverVersion:  cmp.Or(a.machine.text("sys/module/amdgpu/version"), a.machine.text("proc/sys/kernel/osrelease")),
		RuntimeVersion: a.machine.text("opt/rocm/.info/version"),
	}
	g.Health, g.HealthReason = a.health(device)
	if unique := text("unique_id"); strings.Trim(unique, "0") != "" {
		g.Id = "GPU-" + unique
	}
	var err error
	if g.MemoryBytes, err = strconv.ParseUint(text("mem_info_vram_total"), 10, 64); err != nil {
		g.Health, g.HealthReason = protocol.HealthFaulty, "the driver does not know its memory"
	}
	if len(computes) == 0 { // as many GPUs for displays alone
		g.Health, g.HealthReason = protocol.HealthFaulty, "the kernel's compute driver does not serve it"
	}
	profile := text("current_compute_partition")
	if memory := text("current_memory_partition"); memory != "" {
		profile += "/" + memory
	}
	for _, c := range computes {
		g.Cores += uint32(c.cores)
		if len(computes) > 1 {
			g.Partitions = append(g.Partitions, &protocol.AcceleratorPartition{
				Id: partitionID(g.GetId(), c.partition), Profile: profile, MemoryBytes: c.memoryBytes,
			})
		}
	}
	return g
}

func partitionID(id string, partition uint64) string { return fmt.Sprintf("%s-%d", id, partition) }

// health judges the driver's error counters (RAS), which only GPUs for data centres have, and the temperatures.
func (a *amd) health(device string) (health, reason string) {
	for _, file := range a.entries(device + "/ras") {
		text := a.machine.text(device + "/ras/" + file)
		if strings.HasSuffix(file, "_err_count") && properties(text)["ue:"] > 0 {
			return protocol.HealthDegraded, strings.TrimSuffix(file, "_err_count") + " had errors that could not be corrected"
		}
		if file != "gpu_vram_bad_pages" {
			continue
		}
		for line := range strings.Lines(text) {
			// Address : size : R (replaced), P (not replaced yet) or F (cannot be replaced).
			if page := strings.Fields(line); len(page) > 0 && page[len(page)-1] != "R" {
				return protocol.HealthDegraded, "bad pages of its memory are not replaced yet"
			}
		}
	}
	if a.tooHot(device) {
		return protocol.HealthDegraded, protocol.TooHot
	}
	return protocol.HealthOK, ""
}

// tooHot says that a sensor of the GPU has reached the temperature at which the hardware slows down. Linux documents
// the files, in thousandths of a degree Celsius, in Documentation/gpu/amdgpu/thermal.rst.
func (a *amd) tooHot(device string) bool {
	for _, monitor := range a.entries(device + "/hwmon") {
		dir := device + "/hwmon/" + monitor
		for _, file := range a.entries(dir) {
			sensor, isLimit := strings.CutSuffix(file, "_crit")
			if !isLimit || !strings.HasPrefix(sensor, "temp") {
				continue
			}
			limit, err := strconv.ParseInt(a.machine.text(dir+"/"+file), 10, 64)
			now, errNow := strconv.ParseInt(a.machine.text(dir+"/"+sensor+"_input"), 10, 64)
			if err == nil && errNow == nil && limit > 0 && now >= limit {
				return true
			}
		}
	}
	return false
}

// computeNodes reads the topology of KFD, by the PCI addresses of the GPUs.
func (a *amd) computeNodes() map[string][]computeNode {
	addresses, nodes := map[string]string{}, map[string]computeNode{}
	for _, name := range a.entries(kfdNodes) {
		p := properties(a.machine.text(kfdNodes + "/" + name + "/properties"))
		if p["simd_count"] == 0 {
			continue // a processor
		}
		location := p["location_id"]
		addresses[name] = fmt.Sprintf("%04x:%02x:%02x.%x", p["domain"], location>>8&0xff, location>>3&0x1f, location&7)
		c := computeNode{
			partition: location >> kfdPartitionShift, renderMinor: p["drm_render_minor"],
			cores: p["simd_count"] / max(p["simd_per_cu"], 1),
		}
		for _, bank := range a.entries(kfdNodes + "/" + name + "/mem_banks") {
			c.memoryBytes += properties(a.machine.text(kfdNodes + "/" + name + "/mem_banks/" + bank +
				"/properties"))["size_in_bytes"]
		}
		nodes[name] = c
	}
	out := map[string][]computeNode{}
	for name, c := range nodes {
		for _, link := range a.entries(kfdNodes + "/" + name + "/io_links") {
			p := properties(a.machine.text(kfdNodes + "/" + name + "/io_links/" + link + "/properties"))
			if p["type"] == kfdLinkXGMI {
				c.peers = append(c.peers, addresses[strconv.FormatUint(p["node_to"], 10)])
			}
		}
		out[addresses[name]] = append(out[addresses[name]], c)
	}
	for _, of := range out {
		slices.SortFunc(of, func(a, b computeNode) int { return cmp.Compare(a.partition, b.partition) })
	}
	return out
}

// entries are the names in a directory, sorted; none where it cannot be read.
func (a *amd) entries(dir string) []string {
	list, _ := os.ReadDir(a.machine.path(dir))
	names := make([]string, 0, len(list))
	for _, e := range list {
		names = append(names, filepath.Base(e.Name()))
	}
	return names
}

// properties reads lines of a name and a number.
func properties(text string) map[string]uint64 {
	out := map[string]uint64{}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 2 {
			if n, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				out[f[0]] = n
			}
		}
	}
	return out
}

// amdModel names a GPU by its PCI device id, for those whose board does not say.
func amdModel(device string) string {
	switch device {
	case "0x738c":
		return "AMD Instinct MI100"
	case "0x7408":
		return "AMD Instinct MI250X"
	case "0x740c":
		return "AMD Instinct MI250"
	case "0x740f":
		return "AMD Instinct MI210"
	case "0x74a0":
		return "AMD Instinct MI300A"
	case "0x74a1", "0x74b5":
		return "AMD Instinct MI300X"
	case "0x74a5":
		return "AMD Instinct MI325X"
	case "0x75a0":
		return "AMD Instinct MI350X"
	case "0x75a3":
		return "AMD Instinct MI355X"
	case "0x744c":
		return "AMD Radeon RX 7900"
	case "0x7448":
		return "AMD Radeon Pro W7900"
	case "0x73bf":
		return "AMD Radeon RX 6800"
	}
	return "AMD GPU " + device
}
