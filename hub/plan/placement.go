package plan

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Need is the capacity that an allocation or an instance needs.
type Need struct {
	CPUMillis    int64
	MemoryBytes  int64
	Accelerators int
	// AcceleratorModel narrows the choice; empty: any.
	AcceleratorModel string
	// Sharing is how an instance shares its accelerator, one of protocol's; empty: it has its accelerators to itself.
	Sharing string
	// Variant is the image that the accelerators must suit; the zero value is no image and suits all.
	Variant manifest.Variant
	// Whole asks for everything on an otherwise empty node (baremetal); the quantities are then lower bounds.
	Whole bool
	// Shapes are the capacity shapes that will do; none: any.
	Shapes []string
	// Features are what a node must know to run the version.
	Features []string
	// HostPorts are ports of the node; one of 0 is the node's choice.
	HostPorts []uint32
}

// Candidate is a node or an allocation with its free capacity.
type Candidate struct {
	// ID of the node or the allocation.
	ID string
	// Usable is false where nothing new may be placed: a node that is not online, an allocation that is not active.
	Usable bool
	// Empty is true where nothing is placed yet.
	Empty bool
	// Shape of an allocation; empty for a node.
	Shape        string
	CPUMillis    int64
	MemoryBytes  int64
	Accelerators []Accelerator
	// Features are those of the node's agent.
	Features  []string
	HostPorts HostPorts
}

// HostPorts are the ports of a node that tenants may choose: those within Allowed that are not Taken.
type HostPorts struct {
	// Allowed is nil where the node's owner lets tenants choose none.
	Allowed *protocol.PortRange
	Taken   []uint32
}

// Refuses says why a port cannot be chosen; empty where it can.
func (h HostPorts) Refuses(port uint32) string {
	switch {
	case port == 0:
	case h.Allowed == nil:
		return "the owner of the node lets nobody choose a port"
	case port < h.Allowed.GetFirst() || port > h.Allowed.GetLast():
		return fmt.Sprintf("must lie between %d and %d on this node", h.Allowed.GetFirst(), h.Allowed.GetLast())
	case slices.Contains(h.Taken, port):
		return "is in use on this node"
	}
	return ""
}

// Accelerator is one that is free.
type Accelerator struct {
	ID            string
	Vendor        string
	Model         string
	MemoryBytes   uint64
	DriverVersion string
	// NUMANode is nil where the node does not say.
	NUMANode *int
	Links    []Link
	// PartOf is the id of the accelerator that this is a partition of; empty for a whole one.
	PartOf string
	// Sharing is how this slice of a GPU is shared; empty where hardware keeps it apart.
	Sharing string
	// Healthy is false for one that must not be assigned.
	Healthy bool
	// Mine is true for one that the member has whose need it is; it is chosen before others.
	Mine bool
}

// Choice is a node or allocation, what is used of it, and the accelerators, sorted.
type Choice struct {
	ID             string
	Need           Need
	AcceleratorIDs []string
}

// Needs returns what an instance of a version may use, in the order of preference: with accelerators of a vendor that
// the version has an image for, and without any where it can do so. What is not chosen is the version's default;
// manifest.CheckChoice has accepted the rest. A need for more accelerators than maxAccelerators is left out; 0 is no
// limit.
func Needs(m manifest.Manifest, chosen manifest.Choice, maxAccelerators int) []Need {
	c := m.Version.Compatibility
	cpuMillis, memoryMiB := m.Demand(chosen)
	base := Need{
		CPUMillis:   int64(cpuMillis),
		MemoryBytes: int64(memoryMiB) << 20,
		Shapes:      c.RequiresCapacityShape,
		Features:    m.FeaturesFor(chosen),
		HostPorts:   chosen.HostPorts(),
	}
	count, none := int(m.AcceleratorBounds().Default), chosen.AcceleratorModel+chosen.AcceleratorSharing == ""
	if chosen.Accelerators != nil {
		count, none = *chosen.Accelerators, *chosen.Accelerators == 0
	}
	if c.RequiresExclusiveNode {
		base.Shapes = []string{ShapeBaremetal}
	}
	var needs []Need
	for _, vendor := range c.SupportedAccelerators {
		if vendor == manifest.AcceleratorNone || count == 0 || maxAccelerators > 0 && count > maxAccelerators {
			continue
		}
		need := base
		need.AcceleratorModel, need.Accelerators, need.Sharing = chosen.AcceleratorModel, count, chosen.AcceleratorSharing
		needs = append(needs, need.withEachVariant(m, vendor)...)
	}
	if none && c.MinGPUCount == 0 && slices.Contains(c.SupportedAccelerators, manifest.AcceleratorNone) {
		needs = append(needs, base.withEachVariant(m, manifest.AcceleratorNone)...)
	}
	return needs
}

