package reconcile

import (
	"context"
	"log/slog"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxAdmissionRounds bounds how often newer states may arrive while one pass decides on admission; the next pass has
// the rest.
const maxAdmissionRounds = 8

// desiredState returns the accepted state with the admission decisions on its documents. A document that arrives in
// between has none yet and counts as missing: called refused, it would fail at the hub for good.
func (r *Reconciler) desiredState(ctx context.Context) agent.Desired {
	var d agent.Desired
	owner, err := r.cfg.Policy()
	r.setCondition(protocol.ConditionPolicyInvalid, err)
	for range maxAdmissionRounds {
		r.admit(ctx)
		accepted := r.store.Accepted()
		owner = owner.ForOneOrg(firstOrg(accepted.Parts), r.cfg.WeakIsolation)
		d = agent.Desired{Epoch: accepted.Epoch, Generation: accepted.Generation, Unverified: len(accepted.SHA256) == 0}
		undecided := false
		for _, p := range accepted.Parts {
			if p.Workload == nil || p.Admission == nil {
				undecided = undecided || p.Workload != nil
				d.Missing = append(d.Missing, agent.MissingPart{MemberID: p.MemberID, SHA256: p.SHA256})
				continue
			}
			d.Workloads = append(d.Workloads, p.Admission.Workload(p.MemberID, p.Workload, owner))
		}
		if !undecided {
			break
		}
	}
	return d
}

// ownerRefuses reports whether the owner refuses by now what is about to start. Hours may have passed since that was
// decided, for instance with the copy of a volume.
func (r *Reconciler) ownerRefuses(a agent.StartContainer) bool {
	owner, _ := r.cfg.Policy() // each pass reports an error in the file
	parts := r.store.Accepted().Parts
	owner = owner.ForOneOrg(firstOrg(parts), r.cfg.WeakIsolation)
	for _, p := range parts {
		if p.MemberID != a.MemberID {
			continue
		}
		w := p.Workload
		if back := w.GetFallback(); back != nil && back.GetRevision() == a.Revision {
			w = back
		}
		return owner.Refuses(w) != ""
	}
	return false
}

// firstOrg is the org of the oldest member: member ids sort by creation time.
func firstOrg(parts []state.Part) string {
	var first state.Part
	for _, p := range parts {
		if p.Workload != nil && (first.Workload == nil || p.MemberID < first.MemberID) {
			first = p
		}
	}
	return first.Workload.GetOrgSlug()
}

// admit decides on the documents that are new since the last pass, and on all of them under a newer trust bundle.
func (r *Reconciler) admit(ctx context.Context) {
	bundles, accepted := r.store.Bundles(), r.store.Accepted()
	decisions, parsed := map[string]admission.Decision{}, manifest.Parsed{}
	for _, p := range accepted.Parts {
		if p.Workload == nil || p.Admission != nil && p.Admission.BundleVersion == r.store.Bundle().Version() {
			continue
		}
		decision := admission.Admit(p.Workload, bundles, accepted.IssuedAt, parsed)
		decisions[p.SHA256Hex()] = decision
		if !decision.Admitted {
			r.log.WarnContext(r.workContext(ctx, p.MemberID), "workload refused", slog.String("member_id", p.MemberID),
				slog.String("reason", decision.Reason.Text()), slog.String("detail", decision.Detail))
		}
	}
	if len(decisions) == 0 {
		return
	}
	r.store.SetAdmissions(decisions)
	failpoint.Hit("agent/admission/decided")
}
