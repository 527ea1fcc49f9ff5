package reconcile_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestLaw03LeasedWorkloadStartsAgainWithoutAHub(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	endpoint := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY).GetEndpoints()[0]
	f.hub.away.Store(true)
	f.stop()
	// As after a power cut: no process, no network, and nothing of them in /run.
	f.coldBoot(w.GetId())
	f.start()
	again := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.True(t, proto.Equal(endpoint, again.GetEndpoints()[0]), "under the same port")
	get(t, url(again, "/"))
}

// coldBoot removes every container and network behind the agent's back.
func (f *fixture) coldBoot(memberID string) {
	f.t.Helper()
	rt, err := runtime.Open(f.ctx(), f.rtCfg)
	require.NoError(f.t, err)
	require.NoError(f.t, rt.RemoveMember(f.ctx(), memberID))
	require.NoError(f.t, rt.Close())
	require.NoError(f.t, f.nw.RemoveMember(f.ctx(), memberID))
}

func TestLeaseEndsAndItsRenewalStartsAgain(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	v, parts := f.hub.desired(w)
	require.NoError(t, f.store.AcceptState(v, parts))
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_PENDING)
	f.lease(f.hub.newLease(w.GetId(), time.Hour))
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	ended := f.hub.newLease(w.GetId(), 0)
	f.lease(ended)
	require.Equal(t, protocol.WorkloadStatus_LEASE_ENDED, f.untilStatus(w.GetId(), protocol.WorkloadStatus_STOPPED).
		GetReason())
	f.lease(f.hub.newLease(w.GetId(), time.Hour))
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)

	spent := f.hub.newLease(w.GetId(), time.Hour)
	spent.CapNanos = 1
	f.lease(spent)
	require.Equal(t, protocol.WorkloadStatus_LEASE_ENDED, f.untilStatus(w.GetId(), protocol.WorkloadStatus_STOPPED).
		GetReason())
}

func TestSpentRoundsUpAndDoesNotOverflow(t *testing.T) {
	l := &protocol.Lease{ExpiresAt: timestamppb.Now(), Prices: []*protocol.FrozenPrice{
		{Meter: "a", PriceNanos: 10, PerQuantity: 3},
		{Meter: "b", PriceNanos: 1 << 62, PerQuantity: 1},
		{Meter: "free", PriceNanos: 5},
	}}
	require.Equal(t, "4", spent(l, map[string]int64{"a": 1}))
	require.Equal(t, "0", spent(l, map[string]int64{"free": 1 << 60}))
	require.Equal(t, strconv.FormatUint(1<<63, 10), spent(l, map[string]int64{"b": 2}))
}

func spent(l *protocol.Lease, used map[string]int64) string { return agent.Spent(l, used).String() }

// A tenant's lease may end with run_unbilled; the owner of the machine says whether that counts there.
func TestLaw15AWorkloadRunsUnbilledOnlyWhereTheOwnerAllowsIt(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	v, parts := f.hub.desired(w)
	require.NoError(t, f.store.AcceptState(v, parts))
	ended := f.hub.newLease(w.GetId(), 0)
	ended.EndPolicy = "run_unbilled"
	f.lease(ended)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_STOPPED && s.GetReason() == protocol.WorkloadStatus_LEASE_ENDED
	})
	f.stop()
	f.configure = func(c *reconcile.Config) { c.AllowUnbilled = true }
	f.start()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
}
