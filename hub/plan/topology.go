package plan

import (
	"cmp"
	"maps"
	"slices"
)

// Link joins an accelerator with another of its node, past the processor: NVLink, NVSwitch, xGMI.
type Link struct {
	// Peer is the id of the other accelerator; empty for a switch, which joins all that have links to it.
	Peer string
	// Count of parallel links.
	Count int
}

const (
	// linkAffinity is what one link is worth beside a common NUMA node, which is worth 1.
	linkAffinity = 16
	// maxLinks bounds the parallel links that count.
	maxLinks = 64
)

// chooseAccelerators chooses n accelerators of one model and memory: where the member has some already, more of those,
// else of the model that the fewest are free of. It returns none where no model has n.
func chooseAccelerators(accelerators []Accelerator, n int) []string {
	type kind struct {
		vendor, model string
		memoryBytes   uint64
	}
	groups := map[kind][]Accelerator{}
	for _, a := range accelerators {
		k := kind{a.Vendor, a.Model, a.MemoryBytes}
		groups[k] = append(groups[k], a)
	}
	mine := func(k kind) int {
		return len(slices.DeleteFunc(slices.Clone(groups[k]), func(a Accelerator) bool { return !a.Mine }))
	}
	kinds := slices.SortedFunc(maps.Keys(groups), func(a, b kind) int {
		return cmp.Or(cmp.Compare(mine(b), mine(a)), cmp.Compare(len(groups[a]), len(groups[b])),
			cmp.Compare(a.model, b.model), cmp.Compare(a.vendor, b.vendor), cmp.Compare(a.memoryBytes, b.memoryBytes))
	})
	for _, k := range kinds {
		if ids := closest(groups[k], n); len(ids) > 0 {
			return ids
		}
	}
	return nil
}

// closest chooses n of the accelerators, which are of one model, such that they reach each other over the most links
// and then through the fewest NUMA nodes; among equal sets the one that takes the least away from those that stay free,
// and then the first by id. A set grows from each accelerator by the one nearest to it, so it is exact for meshes,
// switches, pairs and rings, and not for every graph. Where the member has accelerators already, the set grows from
// those. It returns nil where there are not n.
func closest(accelerators []Accelerator, n int) []string {
	all := slices.SortedFunc(slices.Values(accelerators), func(a, b Accelerator) int { return cmp.Compare(a.ID, b.ID) })
	if len(all) < n || n == 0 {
		return nil
	}
	t := newTopology(all)
	seeds := make([][]int, 0, len(all))
	var mine []int
	for i, a := range all {
		seeds = append(seeds, []int{i})
		if a.Mine {
			mine = append(mine, i)
		}
	}
	pool := t.every()
	if len(mine) >= n {
		pool = mine
	} else if len(mine) > 0 {
		seeds = [][]int{mine}
	}
	var best set
	for _, seed := range seeds {
		if !slices.Contains(pool, seed[0]) {
			continue
		}
		if s := t.grow(seed, pool, n); best.members == nil || s.better(best) {
			best = s
		}
	}
	ids := make([]string, 0, n)
	for _, i := range best.members {
		ids = append(ids, all[i].ID)
	}
	slices.Sort(ids)
	return ids
}

// topology is the affinity of each pair of accelerators, and of each with all others.
type topology struct {
	pair  [][]int
	total []int
}

func newTopology(all []Accelerator) topology {
	t := topology{pair: make([][]int, len(all)), total: make([]int, len(all))}
	for i := range all {
		t.pair[i] = make([]int, len(all))
		for j := range all {
			if i != j {
				t.pair[i][j] = affinity(all[i], all[j])
				t.total[i] += t.pair[i][j]
			}
		}
	}
	return t
}

func (t topology) every() []int {
	all := make([]int, len(t.pair))
	for i := range all {
		all[i] = i
	}
	return all
}

// affinity counts the links between two accelerators, whichever of them reports them, and a common NUMA node.
func affinity(a, b Accelerator) int {
	direct := max(a.linksTo(b.ID), b.linksTo(a.ID))
	value := linkAffinity * min(max(direct, min(a.linksTo(""), b.linksTo(""))), maxLinks)
	if a.NUMANode != nil && b.NUMANode != nil && *a.NUMANode == *b.NUMANode {
		value++
	}
	return value
}

func (a Accelerator) linksTo(peer string) (count int) {
	for _, l := range a.Links {
		if l.Peer == peer {
			count += min(max(l.Count, 0), maxLinks)
		}
	}
	return count
}

// set is a choice of accelerators by their places, its affinity within and to those outside.
type set struct {
	members         []int
	inside, outside int
}

func (s set) better(than set) bool {
	return cmp.Or(cmp.Compare(than.inside, s.inside), cmp.Compare(s.outside, than.outside),
		slices.Compare(s.members, than.members)) < 0
}

func (t topology) grow(seed, pool []int, n int) set {
	var s set
	for _, i := range seed {
		s = t.with(s, i)
	}
	for len(s.members) < n {
		var best set
		for _, i := range pool {
			if slices.Contains(s.members, i) {
				continue
			}
			if next := t.with(s, i); best.members == nil || next.better(best) {
				best = next
			}
		}
		s = best
	}
	return s
}

// with adds an accelerator, keeping the members in order.
func (t topology) with(s set, i int) set {
	gained := 0
	for _, j := range s.members {
		gained += t.pair[i][j]
	}
	members := append(slices.Clone(s.members), i)
	slices.Sort(members)
	return set{members: members, inside: s.inside + gained, outside: s.outside + t.total[i] - 2*gained}
}
