package accept_test

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/accept/accepttest"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

func reopen(t testing.TB, dir string, s *state.Store) *state.Store {
	t.Helper()
	if s != nil {
		require.NoError(t, s.Close())
	}
	s, err := state.Open(filepath.Join(dir, "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// A node that has no way to its hub's bundles refuses a state of a newer one, and lives on.
func TestAStateUnderANewerBundleIsRefusedWhereNoneCanBeFetched(t *testing.T) {
	m := accepttest.New(t, noon)
	s := reopen(t, t.TempDir(), nil)
	require.NoError(t, accept.Resume(s, m.Pin(), "", m.Node()))
	require.NoError(t, s.InitBundle(m.Bundle()))
	m.NextBundle(noon.Add(time.Hour))
	env, parts := m.Desired(1)
	_, err := accept.New(accept.Config{Store: s, Node: m.Node}).State(t.Context(), env, parts)
	require.Equal(t, protocol.Nack_BUNDLE_TOO_OLD, protocol.RefusalOf(err))
}

func TestTheStoredChainLeadsFromThePinnedRootOverItsRotations(t *testing.T) {
	m, dir := accepttest.New(t, noon), t.TempDir()
	pin := m.Pin()
	s := reopen(t, dir, nil)
	require.NoError(t, accept.Resume(s, pin, "", m.Node()))
	require.NoError(t, s.InitBundle(m.Bundle()))
	for range 3 * state.MaxBundles {
		former := m.Root
		if len(m.Bundles)%5 == 0 {
			m.Root = accepttest.Key(t)
			require.NoError(t, s.AcceptBundle(m.RotatedBundle(noon, former).Envelope()))
		} else {
			require.NoError(t, s.AcceptBundle(m.NextBundle(noon).Envelope()))
		}
	}
	require.Less(t, len(s.Bundles()), 2*state.MaxBundles, "links that the way does not need are dropped")
	s = reopen(t, dir, s)
	require.NoError(t, accept.Resume(s, pin, "", m.Node()))
	require.Empty(t, s.Unverified())
	require.Equal(t, m.Bundle().Version(), s.Bundle().Version())

	stranger := accepttest.New(t, noon)
	s = reopen(t, dir, s)
	require.NoError(t, accept.Resume(s, stranger.Pin(), "", m.Node()))
	require.False(t, s.Bundle().Valid(), "no chain leads there from another root")
	require.NotEmpty(t, s.Unverified())
	require.NotContains(t, s.Unverified(), state.BundleKey, "none is missing")
}

func TestAPinThatIsGivenAtTheStartMustNameTheRootOfTheEnrollment(t *testing.T) {
	m, dir := accepttest.New(t, noon), t.TempDir()
	s := reopen(t, dir, nil)
	require.NoError(t, s.InitBundle(m.Bundle()))
	root := m.Bundle().Message().GetRoles()[0]
	for _, r := range m.Bundle().Message().GetRoles() {
		if r.GetName() == protocol.RoleRoot {
			root = r
		}
	}
	s = reopen(t, dir, s)
	require.NoError(t, accept.Resume(s, m.Pin(), protocol.RootRoleDigest(root), m.Node()), "another form of the same")
	require.True(t, s.Bundle().Valid())
	s = reopen(t, dir, s)
	err := accept.Resume(s, m.Pin(), accepttest.New(t, noon).Pin(), m.Node())
	require.EqualValues(t, "root_fingerprint_mismatch", fault.As(err).Code)
}

func TestAStoredStateOfARevokedKeyStartsNothing(t *testing.T) {
	m, dir := accepttest.New(t, noon), t.TempDir()
	s := reopen(t, dir, nil)
	require.NoError(t, s.InitBundle(m.Bundle()))
	acceptor := accept.New(accept.Config{Store: s, Node: m.Node})
	env, parts := m.Desired(1, m.Workload("a", 1))
	_, err := acceptor.State(context.Background(), env, parts)
	require.NoError(t, err)
	old := m.State
	m.State = accepttest.Key(t)
	_, err = acceptor.Bundle(m.NextBundle(noon).Envelope())
	require.NoError(t, err)
	s = reopen(t, dir, s)
	require.NoError(t, accept.Resume(s, m.Pin(), "", m.Node()))
	require.EqualValues(t, 1, s.Accepted().Generation, "a key that was rotated out vouches for what was accepted")

	require.NoError(t, s.AcceptBundle(m.NextBundle(noon, accepttest.KeyID(old)).Envelope()))
	s = reopen(t, dir, s)
	require.NoError(t, accept.Resume(s, m.Pin(), "", m.Node()))
	require.Zero(t, s.Accepted().Generation)
	require.Contains(t, s.Unverified()["state"], protocol.Nack_SIGNATURE_INVALID.Text())
}

// A member whose leases are set aside may have one: it does not count as a member that has none, which is stopped.
func TestLaw03LeasesThatDoNotVerifyAreNotTakenForNone(t *testing.T) {
	m, dir := accepttest.New(t, noon), t.TempDir()
	s := reopen(t, dir, nil)
	require.NoError(t, s.InitBundle(m.Bundle()))
	acceptor := accept.New(accept.Config{Store: s, Node: m.Node})
	_, err := acceptor.Leases(m.Leases(s.Incarnation(), 1, "a"))
	require.NoError(t, err)
	former := m.Lease
	m.Lease = accepttest.Key(t)
	_, err = acceptor.Bundle(m.NextBundle(noon).Envelope())
	require.NoError(t, err)
	_, err = acceptor.Leases(m.Leases(s.Incarnation(), 2, "b"))
	require.NoError(t, err)
	require.False(t, s.LeasesUnverified())
	_, err = acceptor.Bundle(m.NextBundle(noon, accepttest.KeyID(former)).Envelope())
	require.NoError(t, err)

	s = reopen(t, dir, s)
	require.NoError(t, accept.Resume(s, m.Pin(), "", m.Node()))
	require.NotContains(t, s.Leases(), "a")
	require.Contains(t, s.Leases(), "b")
	require.True(t, s.LeasesUnverified())

	_, err = accept.New(accept.Config{Store: s, Node: m.Node}).Leases(m.Leases(s.Incarnation(), 3, "a", "b"))
	require.NoError(t, err)
	require.False(t, s.LeasesUnverified())
}

// The work of a start grows with what is stored, and each document is verified once, whatever the number of trust
// bundles. How long a start beside twenty workloads takes is measured: restart.recognised in bench/results.json.
// Allocations stand for work.
func TestAStartBesideTwentyWorkloadsVerifiesEachDocumentOnce(t *testing.T) {
	work := func(workloads, bundles int) (allocations float64) {
		m, dir := accepttest.New(t, noon), t.TempDir()
		s := reopen(t, dir, nil)
		require.NoError(t, s.InitBundle(m.Bundle()))
		for range bundles - 1 {
			require.NoError(t, s.AcceptBundle(m.NextBundle(noon).Envelope()))
		}
		acceptor := accept.New(accept.Config{Store: s, Node: m.Node})
		var wanted []*protocol.Workload
		for i := range workloads {
			wanted = append(wanted, m.Workload(fmt.Sprintf("member-%04d", i), 1))
		}
		env, documents := m.Desired(1, wanted...)
		_, err := acceptor.State(context.Background(), env, documents)
		require.NoError(t, err)
		for i, w := range wanted {
			_, err := acceptor.Leases(m.Leases(s.Incarnation(), uint64(i+1), w.GetId()))
			require.NoError(t, err)
		}
		s = reopen(t, dir, s)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		require.NoError(t, accept.Resume(s, m.Pin(), "", m.Node()))
		accepted, all := s.Accepted(), s.Bundles()
		for _, p := range accepted.Parts {
			require.True(t, admission.Admit(p.Workload, all, accepted.IssuedAt, nil).Admitted)
		}
		runtime.ReadMemStats(&after)
		require.Len(t, accepted.Parts, workloads)
		require.Len(t, s.Leases(), workloads)
		require.Len(t, all, bundles)
		return float64(after.Mallocs - before.Mallocs)
	}
	twenty, eighty := work(20, 1), work(80, 1)
	require.Less(t, eighty, 5*twenty, "four times the documents are four times the work")
	chain := work(20, state.MaxBundles) - twenty
	require.InDelta(t, chain, work(80, state.MaxBundles)-eighty, twenty/10, "more bundles cost the same beside any "+
		"number of documents")
}

// BenchmarkStart is what a start costs before the first pass: the store is opened, all is verified, and every workload
// is judged.
func BenchmarkStart(b *testing.B) {
	for _, parts := range []int{20, protocol.MaxParts} {
		b.Run(fmt.Sprint(parts), func(b *testing.B) {
			m, dir := accepttest.New(b, noon), b.TempDir()
			s := reopen(b, dir, nil)
			require.NoError(b, s.InitBundle(m.Bundle()))
			var workloads []*protocol.Workload
			var ids []string
			for i := range parts {
				ids = append(ids, fmt.Sprintf("member-%04d", i))
				workloads = append(workloads, m.Workload(ids[i], 1))
			}
			acceptor := accept.New(accept.Config{Store: s, Node: m.Node})
			env, documents := m.Desired(1, workloads...)
			_, err := acceptor.State(context.Background(), env, documents)
			require.NoError(b, err)
			_, err = acceptor.Leases(m.Leases(s.Incarnation(), 1, ids...))
			require.NoError(b, err)
			require.NoError(b, s.Close())
			for b.Loop() {
				s, err := state.Open(filepath.Join(dir, "state"), state.Options{MinFreeBytes: 1})
				require.NoError(b, err)
				require.NoError(b, accept.Resume(s, m.Pin(), "", m.Node()))
				accepted, bundles := s.Accepted(), s.Bundles()
				for _, p := range accepted.Parts {
					require.True(b, admission.Admit(p.Workload, bundles, accepted.IssuedAt, nil).Admitted)
				}
				require.Empty(b, s.Unverified())
				require.NoError(b, s.Close())
			}
		})
	}
}
