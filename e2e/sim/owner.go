package sim

import (
	"slices"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// admitted is what a node has decided about a document, under a bundle and the owner's policy of that moment.
type admitted struct {
	bundle, rules uint64
	workload      agent.Workload
}

// admissions are a node's decisions and its owner's policy, in worlds with versions.
type admissions struct {
	policy policy.Policy
	// rules counts changes of the policy.
	rules uint64
	// since is when they were changed last.
	since     instant
	decided   map[nodestore.Sum]admitted
	manifests manifest.Parsed
}

// desired is the accepted state as agent.Diff takes it, with the decision of publisher, agent and owner on each
// document (agent/internal/reconcile's desiredState).
func (n *node) desired() agent.Desired {
	if !n.w.cfg.Versions {
		return n.store.Desired()
	}
	s, bundle := n.store, n.store.Bundle
	d := agent.Desired{Epoch: s.State.GetEpoch(), Generation: s.State.GetGeneration(), Unverified: s.State == nil}
	a := &n.admissions
	if a.decided == nil || len(a.decided) > 4*len(s.State.GetParts())+64 {
		a.decided, a.manifests = map[nodestore.Sum]admitted{}, manifest.Parsed{}
	}
	for _, ref := range s.State.GetParts() {
		sum := nodestore.Sum(ref.GetSha256())
		p, there := s.Parts[sum]
		if !there {
			d.Missing = append(d.Missing, agent.MissingPart{MemberID: ref.GetId(), SHA256: sum})
			continue
		}
		decided, known := a.decided[sum]
		if !known || decided.bundle != bundle.Version() || decided.rules != a.rules {
			decided = admitted{bundle.Version(), a.rules, n.admit(ref.GetId(), p.Document, bundle)}
			a.decided[sum] = decided
		}
		d.Workloads = append(d.Workloads, decided.workload)
	}
	return d
}

func (n *node) admit(memberID string, w *protocol.Workload, bundle protocol.Bundle) agent.Workload {
	a := &n.admissions
	owner := a.policy
	if n.w.breaks(BreakOwner) {
		owner = policy.Policy{}
	}
	v := admission.Admit(w, []protocol.Bundle{bundle}, n.store.State.GetIssuedAt().AsTime(), a.manifests)
	if n.w.breaks(BreakManifest) {
		v.Admitted, v.FallbackAdmitted = true, true
	}
	return v.Workload(memberID, w, owner)
}

// workload is what the node is to run of a member, which is its fallback once it has gone back to that.
func (n *node) workload(memberID string) (agent.Workload, bool) {
	all := n.desired().Workloads
	i := slices.IndexFunc(all, func(w agent.Workload) bool { return w.MemberID == memberID })
	if i < 0 {
		return agent.Workload{}, false
	}
	return all[i].Effective(n.store.Members[memberID].Member), true
}

// changeRules has the owner of a node refuse an app, or everything, or nothing any more.
func (w *World) changeRules() {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	next := policy.Policy{}
	switch w.rng.IntN(5) {
	case 0:
		next.Closed = true
	case 1, 2:
		next.Apps.Never = []string{apps()[w.rng.IntN(len(apps()))]}
	}
	w.after(0, n.i, "owner", func() {
		n.admissions.policy = next
		n.admissions.rules++
		n.admissions.since = w.now
		n.activate()
	})
}

// refuses reports whether the owner wants nothing of an app on the machine.
func (n *node) refuses(app string) bool {
	p := n.admissions.policy
	return p.Closed || slices.Contains(p.Apps.Never, app)
}
