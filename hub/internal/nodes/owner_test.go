package nodes_test

import (
	"crypto/ed25519"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 15: an instance that the node's owner refuses waits there, and the tenant is shown the owner's signed refusal. A
// refusal that the owner has not signed counts as an internal failure.
func TestLaw15TheOwnersSignedRefusalIsShownToTheTenant(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, stranger, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	parts := 0
	refused := func(by ed25519.PrivateKey) instance.Instance {
		i := h.Launch()
		parts++
		state, _ := l.ExpectState(parts)
		s := &protocol.WorkloadStatus{
			MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_FAILED,
			Reason: protocol.WorkloadStatus_OWNER_REFUSED, Detail: "Not here.",
		}
		require.NoError(t, s.RefuseAsOwner(n.ID, protocol.NewEd25519Signer(by)))
		l.Report(state.GetGeneration(), s)
		return h.Instance(i.ID)
	}
	forged := refused(stranger)
	require.Equal(t, protocol.WorkloadStatus_INTERNAL, forged.Lifecycle.Reason)
	require.Empty(t, forged.Members[0].OwnerRefusal)

	i := refused(n.Key)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Deploying, Health: lifecycle.HealthUnknown,
		Reason: protocol.WorkloadStatus_OWNER_REFUSED,
	}, i.Lifecycle)
	m := i.Members[0]
	require.Equal(t, "Not here.", m.Detail)
	env := &protocol.Envelope{}
	require.NoError(t, proto.Unmarshal(m.OwnerRefusal, env))
	v, err := protocol.VerifyOwnerRefusal(&protocol.WorkloadStatus{
		MemberId: m.ID, InstanceId: i.ID, Revision: 1,
		OwnerRefusal: env,
	}, n.ID, n.Key.Public().(ed25519.PublicKey))
	require.NoError(t, err)
	require.Equal(t, "Not here.", v.Message().GetRule())
}

// The refusal that is signed is of the member: no service shows one beside it.
func TestLaw15AServiceShowsNoRefusalOfItsOwn(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i := h.Launch()
	state, _ := l.ExpectState(1)
	s := &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_STARTING,
		Services: []*protocol.ServiceStatus{
			{Name: "main", Status: protocol.ServiceStatus_FAILED, Reason: protocol.WorkloadStatus_OWNER_REFUSED},
			{Name: "other", Status: protocol.ServiceStatus_FAILED, Reason: protocol.WorkloadStatus_IMAGE_PULL_FAILED},
		},
	}
	require.NoError(t, s.RefuseAsOwner(n.ID, protocol.NewEd25519Signer(n.Key)))
	l.Report(state.GetGeneration(), s)
	m := h.Instance(i.ID).Members[0]
	require.Empty(t, m.OwnerRefusal, "the member is not refused")
	require.Len(t, m.Services, 2)
	require.Equal(t, protocol.WorkloadStatus_INTERNAL.Text(), m.Services[0].Reason)
	require.Equal(t, protocol.WorkloadStatus_IMAGE_PULL_FAILED.Text(), m.Services[1].Reason)
}

// What the owner has lifted is no refusal any more, whatever else keeps the member from running.
func TestLaw15ARefusalThatTheOwnerHasLiftedIsNotShown(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i := h.Launch()
	state, _ := l.ExpectState(1)
	s := &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_FAILED,
		Reason: protocol.WorkloadStatus_OWNER_REFUSED, Detail: "Not here.",
	}
	require.NoError(t, s.RefuseAsOwner(n.ID, protocol.NewEd25519Signer(n.Key)))
	l.Report(state.GetGeneration(), s)
	require.NotEmpty(t, h.Instance(i.ID).Members[0].OwnerRefusal)
	l.Report(state.GetGeneration(), &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_FAILED,
		Reason: protocol.WorkloadStatus_IMAGE_PULL_FAILED,
	})
	m := h.Instance(i.ID).Members[0]
	require.Equal(t, protocol.WorkloadStatus_IMAGE_PULL_FAILED, m.Reason)
	require.Empty(t, m.OwnerRefusal)
}
