package plan

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// MaxServicesPerMember bounds the containers of one workload. A state over this limit, or over those of package
// protocol, is a violation, so that it never reaches a node that would have to refuse it.
const MaxServicesPerMember = 32

// Rule names what a violation broke.
type Rule string

// The rules of Check.
const (
	RuleWrongNode            Rule = "wrong_node"
	RuleBanned               Rule = "banned_node_runs_nothing"
	RuleDuplicateMember      Rule = "duplicate_member"
	RuleOrder                Rule = "parts_not_sorted"
	RuleMemberMissing        Rule = "member_missing"
	RuleMemberUnknown        Rule = "member_unknown"
	RuleBytes                Rule = "bytes_differ_from_workload"
	RuleRevision             Rule = "revision_missing"
	RuleEnvelope             Rule = "manifest_envelope_missing"
	RuleServices             Rule = "services_malformed"
	RuleFallback             Rule = "fallback_malformed"
	RuleImageDigest          Rule = "image_without_digest"
	RuleAllocationUnknown    Rule = "allocation_unknown"
	RuleAllocationForeign    Rule = "allocation_of_another_project"
	RuleAllocationFull       Rule = "allocation_overfull"
	RuleAcceleratorUnknown   Rule = "accelerator_unknown"
	RuleAcceleratorClaims    Rule = "accelerator_claimed_twice"
	RuleAcceleratorShared    Rule = "accelerator_given_twice"
	RuleAcceleratorOrgs      Rule = "accelerator_of_two_orgs"
	RuleAcceleratorUnclaimed Rule = "accelerator_not_in_allocation"
	RuleHostPortShared       Rule = "host_port_given_twice"
	RuleVolumeUnknown        Rule = "volume_unknown"
	RuleVolumeForeign        Rule = "volume_of_another_project"
	RuleVolumes              Rule = "volumes_differ"
	RuleSSHKeys              Rule = "ssh_keys_differ"
	RuleSSHAccountShared     Rule = "ssh_account_of_two_projects"
	RuleTooMany              Rule = "too_many"
	RuleTooLarge             Rule = "too_large"
)

// Violation is one broken rule; ID is the member, allocation or accelerator that broke it.
type Violation struct {
	Rule Rule
	ID   string
}

// Violations is the error that Check returns: all of them, in a fixed order.
type Violations []Violation

// Error lists the violations.
func (v Violations) Error() string {
	lines := make([]string, 0, len(v))
	for _, x := range v {
		lines = append(lines, fmt.Sprintf("%s %s", x.Rule, x.ID))
	}
	return "the planned state breaks " + strings.Join(lines, ", ")
}

// Check compares a compiled state with its snapshot, by other means than Compile used. A state that fails must not be
// signed; the node keeps its current one.
//
// Law 14 is checked here a second time, after the unique index on active claims: one accelerator has one claim and one
// member, every accelerator is the node's own, and a member is there once and fits into its allocation.
func Check(snap Snapshot, state NodeState) error {
	c := checker{snap: snap, state: state}
	c.wholeState()
	c.claims()
	c.parts()
	c.capacity()
	c.hostPorts()
	c.volumes()
	c.sshKeys()
	return c.err()
}

func (c *checker) err() error {
	if len(c.violations) > 0 {
		return c.violations
	}
	return nil
}

// CheckMember reports whether one member keeps the rules that do not depend on its node: its size, its services, its
// fallback.
func CheckMember(m Member) error {
	part, err := compileMember(m)
	if err != nil {
		return err
	}
	c := checker{state: NodeState{Parts: []Part{part}}}
	c.parts()
	return c.err()
}

type checker struct {
	snap       Snapshot
	state      NodeState
	violations Violations
}

func (c *checker) add(rule Rule, id string) {
	c.violations = append(c.violations, Violation{Rule: rule, ID: id})
}

func (c *checker) wholeState() {
	if c.state.NodeID == "" || c.state.NodeID != c.snap.Node.ID {
		c.add(RuleWrongNode, c.state.NodeID)
	}
	if c.snap.Node.Banned && len(c.state.Parts) > 0 {
		c.add(RuleBanned, c.state.NodeID)
	}
	if len(c.state.Parts) > protocol.MaxParts {
		c.add(RuleTooMany, c.state.NodeID)
	}
	for i := 1; i < len(c.state.Parts); i++ {
		if c.state.Parts[i].ID < c.state.Parts[i-1].ID {
			c.add(RuleOrder, c.state.Parts[i].ID)
		}
	}
	if c.snap.Node.Banned {
		return
	}
	want := map[string]bool{}
	for _, m := range c.snap.Members {
		if want[m.ID] {
			c.add(RuleDuplicateMember, m.ID)
		}
		want[m.ID] = true
	}
	have := map[string]bool{}
	for _, p := range c.state.Parts {
		if have[p.ID] {
			c.add(RuleDuplicateMember, p.ID)
		}
		if !want[p.ID] {
			c.add(RuleMemberUnknown, p.ID)
		}
		have[p.ID] = true
	}
	for _, m := range c.snap.Members {
		if !have[m.ID] {
			c.add(RuleMemberMissing, m.ID)
		}
	}
}