// withEachVariant returns the need once for each image that the version has for the vendor.
func (n Need) withEachVariant(m manifest.Manifest, vendor string) (needs []Need) {
	for _, v := range m.Version.RuntimeProfile.MainService().ImageVariants {
		if v.Accelerator == vendor {
			n.Variant = v
			needs = append(needs, n)
		}
	}
	return needs
}

// The shapes that capacity is sold in.
const (
	ShapeBaremetal = "baremetal"
	ShapeGPUSlice  = "gpu_slice"
)

// Misfit says why a need does not fit a candidate.
type Misfit string

// Why a need does not fit, in the order in which it is asked; Fits where it does.
const (
	Fits Misfit = ""
	// NotUsable: nothing new may be placed there.
	NotUsable Misfit = "not_usable"
	// NotEmpty: the need is for the whole node, and something runs there.
	NotEmpty Misfit = "not_empty"
	// WrongShape: the version does not run in capacity of this shape.
	WrongShape Misfit = "wrong_shape"
	// LacksFeature: the node's agent does not know something that the version uses.
	LacksFeature Misfit = "feature_missing"
	// LacksCPU, LacksMemory and LacksAccelerators: not enough is free.
	LacksCPU    Misfit = "insufficient_cpu"
	LacksMemory Misfit = "insufficient_memory"
	// LacksPort: a port of the node is in use, or its owner lets nobody choose it.
	LacksPort         Misfit = "port_unavailable"
	LacksAccelerators Misfit = "insufficient_accelerators"
	// SharedOtherwise: enough accelerators are free, shared in another way than the instance's Sharing.
	SharedOtherwise Misfit = "accelerators_shared_otherwise"
	// NotEntitled: the version needs more accelerators than the project may use.
	NotEntitled Misfit = "not_entitled"
	// VolumeElsewhere: another node keeps a volume that the instance is to have.
	VolumeElsewhere Misfit = "volume_on_another_node"
)

// FirstFit returns the choice for the first need that fits the candidate; where none does, that it lacks only another
// way of sharing, or else why the last one does not fit.
func FirstFit(needs []Need, candidate Candidate) (c Choice, misfit Misfit) {
	otherwise := false
	for _, need := range needs {
		if c, misfit = Fit(need, candidate); misfit == Fits {
			return c, Fits
		}
		otherwise = otherwise || misfit == SharedOtherwise
	}
	if otherwise {
		return Choice{}, SharedOtherwise
	}
	return c, misfit
}

// SharingThatFits returns the way to share an accelerator with which one of the needs would fit the candidate, one of
// protocol's or empty for not at all; ok is false where that is not what they lack.
func SharingThatFits(needs []Need, candidate Candidate) (sharing string, ok bool) {
	for _, need := range needs {
		if _, misfit := Fit(need, candidate); misfit == SharedOtherwise {
			return need.otherSharing(candidate)
		}
	}
	return "", false
}

// Fit returns the accelerators of the candidate that the need would use, or why it does not fit.
func Fit(need Need, candidate Candidate) (Choice, Misfit) {
	switch {
	case !candidate.Usable:
		return Choice{}, NotUsable
	case need.Whole && !candidate.Empty:
		return Choice{}, NotEmpty
	case len(need.Shapes) > 0 && !slices.Contains(need.Shapes, candidate.Shape):
		return Choice{}, WrongShape
	case len(MissingFeatures(need.Features, candidate.Features)) > 0:
		return Choice{}, LacksFeature
	case need.CPUMillis > candidate.CPUMillis:
		return Choice{}, LacksCPU
	case need.MemoryBytes > candidate.MemoryBytes:
		return Choice{}, LacksMemory
	case slices.ContainsFunc(need.HostPorts, func(p uint32) bool { return candidate.HostPorts.Refuses(p) != "" }):
		return Choice{}, LacksPort
	}
	if need.Whole {
		if len(matching(need, candidate)) < need.Accelerators {
			return Choice{}, LacksAccelerators
		}
		// With the unhealthy accelerators: no one else may use them, and they may recover.
		return Choice{ID: candidate.ID, Need: need, AcceleratorIDs: allIDs(candidate.Accelerators)}, Fits
	}
	ids := need.choose(candidate)
	if len(ids) < need.Accelerators {
		if _, ok := need.otherSharing(candidate); ok {
			return Choice{}, SharedOtherwise
		}
		return Choice{}, LacksAccelerators
	}
	return Choice{ID: candidate.ID, Need: need, AcceleratorIDs: ids}, Fits
}

