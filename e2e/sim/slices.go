package sim

import (
	"fmt"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// sharingOrgs are the orgs that ask for slices: few, so that they meet on a GPU.
const sharingOrgs = 2

// install puts a GPU into the machine. In some worlds its owner shares it: then its slices are the accelerators, and
// gpus has the GPU of each.
func (n *node) install(gpu string) {
	if n.w.cfg.Shared == 0 || !n.w.chance(n.w.cfg.Shared) {
		n.accelerators = append(n.accelerators, gpu)
		return
	}
	sharing, slices := n.w.drawSharing()
	for k := range slices {
		id := protocol.SliceID(gpu, sharing, slices, k)
		n.accelerators = append(n.accelerators, id)
		n.gpus[id] = gpu
	}
}

func (w *World) drawSharing() (sharing string, slices int) {
	return []string{protocol.SharingMPS, protocol.SharingTimeSlices}[w.rng.IntN(2)], 2 + 2*w.rng.IntN(2)
}

func sliceModel(sharing string, slices int) string {
	return fmt.Sprintf("GPU 1/%d %s", slices, sharing)
}

// sliceOf makes the need one of an instance that has a slice of a shared GPU.
func (w *World) sliceOf(need plan.Need) plan.Need {
	sharing, slices := w.drawSharing()
	need.Accelerators, need.AcceleratorModel, need.Sharing = 1, sliceModel(sharing, slices), sharing
	need.Variant = manifest.Variant{Name: "any", Accelerator: manifest.AcceleratorNVIDIA}
	return need
}

// unclaimed returns the accelerators that an org may claim: a slice only while no other org has one of the same GPU.
func (r *nodeRow) unclaimed(org int, anyOrg bool) (free []plan.Accelerator) {
	for _, id := range r.accelerators {
		if r.claims[id] != "" || !anyOrg && r.neighbour(org, id) != "" {
			continue
		}
		a := plan.Accelerator{ID: id, Vendor: manifest.AcceleratorNVIDIA, Healthy: true, PartOf: r.gpus[id]}
		if _, sharing, slices := protocol.SliceOf(id); slices > 0 {
			a.Model, a.Sharing = sliceModel(sharing, slices), sharing
		}
		free = append(free, a)
	}
	return free
}

// neighbour returns a member of another org that has a claim on the GPU of a slice; empty where there is none.
func (r *nodeRow) neighbour(org int, slice string) string {
	gpu := r.gpus[slice]
	if gpu == "" {
		return ""
	}
	for _, id := range r.accelerators {
		if m := r.member(r.claims[id]); r.gpus[id] == gpu && m != nil && m.org != org {
			return m.id
		}
	}
	return ""
}

// sharingOf is how the GPU is shared of which one of the accelerators is a slice; empty where none is.
func sharingOf(accelerators []string) (sharing string) {
	for _, id := range accelerators {
		_, sharing, _ = protocol.SliceOf(id)
	}
	return sharing
}

// errInUse is the runtime's refusal of a container that would have a slice of a GPU beside one of another org.
func errInUse() error {
	return fault.New(fault.Conflict, agent.CodeAcceleratorInUse, "Another org has a slice of the GPU.", nil)
}

// beside returns a container of another org that has a slice of a GPU of which this one has one, too.
func (n *node) beside(c *container, others []*container) *container {
	for _, other := range others {
		if other == c || other.org == c.org {
			continue
		}
		for _, mine := range c.AcceleratorIDs {
			for _, theirs := range other.AcceleratorIDs {
				if gpu := n.gpus[mine]; gpu != "" && gpu == n.gpus[theirs] {
					return other
				}
			}
		}
	}
	return nil
}