// claims checks that every allocation is on this node and that its accelerators exist and are its alone, and that one
// org has all slices of a GPU that no hardware keeps apart.
func (c *checker) claims() {
	exists := map[string]bool{}
	for _, id := range c.snap.Node.AcceleratorIDs {
		exists[id] = true
	}
	claimed, orgs := map[string]bool{}, map[string]string{}
	for _, a := range c.snap.Allocations {
		if a.NodeID != c.snap.Node.ID {
			c.add(RuleWrongNode, a.ID)
		}
		for _, id := range a.AcceleratorIDs {
			if !exists[id] {
				c.add(RuleAcceleratorUnknown, id)
			}
			if claimed[id] {
				c.add(RuleAcceleratorClaims, id)
			}
			claimed[id] = true
			gpu := c.snap.Node.OneOrg[id]
			if gpu == "" {
				continue
			}
			if org := orgs[gpu]; org != "" && org != a.OrgID {
				c.add(RuleAcceleratorOrgs, id)
			}
			orgs[gpu] = a.OrgID
		}
	}
}

func (c *checker) parts() {
	for _, p := range c.state.Parts {
		w := p.Workload
		if !bytesMatch(p) {
			c.add(RuleBytes, p.ID)
		}
		if len(p.Bytes) > protocol.MaxWorkloadBytes {
			c.add(RuleTooLarge, p.ID)
		}
		c.workload(p.ID, w)
		if back := w.GetFallback(); back != nil {
			c.fallback(w, back)
			c.workload(p.ID, back)
		}
	}
}

// fallback checks that a fallback is of the same member, and earlier.
func (c *checker) fallback(w, back *protocol.Workload) {
	same := back.GetId() == w.GetId() && back.GetInstanceId() == w.GetInstanceId() &&
		back.GetAllocationId() == w.GetAllocationId() &&
		back.GetOrgId() == w.GetOrgId() && back.GetProjectId() == w.GetProjectId() && back.GetAppSlug() == w.GetAppSlug()
	if !same || back.GetFallback() != nil || back.GetStopped() || w.GetStopped() || back.GetRevision() >= w.GetRevision() {
		c.add(RuleFallback, w.GetId())
	}
}

func (c *checker) workload(memberID string, w *protocol.Workload) {
	if w.GetRevision() == 0 {
		c.add(RuleRevision, memberID)
	}
	if len(w.GetManifest().GetPayload()) == 0 || len(w.GetManifest().GetSignatures()) == 0 {
		c.add(RuleEnvelope, memberID)
	}
	if d := w.GetDelegation(); d != nil && (len(d.GetPayload()) == 0 || len(d.GetSignatures()) == 0) {
		c.add(RuleEnvelope, memberID)
	}
	c.services(memberID, w.GetServices())
}

func (c *checker) services(memberID string, services []*protocol.Service) {
	if len(services) == 0 {
		c.add(RuleServices, memberID)
	}
	if len(services) > MaxServicesPerMember {
		c.add(RuleTooMany, memberID)
	}
	names := map[string]bool{}
	for _, s := range services {
		if s.GetName() == "" || names[s.GetName()] {
			c.add(RuleServices, memberID)
		}
		names[s.GetName()] = true
		if !pinned(s.Images()...) {
			c.add(RuleImageDigest, memberID)
		}
		if s.GetResources().GetCpuMillis() == 0 || s.GetResources().GetMemoryBytes() == 0 {
			c.add(RuleServices, memberID)
		}
	}
	for _, s := range services {
		for _, d := range s.GetDependsOn() {
			if !names[d.GetService()] || d.GetService() == s.GetName() {
				c.add(RuleServices, memberID)
			}
		}
	}
}

func bytesMatch(p Part) bool {
	if p.Workload == nil || p.Workload.GetId() != p.ID || p.SHA256 != sha256.Sum256(p.Bytes) {
		return false
	}
	w := &protocol.Workload{}
	return proto.Unmarshal(p.Bytes, w) == nil && proto.Equal(w, p.Workload)
}

// pinned reports whether each image is named by a repository and the digest of its manifest.
func pinned(images ...string) bool {
	return !slices.ContainsFunc(images, func(image string) bool {
		repository, digest, ok := strings.Cut(image, "@sha256:")
		return !ok || repository == "" || len(digest) != sha256.Size*2 || strings.Trim(digest, "0123456789abcdef") != ""
	})
}

