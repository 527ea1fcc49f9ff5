package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

func (l *fieldLife) requireAccess() {
	l.awaitServing()
	models, err := scenario.Get(l.Ctx, l.user.Forward(l.Name, "--project", "main", "http")+"/v1/models")
	require.NoError(l.T, err)
	require.Contains(l.T, models, "org/model")
}

func (l *fieldLife) requireLogs() {
	for service, line := range map[string]string{
		"vllm":    fmt.Sprintf("a stand-in for vLLM: it computes nothing\" model=org/model gpus=%d ", l.GPUs),
		"monitor": "listening", "prepare": "exiting",
	} {
		l.user.AwaitLog(line, "logs", "--project", "main", l.Name, "--service", service)
	}
}

func (l *fieldLife) requireExec() {
	exec := func(args ...string) harness.Output {
		return l.user.Run(filepath.Join(harness.Binaries(l.T), "gpuaas"),
			append([]string{"exec", "--project", "main", l.Name, "-i"}, args...)...)
	}
	got := exec("--service", "vllm", "--", "/usr/local/bin/vllm", "serve", "--no-such-flag")
	require.Equal(l.T, 2, got.Code, got.Err)
	got = exec("--service", "monitor", "--", "/usr/local/bin/monitor")
	require.Equal(l.T, 1, got.Code, got.Err)
	require.Contains(l.T, got.Out, "address already in use", "the command is in the sidecar's network")
}

// unbilledSince adds a step in which the server may not have run to the time that need not be billed.
func (l *fieldLife) unbilledSince(began time.Time) { l.lost += time.Since(began) }

// configure changes the config, which the sidecar reads anew, or which restarts both, as the manifest says.
func (l *fieldLife) configure() {
	before := l.Running(l.i)
	if l.restarts {
		defer l.unbilledSince(time.Now())
	}
	_, err := api.Read[api.AppInstance](l.Operator.ChangeAppInstance(l.Ctx, l.Tenant.Project.ID, l.i.ID,
		api.AppInstanceChange{Config: map[string]any{"read_every_seconds": 0.3}}))
	require.NoError(l.T, err)
	l.Eventually("the sidecar follows its config", func() error {
		now := l.Instance(l.i.ID)
		if !now.Members[0].ConfigCurrent || now.Status != api.AppInstanceStatusRunning {
			return harness.ErrPending
		}
		m, err := monitor(l.Testbed, l.i)
		return harness.Pending(err, m.ReadEverySeconds == 0.3)
	})
	after := l.Running(l.i)
	for _, service := range []string{"vllm", "monitor"} {
		require.Equal(l.T, l.restarts, before[service].ID != after[service].ID, service)
	}
	l.awaitServing()
}

func (l *fieldLife) upgrade() {
	before := l.Running(l.i)
	_, prepared, _ := l.services()
	up, err := l.Tenant.Upgrade(l.Ctx, l.Operator, l.i.ID, l.next, nil)
	require.NoError(l.T, err)
	require.Equal(l.T, l.next, up.Version)
	after := l.Running(l.i)
	require.Equal(l.T, before["vllm"], after["vllm"], "an upgrade touches what differs")
	require.NotEqual(l.T, before["monitor"].ID, after["monitor"].ID)
	// The server, which waits for the preparation, goes on: the upgrade may be there before the preparation has ended.
	l.Eventually("the preparation has ended", func() error {
		_, now, _ := l.services()
		return harness.Pending(nil, now.Status == api.MemberServiceStatusCompleted)
	})
	_, now, _ := l.services()
	require.Equal(l.T, l.restarts, now.ExitedAt.After(prepared.ExitedAt),
		"the preparation is run again where its spec differs: by the config that it has not run with yet")
}

// failUpgrade upgrades to a server that never is ready: the node goes back by itself.
func (l *fieldLife) failUpgrade() {
	before := l.Running(l.i)
	defer l.unbilledSince(time.Now())
	left, err := l.Tenant.Upgrade(l.Ctx, l.Operator, l.i.ID, l.broken, nil)
	require.NoError(l.T, err)
	require.Equal(l.T, l.next, left.Version)
	failed := slices.DeleteFunc(l.Events(l.i.ID), func(e api.Event) bool { return e.Type != "apps.instance.failed" })
	require.Len(l.T, failed, 1)
	require.Equal(l.T, l.reason, failed[0].Data.Reason)
	l.awaitServing()
	require.NotEqual(l.T, before["vllm"].ID, l.Running(l.i)["vllm"].ID)
}

func (l *fieldLife) rollBack() {
	defer l.unbilledSince(time.Now())
	back, err := l.Tenant.Rollback(l.Ctx, l.Operator, l.i.ID, nil)
	require.NoError(l.T, err)
	require.Equal(l.T, l.version, back.Version)
	l.awaitServing()
}

