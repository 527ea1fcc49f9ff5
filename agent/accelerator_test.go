package agent_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// What happens to a workload on one accelerator, by the accelerator's state.
func TestAnAcceleratorsStateDecides(t *testing.T) {
	w := agent.Workload{MemberID: "m", Revision: 1, Services: []agent.Service{{
		Name: "app", Images: []string{"i"}, SpecDigest: "d", AcceleratorIDs: []string{"gpu0", "gpu1"},
	}}}
	desired, leases := agent.Desired{Workloads: []agent.Workload{w}}, agent.Leases{
		"m": {MemberID: "m", No: 1, ExpiresAt: noon.Add(agent.DefaultReadinessTimeout * 100)},
	}
	observed := agent.Observed{
		Networks: []agent.Network{{MemberID: "m", Service: "app", Ready: true}}, Images: map[string]bool{"i": true},
	}
	container := agent.Container{
		ID: "m.1", MemberID: "m", Service: "app", Revision: 1, SpecDigest: "d", Status: agent.Running, StartedAt: noon,
		ReadyAt: noon, AcceleratorIDs: []string{"gpu0", "gpu1"},
	}
	const none = protocol.WorkloadStatus_REASON_UNSPECIFIED
	for _, c := range []struct {
		state          agent.AcceleratorState
		starts, stops  bool
		before, during protocol.WorkloadStatus_Status
		whyNot, why    protocol.WorkloadStatus_Reason
	}{
		{0, true, false, protocol.WorkloadStatus_STARTING, protocol.WorkloadStatus_READY, none, none},
		{
			agent.AcceleratorAwaited, false, false, protocol.WorkloadStatus_STARTING, protocol.WorkloadStatus_READY,
			none, none,
		},
		{
			agent.AcceleratorUnanswered, false, false, protocol.WorkloadStatus_STARTING, protocol.WorkloadStatus_READY,
			protocol.WorkloadStatus_DEVICE_FAULT, none,
		},
		{
			agent.AcceleratorFaulty, false, false, protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_DEGRADED,
			protocol.WorkloadStatus_DEVICE_FAULT, protocol.WorkloadStatus_DEVICE_FAULT,
		},
		{
			agent.AcceleratorNeedsReset, false, true, protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_DEGRADED,
			protocol.WorkloadStatus_DEVICE_FAULT, protocol.WorkloadStatus_DEVICE_FAULT,
		},
		{
			agent.AcceleratorQuarantined, false, true, protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_DEGRADED,
			protocol.WorkloadStatus_DEVICE_FAULT, protocol.WorkloadStatus_DEVICE_FAULT,
		},
		{
			agent.AcceleratorMissing, false, true, protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_DEGRADED,
			protocol.WorkloadStatus_DEVICE_FAULT, protocol.WorkloadStatus_DEVICE_FAULT,
		},
	} {
		o := observed
		if c.state != 0 {
			o.Unusable = map[string]agent.AcceleratorState{"gpu1": c.state}
		}
		_, started := first(agent.Diff(desired, leases, o, noon)).(agent.StartContainer)
		require.Equal(t, c.starts, started, c.state.Detail("gpu1"))
		status := agent.Statuses(desired, leases, o, noon)[0]
		require.Equal(t, c.before, status.GetStatus())
		require.Equal(t, c.whyNot, status.GetReason())

		o.Containers = []agent.Container{container}
		stop, stopped := first(agent.Diff(desired, leases, o, noon)).(agent.StopContainer)
		require.Equal(t, c.stops, stopped, c.state.Detail("gpu1"))
		if stopped {
			require.Equal(t, "device_lost", stop.Why)
		}
		status = agent.Statuses(desired, leases, o, noon)[0]
		require.Equal(t, c.during, status.GetStatus())
		require.Equal(t, c.why, status.GetReason())
		require.Equal(t, c.why == none, status.GetDetail() == "")
	}
	requireAskedExit(t, desired, leases, observed, container)
}

// requireAskedExit: a container that ends because its accelerator is gone has not failed.
func requireAskedExit(t *testing.T, desired agent.Desired, leases agent.Leases, observed agent.Observed,
	container agent.Container,
) {
	t.Helper()
	observed.Unusable = map[string]agent.AcceleratorState{"gpu0": agent.AcceleratorMissing}
	container.Status = agent.Exited
	observed.Containers = []agent.Container{container}
	record, is := first(agent.Diff(desired, leases, observed, noon)).(agent.RecordExit)
	require.True(t, is)
	require.False(t, record.Unasked)
}

func first(actions []agent.Action) agent.Action {
	if len(actions) == 0 {
		return nil
	}
	return actions[0]
}
