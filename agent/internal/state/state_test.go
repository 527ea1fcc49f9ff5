package state_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// mesh signs what a hub would.
type mesh struct {
	t                  testing.TB
	root, state, lease ed25519.PrivateKey
	node               ed25519.PrivateKey
	bundle             protocol.Bundle
	epoch              uint64
}

const nodeID = "node-1"

func newMesh(t testing.TB) *mesh {
	t.Helper()
	key := func() ed25519.PrivateKey {
		_, k, err := ed25519.GenerateKey(rand.Reader)
		require.NoError(t, err)
		return k
	}
	m := &mesh{t: t, root: key(), state: key(), lease: key(), node: key(), epoch: 1}
	env := m.bundleEnvelope(1)
	b, err := protocol.VerifyBundle(env, protocol.Fingerprint(pub(m.root)))
	require.NoError(t, err)
	m.bundle = b
	return m
}

func pub(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

func (m *mesh) bundleEnvelope(version uint64) *protocol.Envelope {
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub(k)),
			Ed25519: pub(k),
		}}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "mesh.example", Version: version, Epoch: m.epoch, IssuedAt: timestamppb.New(noon),
		Roles: []*protocol.Role{role("root", m.root), role("state", m.state), role("lease", m.lease)},
	}, protocol.NewEd25519Signer(m.root))
	require.NoError(m.t, err)
	return env
}

func (m *mesh) resume(s *state.Store) error {
	return accept.Resume(s, protocol.Fingerprint(pub(m.root)), "", m.identity())
}

func (m *mesh) identity() protocol.NodeIdentity { return protocol.NewNodeIdentity(nodeID, pub(m.node)) }

func workload(member string, revision uint64) *protocol.Workload {
	return &protocol.Workload{Id: member, InstanceId: "i-" + member, Revision: revision, CorrelationId: "corr"}
}

// desired signs a state that names the workloads, and returns their documents.
func (m *mesh) desired(generation uint64,
	ws ...*protocol.Workload,
) (protocol.Verified[*protocol.DesiredState], [][]byte) {
	m.t.Helper()
	me := m.identity()
	d := &protocol.DesiredState{
		NodeId: nodeID, NodeKeySha256: me.KeySHA256[:], Epoch: m.epoch, Generation: generation,
		IssuedAt: timestamppb.New(noon),
	}
	var parts [][]byte
	for _, w := range ws {
		raw, err := proto.Marshal(w)
		require.NoError(m.t, err)
		sum := sha256.Sum256(raw)
		d.Parts = append(d.Parts, &protocol.PartRef{Id: w.GetId(), Sha256: sum[:], SizeBytes: uint64(len(raw))})
		parts = append(parts, raw)
	}
	env, err := protocol.SignMessage(protocol.PayloadState, d, protocol.NewEd25519Signer(m.state))
	require.NoError(m.t, err)
	v, err := protocol.VerifyState(env, m.bundle, me)
	require.NoError(m.t, err)
	return v, parts
}

func (m *mesh) leases(incarnation string, ls ...*protocol.Lease) protocol.Verified[*protocol.LeaseBatch] {
	m.t.Helper()
	env, err := protocol.SignMessage(protocol.PayloadLeases,
		&protocol.LeaseBatch{NodeId: nodeID, Incarnation: incarnation, Epoch: m.epoch, Leases: ls},
		protocol.NewEd25519Signer(m.lease))
	require.NoError(m.t, err)
	v, err := protocol.VerifyLeases(env, m.bundle, m.identity())
	require.NoError(m.t, err)
	return v
}

func lease(member string, no uint64) *protocol.Lease {
	return &protocol.Lease{
		MemberId: member, LeaseNo: no,
		ExpiresAt: timestamppb.New(noon.Add(time.Hour * time.Duration(no))),
	}
}

func open(t testing.TB, dir string, m *mesh) *state.Store {
	t.Helper()
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.NoError(t, m.resume(s))
	require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(m.node)))
	if !s.Bundle().Valid() {
		require.NoError(t, s.InitBundle(m.bundle))
	}
	return s
}

