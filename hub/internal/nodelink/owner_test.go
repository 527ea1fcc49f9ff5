package nodelink_test

import (
	"crypto/ed25519"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 15: an instance that the node's owner refuses waits there, and the tenant is shown the owner's signed refusal. A
// refusal that the owner has not signed counts as an internal failure.
func TestLaw15TheOwnersSignedRefusalIsShownToTheTenant(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, stranger, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	parts := 0
	refused := func(by ed25519.PrivateKey) instance.Instance {
		i := h.launch()
		parts++
		state, _ := l.state(parts)
		s := &protocol.WorkloadStatus{
			MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: "failed",
			Reason: "owner_refused", Detail: "Not here.",
		}
		require.NoError(t, s.RefuseAsOwner(n.id, protocol.NewEd25519Signer(by)))
		l.report(state.GetGeneration(), s)
		return h.instance(i.ID)
	}
	forged := refused(stranger)
	require.Equal(t, instance.ReasonInternal, forged.Lifecycle.Reason)
	require.Empty(t, forged.Members[0].OwnerRefusal)

	i := refused(n.key)
	require.Equal(t, instance.Lifecycle{
		Status: instance.Deploying, Health: instance.HealthUnknown,
		Reason: instance.ReasonOwnerRefused,
	}, i.Lifecycle)
	m := i.Members[0]
	require.Equal(t, "Not here.", m.Detail)
	env := &protocol.Envelope{}
	require.NoError(t, proto.Unmarshal(m.OwnerRefusal, env))
	v, err := protocol.VerifyOwnerRefusal(&protocol.WorkloadStatus{
		MemberId: m.ID, InstanceId: i.ID, Revision: 1,
		OwnerRefusal: env,
	}, n.id, n.key.Public().(ed25519.PublicKey))
	require.NoError(t, err)
	require.Equal(t, "Not here.", v.Message().GetRule())
}
