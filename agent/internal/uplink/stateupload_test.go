package uplink_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 16: a node's newest leases may come from several batches. A restored hub gets all of them, or it would bill
// nothing of those that it misses.
func TestLaw16ARestoredHubIsToldTheLeasesOfAllBatches(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	h.setWelcome(func(*protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			ProtocolVersion: protocol.Version, HubTime: timestamppb.Now(), SessionNo: 1, RequestStateUpload: true,
		}}}
	})
	want := map[string]uint64{}
	for _, members := range [][]string{{"ended-1", "ended-2"}, {"made"}} {
		batch := &protocol.LeaseBatch{NodeId: nodeID, Incarnation: n.store.Incarnation(), Epoch: 1}
		for _, id := range members {
			batch.Leases = append(batch.Leases, &protocol.Lease{
				MemberId: id, LeaseNo: 1,
				ExpiresAt: timestamppb.New(time.Now().Add(time.Hour)),
			})
			want[id] = 1
		}
		env, err := protocol.SignMessage(protocol.PayloadLeases, batch, protocol.NewEd25519Signer(h.lease))
		require.NoError(t, err)
		v, err := protocol.VerifyLeases(env, n.store.Bundle(), n.creds.Node())
		require.NoError(t, err)
		require.NoError(t, n.store.AcceptLeases(v))
	}
	n.run(uplink.Config{})
	told := map[string]uint64{}
	h.next().until(func(m *protocol.NodeMessage) bool {
		for _, env := range m.GetStateUpload().GetLeases() {
			batch := &protocol.LeaseBatch{}
			require.NoError(t, proto.Unmarshal(env.GetPayload(), batch))
			for _, l := range batch.GetLeases() {
				told[l.GetMemberId()] = l.GetLeaseNo()
			}
		}
		return m.GetStateUpload().GetLast()
	})
	require.Equal(t, want, told)
}
