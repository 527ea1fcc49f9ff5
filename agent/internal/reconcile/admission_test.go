package reconcile_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// delegated makes the workload one of a publisher whose delegation has ended an hour ago, first named before that.
func (h *hub) delegated(w *protocol.Workload) (publisher string) {
	h.t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(h.t, err)
	w.Manifest, err = protocol.Sign(protocol.PayloadManifest, w.GetManifest().GetPayload(), protocol.NewEd25519Signer(key))
	require.NoError(h.t, err)
	w.Delegation, err = protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
		Publisher:          &protocol.PublicKey{KeyId: protocol.KeyID(pub), Ed25519: pub},
		RepositoryPrefixes: []string{"apps/hello/"},
		ExpiresAt:          timestamppb.New(time.Now().Add(-time.Hour)),
	}, protocol.NewEd25519Signer(h.cat))
	require.NoError(h.t, err)
	w.FirstNamedAt = timestamppb.New(time.Now().Add(-2 * time.Hour))
	return protocol.KeyID(pub)
}

func TestLaw03TheEndOfADelegationStopsNothing(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.hub.delegated(w)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())

	w = proto.CloneOf(w)
	w.CorrelationId = "other bytes of the same revision"
	f.push(w)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetCorrelationId() == w.GetCorrelationId() && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.Equal(t, before.ID, f.container(w.GetId()).ID)
	require.Equal(t, before.PID, f.container(w.GetId()).PID)
}

func TestARevokedPublisherStopsStartingAndKillsNothing(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	publisher := f.hub.delegated(w)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())

	next := f.hub.bundle.Message()
	next.Version, next.RevokedKeyIds = 2, []string{publisher}
	env, err := protocol.SignMessage(protocol.PayloadBundle, next, protocol.NewEd25519Signer(f.hub.root))
	require.NoError(t, err)
	require.NoError(t, f.store.AcceptBundle(env))
	said := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetReason() == protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED
	})
	require.Equal(t, protocol.WorkloadStatus_READY, said.GetStatus())
	require.Equal(t, before.PID, f.container(w.GetId()).PID)

	require.NoError(t, syscall.Kill(int(before.PID), syscall.SIGKILL))
	said = f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, said.GetReason())
}
