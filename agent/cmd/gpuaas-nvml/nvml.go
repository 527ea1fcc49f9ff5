//go:build cgo

package main

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/gpuaas/protocol"
)

// accelerators asks the driver; without one there are none. A library that is missing, as while a package replaces it,
// says nothing about the GPUs of the driver in the kernel, which go on.
func accelerators(root string) (found []*protocol.Accelerator, err error) {
	driver := library(root)
	switch code := driver.Init(); code {
	case nvml.SUCCESS:
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return nil, nil
	default:
		return nil, fmt.Errorf("start NVIDIA's driver: %w", code)
	}
	defer func() {
		if code := driver.Shutdown(); code != nvml.SUCCESS {
			err = errors.Join(err, code)
		}
	}()
	version, _ := driver.SystemGetDriverVersion()
	cuda, _ := driver.SystemGetCudaDriverVersion()
	count, code := driver.DeviceGetCount()
	if code != nvml.SUCCESS {
		return nil, fmt.Errorf("count the GPUs: %w", code)
	}
	ids, devices := map[string]string{}, map[string]device{}
	for index := range count {
		handle, code := driver.DeviceGetHandleByIndex(index)
		if code != nvml.SUCCESS {
			continue // fallen off the bus: the driver does not know any more which one it was
		}
		d := device{handle, driver.Extensions()}
		a, ok := d.identify()
		if !ok {
			continue
		}
		a.DriverVersion = version
		if cuda > 0 {
			a.RuntimeVersion = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
		}
		d.describe(a)
		found, devices[a.GetId()], ids[a.GetPciAddress()] = append(found, a), d, a.GetId()
	}
	for _, a := range found {
		a.Links = devices[a.GetId()].links(ids)
	}
	return found, nil
}

// device is a GPU, and what the loaded library can do: a function that an old one lacks would end the process.
type device struct {
	nvml.Device

	library nvml.ExtendedInterface
}

func (d device) offers(function string) bool { return d.library.LookupSymbol(function) == nil }

// identify returns the GPU with its stable id; false where the driver does not know it.
func (d device) identify() (*protocol.Accelerator, bool) {
	id, code := d.GetUUID()
	if code != nvml.SUCCESS {
		return nil, false
	}
	a := &protocol.Accelerator{Id: id, Vendor: protocol.VendorNVIDIA, Health: protocol.HealthOK}
	if pci, code := d.GetPciInfo(); code == nvml.SUCCESS {
		a.PciAddress = pciAddress(pci)
	}
	return a, true
}

// describe reads what does not depend on other GPUs. What the driver does not say stays empty.
func (d device) describe(a *protocol.Accelerator) {
	a.Model, _ = d.GetName()
	memory, code := d.GetMemoryInfo()
	switch a.MemoryBytes = memory.Total; code {
	case nvml.ERROR_GPU_IS_LOST:
		a.Health, a.HealthReason = protocol.HealthFaulty, "the driver has lost it"
		return
	case nvml.ERROR_RESET_REQUIRED:
		a.Health, a.HealthReason = protocol.HealthNeedsReset, "the driver asks for a reset"
		return
	default:
	}
	if d.offers("nvmlDeviceGetNumGpuCores") {
		cores, _ := d.GetNumGpuCores()
		a.Cores = uint32(cores)
	}
	a.Health, a.HealthReason = d.health()
	if health, reason := d.recoveryAction(); health != "" {
		a.Health, a.HealthReason = health, reason
	}
	a.Partitions = d.partitions()
}

// health judges the errors of the memory since the driver was loaded, whether it could replace the rows, and whether
// the hardware slows down because it is too hot.
func (d device) health() (health, reason string) {
	if d.offers("nvmlDeviceGetRemappedRows") {
		_, _, pending, failed, code := d.GetRemappedRows()
		switch {
		case code != nvml.SUCCESS:
		case failed:
			return protocol.HealthFaulty, "a row of its memory is broken and could not be replaced"
		case pending:
			return protocol.HealthDegraded, "a row of its memory is replaced at its next reset"
		}
	}
	errs, code := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	if code == nvml.SUCCESS && errs > 0 {
		return protocol.HealthDegraded, "its memory had errors that could not be corrected"
	}
	if d.offers("nvmlDeviceGetCurrentClocksEventReasons") {
		slow, code := d.GetCurrentClocksEventReasons()
		if code == nvml.SUCCESS && slow&nvml.ClocksThrottleReasonHwThermalSlowdown != 0 {
			return protocol.HealthDegraded, protocol.TooHot
		}
	}
	return protocol.HealthOK, ""
}