func woken(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestLaw02StateNeverGoesBackwards(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	wake := s.Subscribe()
	v, parts := m.desired(5, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.True(t, woken(wake))

	older, _ := m.desired(4, workload("a", 1))
	other, _ := m.desired(5, workload("a", 2))
	for reason, refused := range map[protocol.Nack_Reason]protocol.Verified[*protocol.DesiredState]{
		protocol.Nack_GENERATION_OLDER: older, protocol.Nack_GENERATION_CONFLICT: other, protocol.Nack_SIGNATURE_INVALID: {},
	} {
		require.Equal(t, reason, protocol.RefusalOf(s.AcceptState(refused, nil)))
		require.False(t, woken(wake), "a refused state wakes nobody")
		require.EqualValues(t, 5, s.Accepted().Generation)
	}

	require.NoError(t, s.AcceptState(v, parts), "the same again is no contradiction")
	require.NoError(t, s.Close())

	s = open(t, dir, m)
	require.Equal(t, protocol.Nack_GENERATION_OLDER, protocol.RefusalOf(s.AcceptState(older, nil)), "after a restart too")
	digest := v.Digest()
	require.Equal(t, digest[:], s.Accepted().SHA256)
	require.EqualValues(t, 1, s.Accepted().Parts[0].Workload.GetRevision())
}

func TestNewEpochRestartsTheOrderAndTheOldOneIsOver(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(5, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	m.epoch = 2
	next, err := m.bundle.Succeed(m.bundleEnvelope(2))
	require.NoError(t, err)
	m.bundle = next
	require.NoError(t, s.AcceptBundle(next.Envelope()))
	fresh, _ := m.desired(1)
	require.NoError(t, s.AcceptState(fresh, nil))
	require.Equal(t, protocol.Nack_EPOCH_UNKNOWN, protocol.RefusalOf(s.AcceptState(v, parts)))
}

func TestPartsComeWithTheStateOrLater(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(1, workload("a", 1), workload("b", 1))
	require.NoError(t, s.AcceptState(v, parts[:1]))
	require.NotNil(t, s.Accepted().Parts[0].Workload)
	require.Nil(t, s.Accepted().Parts[1].Workload)

	stranger, err := proto.Marshal(workload("c", 1))
	require.NoError(t, err)
	require.Equal(t, protocol.Nack_PART_DIGEST_MISMATCH, protocol.RefusalOf(s.AcceptState(v, [][]byte{stranger})))
	require.Equal(t, protocol.Nack_UNKNOWN_PART, protocol.RefusalOf(s.AcceptPart(stranger)))
	require.NoError(t, s.AcceptPart(parts[1]))
	require.NotNil(t, s.Accepted().Parts[1].Workload)

	sum := s.Accepted().Parts[1].SHA256Hex()
	s.SetAdmissions(map[string]state.AdmissionDecision{sum: {Admitted: true}})
	require.True(t, s.Accepted().Parts[1].Admission.Admitted)

	next, _ := m.desired(2, workload("a", 1))
	require.NoError(t, s.AcceptState(next, nil))
	require.Len(t, s.Accepted().Parts, 1)
	require.NotNil(t, s.Accepted().Parts[0].Workload, "an unchanged document is not sent again")
	require.Contains(t, s.Members(), "b", "a member that has left is remembered until it is retired")
}

func TestLaw01RunIsOpenedOnlyWhileTheAcceptedStateWantsIt(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	run := state.Run{ID: "a.1", MemberID: "a", Revision: 2, OpenedAt: noon}
	wanted := func() bool {
		t.Helper()
		ok, err := s.OpenRunIfDesired(run)
		require.NoError(t, err)
		require.Equal(t, ok, len(s.Runs()) == 1)
		return ok
	}
	require.False(t, wanted(), "there is no state")
	v, parts := m.desired(1, workload("a", 2))
	require.NoError(t, s.AcceptState(v, parts))
	require.False(t, wanted(), "nobody has judged the document")
	s.SetAdmissions(map[string]state.AdmissionDecision{s.Accepted().Parts[0].SHA256Hex(): {
		Reason: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
	}})
	require.False(t, wanted())
	s.SetAdmissions(map[string]state.AdmissionDecision{s.Accepted().Parts[0].SHA256Hex(): {Admitted: true}})
	run.Revision = 1
	require.False(t, wanted(), "another revision")
	run.Revision = 2
	require.True(t, wanted())
	require.NoError(t, s.CloseRun(run.ID))
	gone, _ := m.desired(2)
	require.NoError(t, s.AcceptState(gone, nil))
	require.False(t, wanted(), "it has left the state")
}

func TestOnlyHigherLeasesAreTaken(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	inc := s.Incarnation()
	require.NoError(t, s.AcceptLeases(m.leases(inc, lease("a", 3), lease("b", 1))))
	require.NoError(t, s.AcceptLeases(m.leases(inc, lease("a", 2), lease("b", 2))), "old news is no error")
	require.Equal(t, protocol.Nack_WRONG_NODE,
		protocol.RefusalOf(s.AcceptLeases(m.leases("another-life", lease("a", 9)))))
	require.Equal(t, protocol.Nack_WRONG_NODE, protocol.RefusalOf(s.AcceptLeases(m.leases("", lease("a", 9)))),
		"leases for no incarnation")
	require.Equal(t, protocol.Nack_MALFORMED,
		protocol.RefusalOf(s.AcceptLeases(m.leases(inc, &protocol.Lease{MemberId: "a", LeaseNo: 9}))))
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID,
		protocol.RefusalOf(s.AcceptLeases(protocol.Verified[*protocol.LeaseBatch]{})))
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	require.EqualValues(t, 3, s.Leases()["a"].GetLeaseNo())
	require.EqualValues(t, 2, s.Leases()["b"].GetLeaseNo())
	require.Equal(t, inc, s.Incarnation())
}

// A hub's batch has all its leases of the node. An earlier one is kept only as long as it has a lease that no later one
// has.
func TestABatchIsKeptUntilLaterOnesHaveItsLeases(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	held := func() map[string]uint64 {
		out := map[string]uint64{}
		_, batches := s.Signed()
		for _, env := range batches {
			v, err := protocol.VerifyLeases(env, m.bundle, m.identity())
			require.NoError(t, err)
			for _, l := range v.Message().GetLeases() {
				out[l.GetMemberId()] = max(out[l.GetMemberId()], l.GetLeaseNo())
			}
		}
		return out
	}
	count := func() int { _, batches := s.Signed(); return len(batches) }
	inc := s.Incarnation()
	require.NoError(t, s.AcceptLeases(m.leases(inc, lease("a", 2), lease("b", 1))))
	require.NoError(t, s.AcceptLeases(m.leases(inc, lease("a", 2), lease("b", 1), lease("c", 1))))
	require.Equal(t, 1, count(), "the later one has all")
	require.NoError(t, s.AcceptLeases(m.leases(inc, lease("a", 1), lease("d", 1))))
	require.Equal(t, 2, count())
	for range 2 {
		require.Equal(t, map[string]uint64{"a": 2, "b": 1, "c": 1, "d": 1}, held())
		require.NoError(t, s.Close())
		s = open(t, dir, m)
	}
	require.NoError(t, s.AcceptLeases(m.leases(inc, lease("a", 3), lease("b", 1), lease("c", 1), lease("d", 1))))
	require.Equal(t, 1, count())
}

func TestBundleOnlySucceeds(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	require.NoError(t, s.AcceptBundle(m.bundle.Envelope()), "the same again is fine")
	require.NoError(t, s.AcceptBundle(m.bundleEnvelope(2)))
	require.Equal(t, protocol.Nack_GENERATION_OLDER, protocol.RefusalOf(s.AcceptBundle(m.bundle.Envelope())))
	stranger := newMesh(t)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(s.AcceptBundle(stranger.bundleEnvelope(3))))
	require.EqualValues(t, 2, s.Bundle().Version())
	require.Error(t, s.InitBundle(protocol.Bundle{}))
}

func TestPortsStayWithTheirMember(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	web := []*protocol.Port{{Name: "http", ContainerPort: 8080, Protocol: "http"}, {
		Name: "ssh", ContainerPort: 22,
		Protocol: "tcp",
	}}
	free := func(p uint16) bool { return p != 20001 }
	a, err := s.AssignPorts("a", web, 20000, 20004, free, func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, []uint16{20000, 20002}, []uint16{a[0].Host, a[1].Host})
	b, err := s.AssignPorts("b", web[:1], 20000, 20004, free, func(*state.Member) {})
	require.NoError(t, err)
	require.EqualValues(t, 20003, b[0].Host)
	require.NoError(t, s.Close())

	s = open(t, dir, m)
	again, err := s.AssignPorts("a", web, 20000, 20004, free, func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, a, again)
	_, err = s.AssignPorts("c", web, 20000, 20004, free, func(*state.Member) {})
	require.True(t, fault.Is(err, fault.Unavailable))
	require.NoError(t, s.Retire("a", nil, noon))
	c, err := s.AssignPorts("c", web, 20000, 20004, free, func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, []uint16{20004, 20000}, []uint16{c[0].Host, c[1].Host}, "what the retired member had is free again")
	free = func(p uint16) bool { return p != 20000 }
	c, err = s.AssignPorts("c", web, 20000, 20004, free, func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, []uint16{20004, 20001}, []uint16{c[0].Host, c[1].Host}, "another program has taken one meanwhile")
}

// A browser tab or a tunnel of the tenant that has gone must not reach the next one, also after a restart of the agent.
func TestAPortThatWasGivenBackIsGivenAgainAfterAllOthers(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	web := []*protocol.Port{{Name: "http", ContainerPort: 8080, Protocol: "http"}}
	assign := func(member string) uint16 {
		ports, err := s.AssignPorts(member, web, 20000, 20003, func(uint16) bool { return true }, func(*state.Member) {})
		require.NoError(t, err)
		return ports[0].Host
	}
	require.EqualValues(t, 20000, assign("stays"))
	var given []uint16
	for i := range 5 {
		member := fmt.Sprintf("m%d", i)
		given = append(given, assign(member))
		require.NoError(t, s.Retire(member, nil, noon))
		require.NoError(t, s.Close())
		s = open(t, dir, m)
	}
	require.Equal(t, []uint16{20001, 20002, 20003, 20001, 20002}, given)
}

// use makes a container of a run up for the given seconds after noon, one sample each ten seconds.
func use(t testing.TB, s *state.Store, member, run string, seconds int) {
	t.Helper()
	require.NoError(t, s.OpenRun(state.Run{ID: run, MemberID: member, OpenedAt: noon}))
	for at := 0; at <= seconds; at += 10 {
		sample(t, s, noon.Add(time.Duration(at)*time.Second), meter.Run{
			RunID: run, MemberID: member, StartedAt: noon,
			Up: true,
		})
	}
}

func sample(t testing.TB, s *state.Store, at time.Time, runs ...meter.Run) {
	t.Helper()
	require.NoError(t, s.SaveSample(meter.Observation{At: at, Runs: runs}, clock.Stamp{At: at}))
}

// sealedSeconds walks the chain of this incarnation as a hub would.
func sealedSeconds(t testing.TB, s *state.Store, m *mesh) (seconds float64, last *protocol.UsageRecord) {
	t.Helper()
	chain := spool.Chain{NodeID: nodeID, Incarnation: s.Incarnation()}
	for number := s.Spool().Marks.Posted + 1; ; number++ {
		env, err := s.Segment(number)
		require.NoError(t, err)
		if env == nil {
			return seconds, last
		}
		_, err = protocol.VerifySegment(env, pub(m.node))
		require.NoError(t, err)
		seg, next, err := spool.VerifyNext(chain, env.GetPayload())
		require.NoError(t, err)
		chain = next
		for _, r := range seg.GetRecords() {
			last = r
			if r.GetMeter() == protocol.MeterSessionSeconds {
				seconds += float64(r.GetQuantity()) / 1e6
			}
		}
	}
}

func TestUsageIsChainedAndPrunedWhenArchived(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	use(t, s, "a", "r1", 120)
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 120, seconds, 0)
	require.EqualValues(t, 120_000_000, s.Consumed("a")[protocol.MeterSessionSeconds])
	require.Positive(t, s.Spool().UnsentBytes)

	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: 2, Archived: 1}))
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: "another-life", Posted: 99, Archived: 99}))
	require.Error(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: 99, Archived: 99}),
		"the hub cannot know more than was sealed")
	env, err := s.Segment(3)
	require.NoError(t, err)
	require.NotNil(t, env)
	_, err = s.Segment(1)
	require.Error(t, err, "archived, so forgotten")
	require.NoError(t, s.Close())

	s = open(t, dir, m)
	require.Equal(t, spool.Marks{Posted: 2, Archived: 1}, s.Spool().Marks)
	before := s.Spool().UnsentBytes
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{
		Incarnation: s.Incarnation(), Posted: s.Spool().LastSegment,
		Archived: s.Spool().LastSegment,
	}))
	require.Positive(t, before)
	require.Zero(t, s.Spool().UnsentBytes)
	env, err = s.Segment(s.Spool().LastSegment + 1)
	require.NoError(t, err)
	require.Nil(t, env)
}

