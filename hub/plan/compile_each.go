package plan

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// LeftOut is a member that breaks a rule of its node's state.
type LeftOut struct {
	MemberID string
	Cause    error
	// Kept: the state has the member's last document; otherwise it has none.
	Kept bool
}

// CompileEach compiles the members of a snapshot that keep the rules, so that one that does not is no trouble for the
// others. In place of a member that breaks a rule its last document is used, if that keeps them; a member that is to be
// stopped is stopped in it. Of members that break a rule only together, the older is compiled.
func CompileEach(snap Snapshot, last map[string][]byte) (NodeState, []LeftOut, error) {
	if state, err := compileChecked(snap); err == nil {
		return state, nil, nil
	}
	f := partialState{
		snap: withGoodSSHKeys(snap), allocations: map[string]*allocationUse{}, given: map[string]bool{},
		seen: map[string]bool{}, ports: map[uint32]bool{},
	}
	for _, a := range snap.Allocations {
		f.allocations[a.ID] = newAllocationUse(a)
	}
	members := slices.Clone(snap.Members)
	slices.SortStableFunc(members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	var left []LeftOut
	for _, m := range members {
		part, err := compileMember(m)
		if err == nil {
			err = f.admit(m, part)
		}
		if err == nil {
			continue
		}
		out := LeftOut{MemberID: m.ID, Cause: err}
		if data := last[m.ID]; data != nil {
			out.Kept = f.admitLast(m, data) == nil
		}
		left = append(left, out)
	}
	state := NodeState{
		NodeID: snap.Node.ID, Parts: f.parts, Volumes: sortedVolumes(snap), SSHKeys: sortedSSHKeys(f.snap),
	}
	if err := Check(f.used(), state); err != nil {
		return NodeState{}, nil, err
	}
	return state, left, nil
}

func compileChecked(snap Snapshot) (NodeState, error) {
	state, err := Compile(snap)
	if err != nil {
		return NodeState{}, err
	}
	return state, Check(snap, state)
}

// partialState is a state to which members are added one at a time.
type partialState struct {
	snap        Snapshot
	allocations map[string]*allocationUse
	// given are the accelerators in use, seen the ids of the added members.
	given, seen map[string]bool
	// ports are the ports of the node in use.
	ports   map[uint32]bool
	members []Member
	parts   []Part
}

// admit adds a member's part, or returns the rules that it breaks.
func (f *partialState) admit(m Member, p Part) error {
	if f.seen[m.ID] {
		return Violations{{RuleDuplicateMember, m.ID}}
	}
	if len(f.parts) == protocol.MaxParts {
		return Violations{{RuleTooMany, f.snap.Node.ID}}
	}
	alone := Snapshot{Node: f.snap.Node, Members: []Member{m}, Volumes: f.snap.Volumes}
	u := f.allocations[p.Workload.GetAllocationId()]
	if u != nil {
		alone.Allocations = []Allocation{withAccelerators(u.allocation, acceleratorsOf(p.Workload))}
	}
	if err := Check(alone, NodeState{
		NodeID: f.snap.Node.ID, Parts: []Part{p}, Volumes: sortedVolumes(f.snap),
	}); err != nil {
		return err
	}
	next := *u
	next.addLarger(p.Workload.GetServices(), p.Workload.GetFallback().GetServices())
	if next.overfull() {
		return Violations{{RuleAllocationFull, u.allocation.ID}}
	}
	mine := acceleratorsOf(p.Workload)
	for id := range mine {
		if f.given[id] {
			return Violations{{RuleAcceleratorShared, id}}
		}
	}
	ports := hostPortsOf(p.Workload)
	if slices.ContainsFunc(ports, func(port uint32) bool { return f.ports[port] }) {
		return Violations{{RuleHostPortShared, m.ID}}
	}
	for id := range mine {
		f.given[id] = true
	}
	for _, port := range ports {
		f.ports[port] = true
	}
	*u = next
	f.seen[m.ID] = true
	f.members, f.parts = append(f.members, m), append(f.parts, p)
	return nil
}

// admitLast adds the member's last document, with the very bytes that the node has, but for a stop.
func (f *partialState) admitLast(m Member, data []byte) error {
	w := &protocol.Workload{}
	err := proto.Unmarshal(data, w)
	if err == nil && m.Stopped && !w.GetStopped() {
		w.Stopped, w.Fallback = true, nil
		data, err = proto.MarshalOptions{Deterministic: true}.Marshal(w)
	}
	if err != nil {
		return fmt.Errorf("member %s: %w", m.ID, err)
	}
	return f.admit(m, Part{ID: m.ID, Workload: w, Bytes: data, SHA256: sha256.Sum256(data)})
}

// used returns the part of the snapshot that the parts use.
func (f *partialState) used() Snapshot {
	out := Snapshot{Node: f.snap.Node, Members: f.members, Volumes: f.snap.Volumes}
	out.SSHKeys = f.snap.SSHKeys
	mine := map[string]map[string]bool{}
	for _, k := range out.SSHKeys {
		mine[k.GetAllocationId()] = map[string]bool{}
	}
	for _, p := range f.parts {
		id := p.Workload.GetAllocationId()
		if mine[id] == nil {
			mine[id] = map[string]bool{}
		}
		for accelerator := range acceleratorsOf(p.Workload) {
			mine[id][accelerator] = true
		}
	}
	for _, a := range f.snap.Allocations {
		if mine[a.ID] != nil {
			out.Allocations = append(out.Allocations, withAccelerators(a, mine[a.ID]))
		}
	}
	return out
}

// withAccelerators reduces an allocation to its used accelerators.
func withAccelerators(a Allocation, used map[string]bool) Allocation {
	a.AcceleratorIDs = slices.DeleteFunc(slices.Clone(a.AcceleratorIDs), func(id string) bool { return !used[id] })
	return a
}

func acceleratorsOf(w *protocol.Workload) map[string]bool {
	ids := map[string]bool{}
	for _, s := range slices.Concat(w.GetServices(), w.GetFallback().GetServices()) {
		for _, id := range s.GetResources().GetAcceleratorIds() {
			ids[id] = true
		}
	}
	return ids
}

// hostPortsOf returns the ports of the node that were chosen for a workload or its fallback.
func hostPortsOf(w *protocol.Workload) []uint32 {
	var ports []uint32
	for _, s := range slices.Concat(w.GetServices(), w.GetFallback().GetServices()) {
		for _, p := range s.GetPorts() {
			if p.GetHostPort() != 0 {
				ports = append(ports, p.GetHostPort())
			}
		}
	}
	return ports
}