func (l *fieldLife) stopAndStart() {
	defer l.unbilledSince(time.Now())
	_, err := l.Tenant.Stop(l.Ctx, l.Operator, l.i.ID)
	require.NoError(l.T, err)
	require.Empty(l.T, l.Running(l.i))
	_, err = scenario.Get(l.Ctx, l.i.Endpoints[0].URL+"/health")
	require.Error(l.T, err, "nothing answers")
	l.RequireNoDevices()
	idle := timespan{from: time.Now()}
	time.Sleep(2 * harness.MeteringInterval) // long enough that a record which is wrong lies in the idle time alone
	idle.to = time.Now()
	_, err = l.Tenant.Start(l.Ctx, l.Operator, l.i.ID)
	require.NoError(l.T, err)
	l.idle = append(l.idle, idle)
	l.requireOrder(idle.to)
	_, now, _ := l.services()
	require.True(l.T, now.ExitedAt.After(idle.to), "a start after a stop runs the preparation again")
	l.awaitServing()
}

// kill kills the agent, which nobody notices, and the sidecar, which starts again without the server.
func (l *fieldLife) kill() {
	before := l.Running(l.i)
	require.NoError(l.T, l.Agent.Kill9())
	require.NoError(l.T, complete(l.Testbed, l.i, "four"))
	l.RestartAgent(l.Agent)
	require.Equal(l.T, before, l.Running(l.i))
	server, _, sidecar := l.services()
	l.Explain(harness.Faults{Why: "a sidecar is killed", Restarts: 1})
	require.NoError(l.T, unix.Kill(int(before["monitor"].PID), unix.SIGKILL))
	l.Eventually("the sidecar runs again", func() error {
		_, _, now := l.services()
		return harness.Pending(nil, now.Restarts == sidecar.Restarts+1 && now.Status == "ready")
	})
	require.Equal(l.T, before["vllm"], l.Running(l.i)["vllm"], "the server has not noticed")
	now, _, _ := l.services()
	require.Equal(l.T, server.Restarts, now.Restarts)
	l.awaitServing()
}

// reboot cuts the node's power: the app comes up again in its order, and what was done is not done again.
func (l *fieldLife) reboot() {
	_, prepared, _ := l.services()
	cached := func() string { return fmt.Sprintf("/proc/%d/root/cache/weights", l.Running(l.i)["vllm"].PID) }
	require.NoError(l.T, os.WriteFile(cached(), []byte("weights"), 0o600))
	began := time.Now()
	if l.GPUs > 0 {
		began = began.Add(-harness.UnconfirmedMax)
		l.ExplainUnconfirmed(1)
	}
	defer l.unbilledSince(began)
	off, on := l.Reboot(l.Agent)
	l.Eventually("the hub sees the app run again", func() error {
		now := l.Instance(l.i.ID)
		if now.Status != api.AppInstanceStatusRunning || now.Health != api.AppInstanceHealthHealthy {
			return harness.ErrPending
		}
		_, _, sidecar := l.services()
		return harness.Pending(nil, sidecar.StartedAt.After(on) && sidecar.Status == "ready")
	})
	l.idle = append(l.idle, timespan{off, on})
	l.requireOrder(on)
	_, now, _ := l.services()
	require.Equal(l.T, prepared.ExitedAt, now.ExitedAt, "the preparation is not run again")
	kept, err := os.ReadFile(cached())
	require.NoError(l.T, err)
	require.Equal(l.T, "weights", string(kept), "what is in the volume")
	l.awaitServing()
}

// decommission leaves nothing on the node, and a bill for what ran.
func (l *fieldLife) decommission() {
	l.Decommission(l.i)
	require.Zero(l.T, l.ContainersOn(l.Agent, l.i))
	l.RequireNoDevices()
	records, err := filepath.Glob(filepath.Join(l.Agent.Config.RunDir, "network", "members", "*"))
	require.NoError(l.T, err)
	require.Empty(l.T, records)
	_, err = netlink.LinkByName(l.Agent.Config.Bridge)
	require.ErrorAs(l.T, err, &netlink.LinkNotFoundError{})

	l.FinalPostings(l.i)
	usage, err := l.Tenant.Usage(l.Ctx, l.i.ID)
	require.NoError(l.T, err)
	first, last := usage[0].StartedAt, usage[0].EndedAt
	accelerated := false
	for _, u := range usage {
		for _, idle := range l.idle {
			require.False(l.T, u.StartedAt.Before(idle.to) && u.EndedAt.After(idle.from),
				"%s from %s to %s is billed; nothing ran from %s to %s", u.Meter, u.StartedAt, u.EndedAt, idle.from, idle.to)
		}
		if u.StartedAt.Before(first) {
			first = u.StartedAt
		}
		if u.EndedAt.After(last) {
			last = u.EndedAt
		}
		accelerated = accelerated || string(u.Meter) == protocol.MeterAcceleratorSeconds
	}
	require.Equal(l.T, l.GPUs > 0, accelerated)
	const slack = 5 * time.Second // what the agent had not saved when the power was cut
	harness.RequireBilledBetween(l.T, harness.RequireNoOverlap(l.T, usage), last.Sub(first)-l.lost-slack,
		last.Sub(first))
}