func TestRetiringClosesUsageWithAFinalRecordAndAProof(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 1))))
	use(t, s, "a", "r1", 45)
	sample(t, s, noon.Add(50*time.Second), meter.Run{
		RunID: "r1", MemberID: "a", StartedAt: noon,
		ExitedAt: noon.Add(47 * time.Second),
	})
	require.True(t, s.Measured("r1"))
	require.NoError(t, s.CloseRun("r1"))
	v, parts = m.desired(2)
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon.Add(time.Minute)))

	seconds, last := sealedSeconds(t, s, m)
	require.InDelta(t, 47, seconds, 0)
	require.True(t, last.GetFinal())
	proof := s.Members()["a"].Removal
	require.True(t, proof.Complete())
	require.Equal(t, last.GetSequence(), proof.GetLastUsageSequence())
	require.Equal(t, s.Incarnation(), proof.GetIncarnation())
	require.Empty(t, s.Leases())
	require.NoError(t, s.AcknowledgeRemovals([]string{"a", "unknown"}))
	require.True(t, s.Members()["a"].Reported)
}

func TestWhatAMemberHasUsedCountsWhenARestoredHubNamesItAgain(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	use(t, s, "a", "r1", 45)
	sample(t, s, noon.Add(50*time.Second), meter.Run{
		RunID: "r1", MemberID: "a", StartedAt: noon,
		ExitedAt: noon.Add(47 * time.Second),
	})
	used := s.Consumed("a")
	require.Positive(t, used[protocol.MeterSessionSeconds])
	require.NoError(t, s.CloseRun("r1"))
	v, parts = m.desired(2)
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon.Add(time.Minute)))
	require.NoError(t, s.AcknowledgeRemovals([]string{"a"}))
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	v, parts = m.desired(3, workload("a", 2))
	require.NoError(t, s.AcceptState(v, parts))
	require.Nil(t, s.Members()["a"].Removal)
	require.Equal(t, used, s.Consumed("a"), "the cap of a lease counts from the member's beginning")
}

