package slurm_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/starter"
	"github.com/gpuaas/gpuaas/deploy/starter/slurm"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

func TestAMemberThatIsLostWithItsNodeIsNoneOfTheCluster(t *testing.T) {
	machines := starter.Machines(func(allocationID string) (starter.Machine, error) {
		if allocationID == "lost" {
			return starter.Machine{}, errors.New("it is no machine of ours any more")
		}
		return starter.Machine{Address: allocationID, Shell: []string{"false"}, CPUs: 1}, nil
	})
	const controller = "0192f0c0-0000-7000-8000-000000000001"
	nodes, err := machines.Nodes(client.AppInstance{Members: []client.Member{
		{
			ID: "0192f0c0-0000-7000-8000-000000000002", AllocationID: "lost", Role: string(client.MemberRoleWorker),
			Status: client.MemberStatusFailed, StatusReason: client.StatusReasonNodeLost,
		},
		{ID: controller, AllocationID: "lives", Role: string(client.MemberRoleController), Status: client.MemberStatusReady},
	}}, nil, slurm.Dir)
	require.NoError(t, err)
	require.Len(t, nodes, 1)
	require.Equal(t, controller, nodes[0].ID)
}

// A machine that takes the connection and does not answer is one failed member: the worker has the others' state before
// its time is over.
func TestAMachineThatHangsIsOneFailedMember(t *testing.T) {
	const (
		controller = "0192f0c0-0000-7000-8000-000000000001"
		hangs      = "0192f0c0-0000-7000-8000-000000000002"
		serves     = "0192f0c0-0000-7000-8000-000000000003"
	)
	// The shell is called with sh -s -- VERB …; the script on its input is not run.
	answers := []string{"sh", "-c", `case "$3" in alive) echo yes ;; state) echo idle ;; esac`}
	c := slurm.Controller{Machines: func(allocationID string) (starter.Machine, error) {
		m := starter.Machine{Address: allocationID, Shell: answers, CPUs: 1}
		if allocationID == hangs {
			m.Shell = []string{"sh", "-c", "exec sleep 600"}
		}
		return m, nil
	}}
	i := client.AppInstance{}
	for _, id := range []string{controller, hangs, serves} {
		m := client.Member{ID: id, AllocationID: id, Role: string(client.MemberRoleWorker)}
		if id == controller {
			m.Role = string(client.MemberRoleController)
		}
		i.Members = append(i.Members, m)
	}
	ctx, cancel := context.WithTimeout(t.Context(), worker.MembersTimeout)
	defer cancel()
	reports, err := c.Members(ctx, i)
	require.NoError(t, err)
	require.NoError(t, ctx.Err())
	require.Equal(t, map[string]client.MemberReport{
		controller: {Status: client.MemberReportStatusReady},
		hangs:      {Status: client.MemberReportStatusFailed, Reason: client.WorkerReasonNodeUnreachable},
		serves:     {Status: client.MemberReportStatusReady},
	}, reports)
}
