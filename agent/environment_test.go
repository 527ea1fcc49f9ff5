package agent_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

const environmentID = "project.digest"

// notebook is a workload whose main service needs an environment.
func notebook(memberID string) agent.Workload {
	image := "org/acme/notebook/app@sha256:1"
	return agent.Workload{
		MemberID: memberID, InstanceID: "i-" + memberID, Revision: 1, ReadinessTimeout: time.Minute,
		Services: []agent.Service{
			{
				Name: "main", Images: []string{image}, SpecDigest: "spec-main", Environment: environmentID,
				Spec: &protocol.Service{},
				DependsOn: []agent.Dependency{{
					Service: "environment", Condition: protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY,
				}},
			},
			{
				Name: "environment", Images: []string{image}, SpecDigest: "spec-environment", Environment: environmentID,
				BuildsEnvironment: true, BuildTimeout: time.Hour,
				Spec: &protocol.Service{RestartPolicy: protocol.Service_NEVER},
			},
		},
	}
}

// notebookMachine has image and networks of the members, and the environment where it is installed.
func notebookMachine(installed bool, members ...string) (agent.Observed, agent.Leases) {
	o := agent.Observed{
		Members: map[string]agent.Member{}, Images: map[string]bool{"org/acme/notebook/app@sha256:1": true},
		Environments: map[string]bool{environmentID: installed},
	}
	leases := agent.Leases{}
	for _, id := range members {
		o.Members[id] = agent.Member{ID: id}
		leases[id] = agent.Lease{MemberID: id, No: 1, ExpiresAt: noon.Add(time.Hour)}
		for _, service := range []string{"main", "environment"} {
			o.Networks = append(o.Networks, agent.Network{MemberID: id, Service: service, Ready: true})
		}
	}
	return o, leases
}

// starts are the services that Diff starts, with their members.
func starts(actions []agent.Action) []string {
	var out []string
	for _, a := range actions {
		if start, is := a.(agent.StartContainer); is {
			out = append(out, start.MemberID+" "+start.Service.Name)
		}
	}
	return out
}

func TestAnEnvironmentIsInstalledByOneMemberAndThenUsed(t *testing.T) {
	desired := agent.Desired{Workloads: []agent.Workload{notebook("a"), notebook("b")}}
	o, leases := notebookMachine(false, "a", "b")
	require.Equal(t, []string{"a environment"}, starts(agent.Diff(desired, leases, o, noon)))

	builder := agent.Container{
		ID: "a.1", MemberID: "a", Service: "environment", Revision: 1, SpecDigest: "spec-environment",
		Environment: environmentID, Status: agent.Running, StartedAt: noon.Add(-30 * time.Minute),
		Restart: protocol.Service_NEVER,
	}
	o.Containers = []agent.Container{builder}
	require.Empty(t, agent.Diff(desired, leases, o, noon))
	status := agent.Statuses(desired, leases, o, noon)[0]
	require.Equal(t, protocol.WorkloadStatus_STARTING, status.GetStatus(), "the readiness timeout does not count yet")
	late := agent.Statuses(desired, leases, o, noon.Add(40*time.Minute))[0]
	require.Equal(t, protocol.WorkloadStatus_READINESS_TIMEOUT, late.GetReason())

	o.Environments[environmentID] = true
	require.Equal(t, []string{"a main", "b main"}, starts(agent.Diff(desired, leases, o, noon)))
	require.Equal(t, protocol.ServiceStatus_COMPLETED, agent.Statuses(desired, leases, o,
		noon)[1].GetServices()[1].GetStatus())

	// A member that finds it installed needs no network for the service that would install it.
	o.Containers = nil
	o.Networks = slices.DeleteFunc(o.Networks, func(n agent.Network) bool { return n.Service == "environment" })
	require.Equal(t, []string{"a main", "b main"}, starts(agent.Diff(desired, leases, o, noon)))
}

func TestAnActionUnderWayMayBeInstallingAnEnvironment(t *testing.T) {
	desired := agent.Desired{Workloads: []agent.Workload{notebook("a"), notebook("b")}}
	o, leases := notebookMachine(false, "a", "b")
	o.Busy = map[string]agent.Work{"a": {Services: map[string]bool{"environment": true}}}
	require.Empty(t, starts(agent.Diff(desired, leases, o, noon)))
}

