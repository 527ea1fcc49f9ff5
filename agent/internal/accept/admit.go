package accept

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Features lists what a workload may need and this agent has.
func Features() []string { return manifest.KnownFeatures() }

// Admit decides whether the publisher's signed manifests admit a workload and its fallback on this agent, as of when
// their revisions were first named and with keys that are not revoked now. bundles are the accepted bundles, the
// present one last; issued is when the state was signed. With parsed, workloads share the parsing of a manifest.
func Admit(w *protocol.Workload, bundles []protocol.Bundle, issued time.Time,
	parsed manifest.Parsed,
) state.AdmissionDecision {
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
) state.AdmissionDecision {
	var present protocol.Bundle
	if len(bundles) > 0 {
		present = bundles[len(bundles)-1]
	}
	v := state.AdmissionDecision{BundleVersion: present.Version()}
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
