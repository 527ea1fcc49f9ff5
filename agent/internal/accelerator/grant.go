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
}

func (g grant) id() string {
	if g.partition != "" {
		return g.partition
	}
	return g.accelerator.GetId()
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
					return s, grant{a, id}
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
	switch {
	case s != nil && g.accelerator.GetHealth() == protocol.HealthFaulty:
		return agent.AcceleratorFaulty
	case s != nil:
		return 0
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

// Edits are what a container needs to use these accelerators, and only these.
func (i *Inventory) Edits(ctx context.Context, ids []string) (cdi.Edits, error) {
	var all cdi.Edits
	bySource := map[*source][]grant{}
	for _, id := range ids {
		s, g, err := i.usable(id)
		if err != nil {
			return cdi.Edits{}, err
		}
		bySource[s] = append(bySource[s], g)
		all.Claims = append(all.Claims, g.claims()...)
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
