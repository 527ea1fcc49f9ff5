package accelerator

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
)

const (
	kfdDevice  = "sys/class/kfd/kfd/dev"
	drmClass   = "sys/class/drm"
	renderNode = "renderD"
)

// edits gives the compute device that all GPUs share, and the render nodes of those that are granted. A process can
// compute only on GPUs whose render nodes its cgroup allows (amdkfd's kfd_devcgroup_check_permission), and does not see
// the others in the topology. ROCm's libraries are in the image: the driver is only in the kernel.
func (a *amd) edits(_ context.Context, granted []grant) (cdi.Edits, error) {
	computes := a.computeNodes()
	kfd, err := a.deviceNode("/dev/kfd", kfdDevice)
	if err != nil {
		return cdi.Edits{}, err
	}
	e := cdi.Edits{Nodes: []cdi.Node{kfd}}
	for _, g := range granted {
		found := false
		for _, c := range computes[g.accelerator.GetPciAddress()] {
			if g.partition != "" && g.partition != partitionID(g.accelerator.GetId(), c.partition) {
				continue
			}
			name := renderNode + strconv.FormatUint(c.renderMinor, 10)
			node, err := a.deviceNode("/dev/dri/"+name, drmClass+"/"+name+"/dev")
			if err != nil {
				return cdi.Edits{}, err
			}
			e.Nodes, found = append(e.Nodes, node), true
		}
		if !found {
			return cdi.Edits{}, fmt.Errorf("the kernel's compute driver does not serve accelerator %s", g.id())
		}
	}
	return e, nil
}

// deviceNode reads the numbers of a device from sysfs; what lies in the host's /dev may be older.
func (a *amd) deviceNode(path, numbers string) (cdi.Node, error) {
	text := a.machine.text(numbers)
	major, minor, _ := strings.Cut(text, ":")
	x, errX := strconv.ParseUint(major, 10, 32)
	y, errY := strconv.ParseUint(minor, 10, 32)
	if errX != nil || errY != nil {
		return cdi.Node{}, fmt.Errorf("%s names no device for %s: %q", numbers, path, text)
	}
	return cdi.Node{Path: path, Major: uint32(x), Minor: uint32(y)}, nil
}
