package admission_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/internal/accept/accepttest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

const year = 365 * 24 * time.Hour

func TestADelegationThatEndsStopsNothingAdmittedUnderIt(t *testing.T) {
	m := accepttest.New(t, noon)
	m.Delegate(noon.Add(time.Hour))
	w := m.Workload("a", 1)
	require.True(t, admission.Admit(w, m.Bundles, noon.Add(year), nil).Admitted,
		"other bytes of the same revision, a year later, in a new store")

	late := proto.CloneOf(w)
	late.FirstNamedAt = timestamppb.New(noon.Add(2 * time.Hour))
	v := admission.Admit(late, m.Bundles, noon.Add(year), nil)
	require.False(t, v.Admitted, "a revision that was named after the delegation had ended")
	require.Contains(t, v.Detail, protocol.Nack_EXPIRED.Text())

	unsaid := proto.CloneOf(w)
	unsaid.FirstNamedAt = nil
	require.True(t, admission.Admit(unsaid, m.Bundles, noon, nil).Admitted, "without the time, the state's own counts")
	require.False(t, admission.Admit(unsaid, m.Bundles, noon.Add(year), nil).Admitted)
}

func TestAFallbackIsJudgedAsOfItsOwnTime(t *testing.T) {
	m := accepttest.New(t, noon)
	m.Delegate(noon.Add(time.Hour))
	back := m.Workload("a", 1)
	m.Delegate(noon.Add(2 * year))
	m.Now = noon.Add(year)
	w := m.Workload("a", 2)
	w.Fallback = back
	v := admission.Admit(w, m.Bundles, m.Now, nil)
	require.True(t, v.Admitted)
	require.True(t, v.FallbackAdmitted, "what it goes back to ran under a delegation that has ended since")
}

func TestLaw01AFallbackNeedsItsOwnSignature(t *testing.T) {
	m := accepttest.New(t, noon)
	for name, c := range map[string]struct {
		spoil func(back *protocol.Workload)
		good  bool
	}{
		"as it was signed":           {func(*protocol.Workload) {}, true},
		"another image":              {func(w *protocol.Workload) { w.Services[0].Image += "0" }, false},
		"without a signature":        {func(w *protocol.Workload) { w.Manifest.Signatures = nil }, false},
		"of another member":          {func(w *protocol.Workload) { w.Id = "x" }, false},
		"of another instance":        {func(w *protocol.Workload) { w.InstanceId = "x" }, false},
		"of another app":             {func(w *protocol.Workload) { w.AppSlug = "x" }, false},
		"of another org":             {func(w *protocol.Workload) { w.OrgSlug = "x" }, false},
		"of the same revision":       {func(w *protocol.Workload) { w.Revision = 2 }, false},
		"a feature nobody has heard": {func(w *protocol.Workload) { w.Features = append(w.Features, "x") }, false},
	} {
		w := m.Workload("a", 2)
		w.Fallback = proto.CloneOf(m.Workload("a", 1))
		c.spoil(w.GetFallback())
		v := admission.Admit(w, m.Bundles, noon, nil)
		require.True(t, v.Admitted, name)
		require.Equal(t, c.good, v.FallbackAdmitted, name)
	}
}

func TestARevokedPublisherIsRefusedWheneverItSigned(t *testing.T) {
	m := accepttest.New(t, noon)
	w := m.Workload("a", 1)
	require.True(t, admission.Admit(w, m.Bundles, noon, nil).Admitted)
	m.NextBundle(noon.Add(time.Hour), accepttest.KeyID(m.Publisher))
	require.False(t, admission.Admit(w, m.Bundles, noon, nil).Admitted)
}

func TestACatalogKeyThatWasRotatedOutVouchesForWhatItAdmitted(t *testing.T) {
	m := accepttest.New(t, noon)
	w, old := m.Workload("a", 1), m.Catalog
	m.Catalog = accepttest.Key(t)
	m.NextBundle(noon.Add(time.Hour))
	require.True(t, admission.Admit(w, m.Bundles, noon.Add(year), nil).Admitted)

	late := proto.CloneOf(w)
	late.FirstNamedAt = timestamppb.New(noon.Add(2 * time.Hour))
	require.False(t, admission.Admit(late, m.Bundles, noon.Add(year), nil).Admitted,
		"but not for what is named afterwards")

	m.NextBundle(noon.Add(3*time.Hour), accepttest.KeyID(old))
	require.False(t, admission.Admit(w, m.Bundles, noon.Add(year), nil).Admitted, "revoked, it vouches for nothing")
}

// A thief of the state key can show an old delegation again, and name any time; the bundle only goes forward.
func TestAVersionBelowTheBundlesLowestIsNotStarted(t *testing.T) {
	m := accepttest.New(t, noon)
	w, old := m.Workload("a", 1), m.Catalog
	require.True(t, admission.Admit(w, m.Bundles, noon, nil).Admitted)
	m.MinVersions = map[string]string{w.GetAppSlug(): "1.0.1", "other": "9"}
	m.NextBundle(noon.Add(time.Hour))
	v := admission.Admit(w, m.Bundles, noon, nil)
	require.False(t, v.Admitted)
	require.Contains(t, v.Detail, "1.0.1")

	m.Catalog = accepttest.Key(t)
	require.NotEqual(t, accepttest.KeyID(old), accepttest.KeyID(m.Catalog))
	m.NextBundle(noon.Add(2 * time.Hour))
	require.False(t, admission.Admit(w, m.Bundles, noon, nil).Admitted, "nor under an earlier bundle, which named none")

	m.MinVersions = map[string]string{w.GetAppSlug(): "1.0.0"}
	m.NextBundle(noon.Add(3 * time.Hour))
	require.True(t, admission.Admit(w, m.Bundles, noon, nil).Admitted)
}

// The hub of the test forgets to name the feature, or names it; the answer is the same.
func TestAManifestWithLaterKeysIsRefusedAsNewerAndNotAsForged(t *testing.T) {
	later := strings.Replace(manifesttest.Document("web", accepttest.Image), "readiness_timeout_seconds",
		"holograms: true\n    readiness_timeout_seconds", 1)
	m := accepttest.New(t, noon)
	m.SignManifest(later)
	unnamed := m.Workload("a", 1)
	named := proto.CloneOf(unnamed)
	named.Features = append(named.Features, "holograms")
	for _, w := range []*protocol.Workload{unnamed, named} {
		v := admission.Admit(w, m.Bundles, noon, nil)
		require.False(t, v.Admitted)
		require.Equal(t, protocol.WorkloadStatus_FEATURE_MISSING, v.Reason)
		require.Contains(t, v.Detail, "holograms")
	}
	stranger := proto.CloneOf(unnamed)
	stranger.Manifest.Signatures[0].Signature[0] ^= 1
	require.Equal(t, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, admission.Admit(stranger, m.Bundles, noon, nil).Reason)
}