// Between the decision to retire and its execution a state may have come that names the member. Were its last record
// sealed then, what it uses from now on would be written off.
func TestLaw05AMemberThatTheStateNamesIsNotRetired(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 1))))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon))
	require.Nil(t, s.Members()["a"].Removal)
	require.Contains(t, s.Leases(), "a")
	require.Zero(t, s.Spool().LastSegment, "nothing is final")
	v, parts = m.desired(2)
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon))
	require.True(t, s.Members()["a"].Removal.Complete())
}

func TestNewIncarnationKeepsWhatIsNotArchived(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	old := s.Incarnation()
	use(t, s, "a", "r1", 120)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: old, Posted: 2, Archived: 1}))
	require.NoError(t, s.TakeNewIncarnation(noon.Add(time.Hour)))
	require.NotEqual(t, old, s.Incarnation())
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 90, seconds, 0, "the first thirty seconds are archived under the old name")
	require.EqualValues(t, 120_000_000, s.Consumed("a")[protocol.MeterSessionSeconds])
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	seconds, _ = sealedSeconds(t, s, m)
	require.InDelta(t, 90, seconds, 0)
	sample(t, s, noon.Add(160*time.Second), meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true})
	seconds, _ = sealedSeconds(t, s, m)
	require.InDelta(t, 130, seconds, 0)
}