// capacity checks that the members of an allocation fit into it together, and that none share an accelerator.
func (c *checker) capacity() {
	allocations := map[string]*allocationUse{}
	for _, a := range c.snap.Allocations {
		if allocations[a.ID] != nil {
			c.add(RuleAllocationUnknown, a.ID)
		}
		allocations[a.ID] = newAllocationUse(a)
	}
	given := map[string]bool{}
	for _, p := range c.state.Parts {
		w := p.Workload
		u := allocations[w.GetAllocationId()]
		if u == nil {
			c.add(RuleAllocationUnknown, p.ID)
			continue
		}
		lent := u.allocation.Platform && w.GetOperatingMode() == manifest.PlatformManaged
		if !lent && (u.allocation.OrgID != w.GetOrgId() || u.allocation.ProjectID != w.GetProjectId()) {
			c.add(RuleAllocationForeign, p.ID)
		}
		c.accelerators(w, u, given)
		u.addLarger(w.GetServices(), w.GetFallback().GetServices())
	}
	for _, a := range c.snap.Allocations {
		if allocations[a.ID].overfull() {
			c.add(RuleAllocationFull, a.ID)
		}
	}
}

// hostPorts checks that no two members have the same port of the node.
func (c *checker) hostPorts() {
	member := map[uint32]string{}
	for _, p := range c.state.Parts {
		for _, port := range hostPortsOf(p.Workload) {
			if other := member[port]; other != "" && other != p.ID {
				c.add(RuleHostPortShared, p.ID)
			}
			member[port] = p.ID
		}
	}
}

// volumes checks that the state names the node's volumes, and that each mount is of one that its project has.
func (c *checker) volumes() {
	known := map[string]*protocol.ProjectVolume{}
	for _, v := range c.snap.Volumes {
		known[v.GetId()] = v
	}
	if !c.snap.Node.Banned && len(known) != len(c.state.Volumes) {
		c.add(RuleVolumes, c.state.NodeID)
	}
	if len(c.state.Volumes) > protocol.MaxVolumes {
		c.add(RuleTooMany, c.state.NodeID)
	}
	for _, v := range c.state.Volumes {
		if !proto.Equal(v, known[v.GetId()]) {
			c.add(RuleVolumes, v.GetId())
		}
	}
	for _, p := range c.state.Parts {
		for _, s := range slices.Concat(p.Workload.GetServices(), p.Workload.GetFallback().GetServices()) {
			for _, mount := range s.GetVolumes() {
				v := known[mount.GetVolumeId()]
				switch {
				case mount.GetVolumeId() == "":
				case v == nil || v.GetDeleted():
					c.add(RuleVolumeUnknown, p.ID)
				case v.GetProjectId() != p.Workload.GetProjectId():
					c.add(RuleVolumeForeign, p.ID)
				}
			}
		}
	}
}

// accelerators checks that those of a member are its allocation's, and of no other service. A revision is released
// before the other is acquired: both may have the same, and together they take what the larger takes.
func (c *checker) accelerators(w *protocol.Workload, u *allocationUse, given map[string]bool) {
	mine := map[string]bool{}
	for _, services := range [][]*protocol.Service{w.GetServices(), w.GetFallback().GetServices()} {
		revision := map[string]bool{}
		for _, s := range services {
			for _, id := range s.GetResources().GetAcceleratorIds() {
				if !u.accelerators[id] {
					c.add(RuleAcceleratorUnclaimed, id)
				}
				if c.snap.Node.OneOrg[id] != "" && u.allocation.OrgID != w.GetOrgId() {
					c.add(RuleAcceleratorOrgs, id)
				}
				if revision[id] || given[id] && !mine[id] {
					c.add(RuleAcceleratorShared, id)
				}
				revision[id] = true
			}
		}
		for id := range revision {
			mine[id], given[id] = true, true
		}
	}
}

type allocationUse struct {
	allocation   Allocation
	accelerators map[string]bool
	cpuMillis    uint64
	memoryBytes  uint64
	overflowed   bool
}

func newAllocationUse(a Allocation) *allocationUse {
	u := &allocationUse{allocation: a, accelerators: map[string]bool{}}
	for _, id := range a.AcceleratorIDs {
		u.accelerators[id] = true
	}
	return u
}

func (u *allocationUse) addLarger(a, b []*protocol.Service) {
	cpuA, memoryA := u.sum(a)
	cpuB, memoryB := u.sum(b)
	before := u.memoryBytes
	u.cpuMillis += max(cpuA, cpuB)
	u.memoryBytes += max(memoryA, memoryB)
	u.overflowed = u.overflowed || u.memoryBytes < before
}

func (u *allocationUse) sum(services []*protocol.Service) (cpuMillis, memoryBytes uint64) {
	for _, s := range services {
		if s.GetEnvironment().GetBuilds() {
			continue // it runs before the service that it builds for
		}
		cpuMillis += uint64(s.GetResources().GetCpuMillis())
		before := memoryBytes
		memoryBytes += s.GetResources().GetMemoryBytes()
		u.overflowed = u.overflowed || memoryBytes < before
	}
	return cpuMillis, memoryBytes
}

func (u *allocationUse) overfull() bool {
	return u.overflowed || exceeds(u.cpuMillis, u.allocation.CPUMillis) || exceeds(u.memoryBytes, u.allocation.MemoryBytes)
}

func exceeds(used uint64, have int64) bool {
	return have < 0 && used > 0 || have >= 0 && used > uint64(have)
}