// recoveryAction says whether the driver asks for a reset, or for what no reset replaces; empty where it does not, or
// where an old driver does not say.
func (d device) recoveryAction() (health, reason string) {
	if !d.offers("nvmlDeviceGetFieldValues") {
		return "", ""
	}
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if code := d.GetFieldValues(values); code != nvml.SUCCESS || nvml.Return(values[0].NvmlReturn) != nvml.SUCCESS {
		return "", ""
	}
	switch nvml.DeviceGpuRecoveryAction(binary.NativeEndian.Uint32(values[0].Value[:4])) {
	case nvml.GPU_RECOVERY_ACTION_GPU_RESET, nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET, nvml.GPU_RECOVERY_ACTION_BUS_RESET:
		return protocol.HealthNeedsReset, "the driver asks for a reset"
	case nvml.GPU_RECOVERY_ACTION_NODE_REBOOT, nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:
		return protocol.HealthFaulty, "the driver asks for a reboot of the node"
	default:
		return "", ""
	}
}

// partitions are the MIG devices of the GPU.
func (d device) partitions() (found []*protocol.AcceleratorPartition) {
	if !d.offers("nvmlDeviceGetMigDeviceHandleByIndex") {
		return nil
	}
	if mode, _, code := d.GetMigMode(); code != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
		return nil
	}
	count, _ := d.GetMaxMigDeviceCount()
	for index := range count {
		part, code := d.GetMigDeviceHandleByIndex(index)
		if code != nvml.SUCCESS {
			continue // no device has this number
		}
		id, code := part.GetUUID()
		if code != nvml.SUCCESS {
			continue
		}
		name, _ := part.GetName() // NVIDIA H100 80GB HBM3 MIG 1g.10gb
		_, profile, _ := strings.Cut(name, " MIG ")
		memory, _ := part.GetMemoryInfo()
		found = append(found, &protocol.AcceleratorPartition{Id: id, Profile: profile, MemoryBytes: memory.Total})
	}
	slices.SortFunc(found, func(a, b *protocol.AcceleratorPartition) int { return cmp.Compare(a.GetId(), b.GetId()) })
	return found
}

// links counts the active NVLinks by what they lead to. ids has the GPUs by their PCI addresses.
func (d device) links(ids map[string]string) (found []*protocol.AcceleratorLink) {
	for link := range nvml.NVLINK_MAX_LINKS {
		state, code := d.GetNvLinkState(link)
		if code != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
			continue
		}
		to := &protocol.AcceleratorLink{Kind: protocol.LinkNVLink, Count: 1}
		if d.leadsToSwitch(link) {
			to.Kind = protocol.LinkNVSwitch
		} else if pci, code := d.GetNvLinkRemotePciInfo(link); code == nvml.SUCCESS {
			to.PeerId = ids[pciAddress(pci)]
		}
		if to.GetPeerId() == "" && to.GetKind() == protocol.LinkNVLink {
			continue // to a GPU that this machine does not see
		}
		same := func(l *protocol.AcceleratorLink) bool {
			return l.GetPeerId() == to.GetPeerId() && l.GetKind() == to.GetKind()
		}
		if n := slices.IndexFunc(found, same); n >= 0 {
			found[n].Count++
		} else {
			found = append(found, to)
		}
	}
	return found
}

func (d device) leadsToSwitch(link int) bool {
	if !d.offers("nvmlDeviceGetNvLinkRemoteDeviceType") {
		return false
	}
	kind, code := d.GetNvLinkRemoteDeviceType(link)
	return code == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH
}

// pciAddress writes an address as sysfs does.
func pciAddress(pci nvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device)
}
