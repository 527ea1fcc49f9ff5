package state_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 3: a lease that is renewed on a full disk counts, also where the batch has first leases beside it. Otherwise what
// runs would end with the lease before. What is new is not started.
func TestALeaseIsRenewedOnAFullDisk(t *testing.T) {
	d := newSmallDisk(t)
	s := d.open()
	require.NoError(t, s.AcceptLeases(d.m.leases(s.Incarnation(), lease("a", 1), lease("b", 1))))
	use(t, s, "a", "r1", 60)
	d.fill(0)
	changed := s.Subscribe()
	for no := uint64(2); no < 5; no++ {
		require.NoError(t, s.AcceptLeases(d.m.leases(s.Incarnation(), lease("a", no), lease("b", 1), lease("new", 1))))
		require.True(t, woken(changed))
	}
	require.ErrorContains(t, s.OpenRun(state.Run{ID: "r2", MemberID: "new", OpenedAt: noon}), "disk_full")

	check := func(why string) {
		t.Helper()
		require.EqualValues(t, 4, s.Leases()["a"].GetLeaseNo(), why)
		require.EqualValues(t, 1, s.Leases()["b"].GetLeaseNo(), why)
		require.Empty(t, s.Unverified(), why)
	}
	check("on the full disk")
	require.NoError(t, s.Close())
	s = d.open()
	check("after a restart on the full disk")
	require.NoError(t, s.Close())
	d.free()
	s = d.open()
	check("with space again")
	sample(t, s, noon.Add(2*time.Minute), meter.Run{RunID: "r1", MemberID: "a", StartedAt: noon, Up: true})
	require.NoError(t, s.Close())
	s = d.open()
	check("once it is in the database")
}

// Where there was never space for the reserve file, a renewed lease is in force, and the hub learns that it is not
// stored.
func TestALeaseThatCannotBeStoredIsInForceAndNotAcknowledged(t *testing.T) {
	d := newSmallDisk(t)
	s := d.openWithoutReserve()
	require.NoError(t, s.AcceptLeases(d.m.leases(s.Incarnation(), lease("a", 1))))
	d.free()
	d.fill(0)
	err := s.AcceptLeases(d.m.leases(s.Incarnation(), lease("a", 2)))
	require.Equal(t, protocol.Nack_UNAVAILABLE, protocol.RefusalOf(err))
	require.EqualValues(t, 2, s.Leases()["a"].GetLeaseNo())
}