// choose returns the accelerators of the candidate that the need would use; none where there are not enough.
func (n Need) choose(candidate Candidate) []string {
	suitable := matching(n, candidate)
	ids := chooseAccelerators(suitable, n.Accelerators)
	if ids == nil && n.Variant.Name == "" {
		// An allocation may hold several instances: only those need accelerators of one model.
		ids = closest(suitable, n.Accelerators)
	}
	return ids
}

// otherSharing returns a way to share with which the candidate has enough accelerators; ok is false where there is
// none.
func (n Need) otherSharing(candidate Candidate) (sharing string, ok bool) {
	for _, n.Sharing = range []string{"", protocol.SharingMPS, protocol.SharingTimeSlices} {
		if len(n.choose(candidate)) == n.Accelerators {
			return n.Sharing, true
		}
	}
	return "", false
}

// matching returns the accelerators that the need may use. A partition of a node's accelerator is given only by the
// name of its model: who asks for an accelerator expects a whole one. An instance gets a slice of a shared GPU only
// where it asks for that.
func matching(need Need, candidate Candidate) (out []Accelerator) {
	for _, a := range candidate.Accelerators {
		v := need.Variant
		if a.Healthy && matches(need.AcceleratorModel, a.Model) &&
			(a.PartOf == "" || need.AcceleratorModel != "" || candidate.Shape != "") && !need.wantsTooManyOf(a) &&
			(v.Name == "" || need.Sharing == a.Sharing) &&
			(v.Name == "" || v.Accelerator == a.Vendor && v.Suits(a.Model, a.MemoryBytes, a.DriverVersion)) {
			out = append(out, a)
		}
	}
	return out
}

// wantsTooManyOf reports whether an instance could not use as many accelerators like this one: of several MIG instances
// CUDA sees only the first (NVIDIA Multi-Instance GPU User Guide, CUDA device enumeration).
func (n Need) wantsTooManyOf(a Accelerator) bool {
	return n.Variant.Name != "" && n.Accelerators > 1 && a.PartOf != "" && a.Vendor == manifest.AcceleratorNVIDIA
}

// MissingFeatures returns which of the features an agent lacks.
func MissingFeatures(need, have []string) []string {
	return slices.DeleteFunc(slices.Clone(need), func(f string) bool { return slices.Contains(have, f) })
}

// Fitting returns every candidate that the need fits, the tightest first, so that large gaps stay for large needs;
// equal ones in the order of their ids.
func Fitting(need Need, candidates []Candidate) []Choice {
	type fit struct {
		choice Choice
		at     Candidate
	}
	var fits []fit
	for _, r := range candidates {
		if c, misfit := Fit(need, r); misfit == Fits {
			fits = append(fits, fit{c, r})
		}
	}
	slices.SortFunc(fits, func(a, b fit) int {
		return cmp.Or(
			cmp.Compare(len(a.at.Accelerators), len(b.at.Accelerators)),
			cmp.Compare(a.at.CPUMillis, b.at.CPUMillis),
			cmp.Compare(a.at.MemoryBytes, b.at.MemoryBytes),
			cmp.Compare(a.at.ID, b.at.ID),
		)
	})
	choices := make([]Choice, 0, len(fits))
	for _, f := range fits {
		choices = append(choices, f.choice)
	}
	return choices
}

func matches(want, have string) bool { return want == "" || want == have }

func allIDs(accelerators []Accelerator) []string {
	ids := make([]string, 0, len(accelerators))
	for _, a := range accelerators {
		ids = append(ids, a.ID)
	}
	slices.Sort(ids)
	return ids
}
