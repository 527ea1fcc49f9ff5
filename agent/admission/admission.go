// Package admission decides whether a node runs a workload: the publisher's signed manifest must admit it, this agent
// must have the features that it needs, and the owner's policy must not refuse it. It is pure; agent/internal/reconcile
// asks it about the documents of the accepted state.
package admission

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Decision says whether a workload document is admitted: publisher, manifest and features. It derives from signed
// documents alone, so it is not stored: each start and each new trust bundle decides again.
type Decision struct {
	Admitted bool
	// Reason is a status_reason of the contract, Detail for people.
	Reason protocol.WorkloadStatus_Reason
	Detail string
	// FallbackAdmitted is the same for the fallback that the document carries.
	FallbackAdmitted bool
	// BundleVersion is the trust bundle of the decision.
	BundleVersion uint64
}

// Workload converts a document with its decision; the owner's refusal comes before the manifest's. A fallback that is
// not admitted is none.
func (d Decision) Workload(memberID string, w *protocol.Workload, owner policy.Policy) agent.Workload {
	out := converted(memberID, w, owner)
	if !d.Admitted && out.Refused == 0 {
		out.Refused, out.RefusedDetail = d.Reason, d.Detail
	}
	if back := w.GetFallback(); back != nil && d.FallbackAdmitted {
		f := converted(memberID, back, owner)
		out.Fallback = &f
	}
	return out
}

func converted(memberID string, w *protocol.Workload, owner policy.Policy) agent.Workload {
	out := agent.NewWorkload(memberID, w)
	if rule := owner.Refuses(w); rule != "" {
		out.Refused, out.RefusedDetail = protocol.WorkloadStatus_OWNER_REFUSED, rule
	}
	return out
}

// Features lists what a workload may need and this agent has.
func Features() []string { return manifest.KnownFeatures() }

// Admit decides whether the publisher's signed manifests admit a workload and its fallback on this agent, as of when
// their revisions were first named and with keys that are not revoked now. bundles are the accepted bundles, the
// present one last; issued is when the state was signed. With parsed, workloads share the parsing of a manifest.
func Admit(w *protocol.Workload, bundles []protocol.Bundle, issued time.Time,
	parsed manifest.Parsed,
) Decision {
	v := admitOne(w, bundles, issued, parsed)
	if back := w.GetFallback(); back != nil {
		same := back.GetId() == w.GetId() && back.GetInstanceId() == w.GetInstanceId() &&
			back.GetAppSlug() == w.GetAppSlug() && back.GetOrgSlug() == w.GetOrgSlug()
		v.FallbackAdmitted = same && back.GetRevision() < w.GetRevision() && admitOne(back, bundles, issued, parsed).Admitted
	}
	return v
}

func admitOne(w *protocol.Workload, bundles []protocol.Bundle, issued time.Time,
	parsed manifest.Parsed,
) Decision {
	var present protocol.Bundle
	if len(bundles) > 0 {
		present = bundles[len(bundles)-1]
	}
	v := Decision{BundleVersion: present.Version()}
	for _, f := range w.GetFeatures() {
		if !slices.Contains(Features(), f) {
			v.Reason, v.Detail = protocol.WorkloadStatus_FEATURE_MISSING, "this agent lacks the feature "+f
			return v
		}
	}
	verified, err := verifyManifest(w, bundles, admissionTime(w, issued), parsed)
	if err == nil {
		err = manifest.Admits(verified, w)
	}
	if err != nil {
		v.Reason, v.Detail = protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, publicText(err)
		// Its signature was good: the manifest uses keys that came after this agent.
		if errors.Is(err, manifest.ErrSchema) {
			v.Reason = protocol.WorkloadStatus_FEATURE_MISSING
		}
		return v
	}
	v.Admitted = true
	return v
}

// admissionTime is when the revision was first named, but not after the state that names it was signed.
func admissionTime(w *protocol.Workload, issued time.Time) time.Time {
	if named := w.GetFirstNamedAt(); named != nil && named.IsValid() && named.AsTime().Before(issued) {
		return named.AsTime()
	}
	return issued
}

// verifyManifest tries the present bundle, then the earlier one that was in force at the time: a catalog key that was
// rotated out since, and not revoked, still vouches for what was admitted then.
func verifyManifest(w *protocol.Workload, bundles []protocol.Bundle, at time.Time,
	parsed manifest.Parsed,
) (manifest.Verified, error) {
	if len(bundles) == 0 {
		return manifest.Verified{}, protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "there is no trust bundle")
	}
	present := bundles[len(bundles)-1]
	v, err := parsed.Verify(w.GetManifest(), w.GetDelegation(), present, at)
	for i := len(bundles) - 2; err != nil && i >= 0 && at.Before(bundles[i+1].IssuedAt()); i-- {
		if earlier, ok := parsed.Verify(w.GetManifest(), w.GetDelegation(), bundles[i].Under(present), at); ok == nil {
			return earlier, nil
		}
	}
	return v, err
}

// publicText is what may be shown of an error.
func publicText(err error) string {
	if protocol.RefusalOf(err) != protocol.Nack_MALFORMED {
		return protocol.RefusalOf(err).Text() + ": " + protocol.RefusalDetail(err)
	}
	f := fault.As(err)
	text := []string{f.Public}
	for _, field := range f.Fields {
		text = append(text, field.Pointer+" "+field.Reason+".")
	}
	return strings.Join(text, " ")
}