// An upgrade installs its environment beside the container that serves, and replaces that only then.
func TestAnUpgradeInstallsItsEnvironmentWhileItsFallbackServes(t *testing.T) {
	old, next := notebook("a"), notebook("a")
	next.Revision, next.Fallback = 2, &old
	for i := range next.Services {
		next.Services[i].SpecDigest += "-2"
		next.Services[i].Environment = "project.next"
	}
	o, _ := notebookMachine(true, "a")
	leases := week("a")
	o.Networks = o.Networks[:1]
	m := &machine{Observed: o, now: noon, asked: map[string]bool{}}
	serving := agent.Container{
		ID: "a.1", MemberID: "a", Service: "main", Revision: 1, SpecDigest: "spec-main", Status: agent.Running,
		StartedAt: noon.Add(-time.Hour), ReadyAt: noon.Add(-time.Hour),
	}
	done := agent.Container{
		ID: "a.0", MemberID: "a", Service: "environment", Revision: 1, SpecDigest: "spec-environment",
		Status: agent.Exited, ExitRecorded: true, Environment: environmentID, StartedAt: noon.Add(-2 * time.Hour),
	}
	m.Containers = []agent.Container{done, serving}
	d := desired(next)
	pass := func() (actions []agent.Action) {
		actions = agent.Diff(d, leases, m.Observed, noon)
		for _, a := range actions {
			m.do(a)
		}
		return actions
	}
	require.Equal(t, []agent.Action{agent.RemoveContainer{
		MemberID: "a", ContainerID: "a.0", Service: "environment",
	}}, pass())
	setup, is := pass()[0].(agent.SetupNetwork)
	require.True(t, is)
	require.Equal(t, []string{"environment"}, setup.Services)
	require.Equal(t, setup.Services, setup.Unpublished, "the ports stay with the container that serves")
	require.Len(t, setup.Start, 1)
	require.Equal(t, []agent.Container{serving}, m.Containers[:1])
	require.Equal(t, "environment", m.Containers[1].Service)
	require.Empty(t, pass(), "it waits")
	require.Equal(t, noon.Add(time.Hour+30*time.Second), agent.NextChange(d, leases, m.Observed, noon))

	late := agent.Diff(d, leases, m.Observed, noon.Add(2*time.Hour))
	require.IsType(t, agent.FallBack{}, late[0])
	failed := m.Observed
	failed.Members = map[string]agent.Member{"a": {ID: "a", FellBackFrom: 2}}
	back := agent.Diff(d, leases, failed, noon)
	require.Len(t, back, 1, "the container that serves goes on")
	require.Equal(t, m.Containers[1].ID, back[0].(agent.StopContainer).ContainerID)

	m.Environments["project.next"] = true
	m.Containers[1].Status, m.Containers[1].ExitRecorded = agent.Exited, true
	stop, is := pass()[0].(agent.StopContainer)
	require.True(t, is)
	require.Equal(t, "a.1", stop.ContainerID)
}

func TestAProjectsEnvironmentIsNoOthers(t *testing.T) {
	ids := map[string]bool{}
	for _, change := range []func(*protocol.Workload){
		func(*protocol.Workload) {},
		func(w *protocol.Workload) { w.ProjectId = "other" },
		func(w *protocol.Workload) { w.Services[0].Image = "apps/x/y@sha256:2" },
		func(w *protocol.Workload) { w.Services[0].Environment.Requirements = []string{"scipy"} },
	} {
		w := &protocol.Workload{ProjectId: "project", Services: []*protocol.Service{{
			Image: "apps/x/y@sha256:1", Environment: &protocol.Environment{
				Requirements: []string{"numpy"}, Path: "/opt/environment", Python: "/usr/bin/python3",
			},
		}}}
		change(w)
		made := agent.NewWorkload("m", w)
		require.Equal(t, []string{made.Services[0].Environment}, made.EnvironmentIDs())
		ids[made.Services[0].Environment] = true
	}
	require.Len(t, ids, 4)
}