// A copy of the disk is put back after the node has gone on, and goes on itself: it seals other segments under the
// numbers that the hub has posted. It notices by their content, and keeps all that is not posted of its own.
func TestLaw05StoreThatWentOnFromAnOlderCopyNoticesAndKeepsItsUsage(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	run := meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true}
	use(t, s, "a", "r1", 60)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: 1}))
	posted := s.Spool().LastSegment
	require.NoError(t, s.Close())
	copied := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, os.CopyFS(copied, os.DirFS(dir)))

	s = open(t, dir, m)
	sample(t, s, noon.Add(100*time.Second), run)
	hub, err := s.Segment(posted + 1)
	require.NoError(t, err)
	require.NotNil(t, hub)
	said := spool.HubProgress{Incarnation: s.Incarnation(), Posted: posted + 1, PostedSHA256: payloadSum(hub)}
	require.NoError(t, s.AcknowledgeUsage(said))
	require.Equal(t, posted+1, s.Spool().Marks.Posted)

	back := open(t, copied, m)
	for at := 70; at <= 200; at += 10 {
		sample(t, back, noon.Add(time.Duration(at)*time.Second), run)
	}
	require.Greater(t, back.Spool().LastSegment, said.Posted, "it has sealed more than the hub has posted")
	before := back.Spool()
	require.ErrorIs(t, back.AcknowledgeUsage(said), spool.ErrOtherStore)
	require.Equal(t, before, back.Spool(), "nothing counts as posted")
	require.NoError(t, back.TakeNewIncarnation(noon.Add(time.Hour)))
	seconds, _ := sealedSeconds(t, back, m)
	_, last := sealedSeconds(t, back, m)
	require.InDelta(t, last.GetEndedAt().AsTime().Sub(noon).Seconds(), seconds, 0, "all that is not archived: the hub "+
		"bills each second once")
}

