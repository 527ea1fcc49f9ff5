package state_test

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

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

// A document that the disk gives no more keeps no other from a hub that was restored.
func TestADocumentThatCannotBeReadIsLeftOut(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(1, workload("a", 1), workload("b", 1))
	require.NoError(t, s.AcceptState(v, parts))
	sum := sha256.Sum256(parts[0])
	require.NoError(t, s.Lose("part/"+hex.EncodeToString(sum[:]), 0))
	left, unreadable, err := s.Documents()
	require.NoError(t, err)
	require.Equal(t, parts[1:], left)
	require.Len(t, unreadable, 1)
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
	s.SetAdmissions(map[string]admission.Decision{sum: {Admitted: true}})
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
	s.SetAdmissions(map[string]admission.Decision{s.Accepted().Parts[0].SHA256Hex(): {
		Reason: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
	}})
	require.False(t, wanted())
	s.SetAdmissions(map[string]admission.Decision{s.Accepted().Parts[0].SHA256Hex(): {Admitted: true}})
	run.Revision = 1
	require.False(t, wanted(), "another revision")
	run.Revision = 2
	require.True(t, wanted())
	require.NoError(t, s.CloseRun(run.ID))

	next := workload("a", 3)
	next.Fallback = workload("a", 2)
	v, parts = m.desired(2, next)
	require.NoError(t, s.AcceptState(v, parts))
	s.SetAdmissions(map[string]admission.Decision{s.Accepted().Parts[0].SHA256Hex(): {Admitted: true}})
	require.False(t, wanted(), "the fallback is not admitted")
	s.SetAdmissions(map[string]admission.Decision{s.Accepted().Parts[0].SHA256Hex(): {FallbackAdmitted: true}})
	require.True(t, wanted(), "until the images of the other one are there")
	require.NoError(t, s.CloseRun(run.ID))
	require.NoError(t, s.UpdateMember("a", func(m *state.Member) { m.ConfirmedRevision = 3 }))
	require.False(t, wanted(), "the node does not go back any more")
	require.NoError(t, s.UpdateMember("a", func(m *state.Member) { m.ConfirmedRevision, m.FellBackFrom = 0, 3 }))
	run.Revision = 3
	require.False(t, wanted(), "the member went back")
	run.Revision = 2
	require.True(t, wanted())
	require.NoError(t, s.CloseRun(run.ID))

	gone, _ := m.desired(3)
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

// A part that comes later is bounded like one that comes with its state: the next start reads both the same way.
func TestAPartOfTooManyElementsIsRefusedWheneverItComes(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	large := workload("a", 1)
	large.Services = []*protocol.Service{{Env: make([]*protocol.EnvVar, protocol.MaxElements)}}
	for i := range large.Services[0].Env {
		large.Services[0].Env[i] = &protocol.EnvVar{}
	}
	v, parts := m.desired(1, large)
	require.ErrorIs(t, s.AcceptState(v, parts), protocol.ErrTooManyElements)
	require.NoError(t, s.AcceptState(v, nil))
	require.ErrorIs(t, s.AcceptPart(parts[0]), protocol.ErrTooManyElements)
}
