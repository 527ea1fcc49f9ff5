package accelerator

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// grant is an accelerator that a container gets: all of it, or one partition.
type grant struct {
	accelerator *protocol.Accelerator
	// partition is the partition's id; empty for all of the accelerator.
	partition string
	// sharing is how this slice of a GPU is shared; empty for what the container has to itself.
	sharing string
}

func (g grant) id() string {
	if g.partition != "" {
		return g.partition
	}
	return g.accelerator.GetId()
}

// device is the id under which the driver knows what the container gets.
func (g grant) device() string {
	if g.sharing != "" {
		return g.accelerator.GetId()
	}
	return g.id()
}

// shared is the GPU of which others of the org may have parts: a slice, or a partition that AMD's driver keeps apart.
func (g grant) shared() []cdi.Slice {
	if g.partition == "" || g.sharing == "" && g.accelerator.GetVendor() == protocol.VendorNVIDIA {
		return nil
	}
	return []cdi.Slice{{Accelerator: g.accelerator.GetId(), Sharing: g.sharing}}
}

// claims are the ids that the container holds alone. Whole and part exclude each other.
func (g grant) claims() []string {
	ids := []string{g.id()}
	if g.partition == "" {
		for _, p := range g.accelerator.GetPartitions() {
			ids = append(ids, p.GetId())
		}
	}
	return ids
}

// find returns the accelerator or partition of this id, with its driver; nil where none that answers names it.
func (i *Inventory) find(id string) (*source, grant) {
	for _, s := range i.sources {
		for _, a := range s.found {
			if a.GetId() == id {
				return s, grant{accelerator: a}
			}
			for _, p := range a.GetPartitions() {
				if p.GetId() == id {
					return s, grant{a, id, p.GetSharing()}
				}
			}
		}
	}
	return nil, grant{}
}

// State says why the accelerator of this id cannot be used; zero where it can.
func (i *Inventory) State(id string) agent.AcceleratorState {
	i.mu.Lock()
	defer i.mu.Unlock()
	s, g := i.find(id)
	if s != nil {
		state := stateOf(i.withLadder(g.accelerator).GetHealth())
		if gpu := g.accelerator.GetId(); state == 0 && g.hasMPS() && i.ladder.used[gpu] && !i.mps.lives(gpu) {
			return agent.AcceleratorWithoutMPS
		}
		return state
	}
	state := agent.AcceleratorMissing
	for _, s := range i.sources {
		select {
		case <-s.scanned:
			if s.err != nil {
				state = min(state, agent.AcceleratorUnanswered)
			}
		default:
			state = agent.AcceleratorAwaited
		}
	}
	return state
}

func stateOf(health string) agent.AcceleratorState {
	switch health {
	case protocol.HealthFaulty:
		return agent.AcceleratorFaulty
	case protocol.HealthNeedsReset:
		return agent.AcceleratorNeedsReset
	case protocol.HealthTesting:
		return agent.AcceleratorTesting
	case protocol.HealthQuarantined:
		return agent.AcceleratorQuarantined
	}
	return 0
}

// Edits are what a container of an org needs to use these accelerators, and only these.
func (i *Inventory) Edits(ctx context.Context, ids []string, orgID string) (cdi.Edits, error) {
	var all cdi.Edits
	bySource := map[*source][]grant{}
	for _, id := range ids {
		s, g, err := i.usable(id)
		if err != nil {
			return cdi.Edits{}, err
		}
		bySource[s] = append(bySource[s], g)
		all.Claims, all.Shared = append(all.Claims, g.claims()...), append(all.Shared, g.shared()...)
	}
	for _, s := range i.sources {
		if len(bySource[s]) == 0 {
			continue
		}
		edits, err := s.edits(ctx, bySource[s])
		if err == nil {
			err = edits.Check()
		}
		if err != nil {
			return cdi.Edits{}, unusable("The driver of "+s.vendor+" does not say how a container uses its accelerators.", err)
		}
		all = all.Merge(edits)
	}
	for _, granted := range bySource {
		for _, g := range granted {
			if !g.hasMPS() {
				continue
			}
			i.mu.Lock()
			used := i.ladder.used[g.accelerator.GetId()]
			i.mu.Unlock()
			mps, err := i.mps.give(ctx, g, orgID, used, len(i.List()))
			if err != nil {
				return cdi.Edits{}, unusable("NVIDIA's MPS does not serve the GPU.", err)
			}
			all.MPS = mps
		}
	}
	slices.Sort(all.Claims)
	if len(slices.Compact(slices.Clone(all.Claims))) < len(all.Claims) {
		return cdi.Edits{}, unusable("An accelerator is named twice, or whole and in part.", nil)
	}
	return all, nil
}

// usable returns the accelerator of this id, or why no container can get it.
func (i *Inventory) usable(id string) (*source, grant, error) {
	state := i.State(id)
	i.mu.Lock()
	defer i.mu.Unlock()
	s, g := i.find(id)
	if state != 0 || s == nil {
		return nil, grant{}, unusable("An accelerator cannot be used: "+state.Detail(id)+".", nil)
	}
	return s, g, nil
}

func unusable(public string, cause error) error {
	return fault.New(fault.Unavailable, agent.CodeAcceleratorUnusable, public, cause)
}