func payloadSum(env *protocol.Envelope) []byte {
	sum := sha256.Sum256(env.GetPayload())
	return sum[:]
}

// A spool that is full refuses leases and drops nothing: what runs is measured on, and room comes only from the hub.
func TestLaw05FullSpoolRefusesLeasesAndDropsNothing(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1, MaxUnsentBytes: 1000})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(m.node)))
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 1))))
	use(t, s, "a", "r1", 600)
	require.GreaterOrEqual(t, s.Spool().UnsentBytes, int64(1000))
	err = s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 2)))
	require.Equal(t, protocol.Nack_UNAVAILABLE, protocol.RefusalOf(err))
	require.ErrorContains(t, err, "spool is full")
	require.EqualValues(t, 1, s.Leases()["a"].GetLeaseNo(), "the lease that it has goes on")
	seconds, _ := sealedSeconds(t, s, m)
	require.InDelta(t, 600, seconds, 0)
	require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{Incarnation: s.Incarnation(), Posted: s.Spool().LastSegment}))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 2))))
}

func TestStateOfAnotherNodeIsNotTouched(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	require.True(t, fault.Is(s.Identify("node-2", nil), fault.Conflict))
	require.Equal(t, nodeID, s.NodeID())
}

func TestSecondOpenerIsTurnedAway(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	open(t, dir, m)
	_, err := state.Open(dir, state.Options{MinFreeBytes: 1})
	require.True(t, fault.Is(err, fault.Unavailable))
	require.ErrorContains(t, err, "stop that one first")
}

func TestManyDocumentsFitOneTransaction(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	var ws []*protocol.Workload
	for i := range protocol.MaxParts {
		w := workload(fmt.Sprintf("member-%04d", i), 1)
		w.ParametersJson = string(make([]byte, 400))
		ws = append(ws, w)
	}
	v, parts := m.desired(1, ws...)
	require.NoError(t, s.AcceptState(v, parts))
	require.Len(t, s.Accepted().Parts, protocol.MaxParts)
}
