package chaos_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// What a round does, in this order; nodeBack and hubBack kill the whole program while the instance runs.
const (
	launch        = "launch"
	launchNew     = "launch of an image that the node has not got"
	nodeBack      = "return of the node"
	hubBack       = "return of the hub"
	upgrade       = "upgrade"
	failedUpgrade = "failed upgrade"
	stop          = "stop"
	start         = "start"
	decommission  = "decommission"
)

const (
	// stepLimit bounds one step with the deaths in it; none that passes reaches it.
	stepLimit = 90 * time.Second
	// lingers is how long a point that its step has not passed yet may take, before it is tried in another one.
	lingers = 3 * time.Second
	// killLimit bounds the whole test, on a machine that does much else.
	killLimit = 15 * time.Minute
	// tries is how often a point is armed at most: two deaths at once may keep each other from their points.
	tries = 4
	// anyHit is up to which hit the points are counted that every step passes many times.
	anyHit = 4
)

// passedIn says by the beginning of its name in which steps a point is passed.
func passedIn(point string) []string {
	starts, ends := []string{launch, upgrade, start}, []string{upgrade, stop, decommission}
	acts := []string{launch, upgrade, stop, start, decommission}
	for _, known := range []struct {
		prefix string
		steps  []string
	}{
		{"agent/session/", []string{nodeBack}},
		{"agent/accept/", starts},
		{"agent/leases/", []string{launch}},
		{"agent/pull/", []string{launchNew}},
		{"agent/network/gone", []string{decommission}},
		{"agent/network/", []string{launch}},
		{"agent/share/", []string{launch}},
		{"agent/attach/", []string{launch}},
		{"agent/start/", starts},
		{"agent/ready/", starts},
		{"agent/confirm/", []string{upgrade}},
		{"agent/fallback/", []string{failedUpgrade}},
		{"agent/stop/", ends},
		{"agent/exit/", ends},
		{"agent/remove/", ends},
		{"agent/detach/", []string{decommission}},
		{"agent/unshare/", []string{decommission}},
		{"agent/retire/", []string{decommission}},
		{"agent/report/acknowledged", []string{decommission}},
		{"agent/", acts},
		{"hub/database/", []string{hubBack}},
		{"hub/create/", []string{launch}},
		{"hub/leases/", []string{launch}},
		{"hub/hello/", []string{nodeBack}},
		{"hub/session/registered", []string{nodeBack}},
		{"hub/gone/", []string{nodeBack}},
		{"hub/report/freed", []string{decommission}},
		{"hub/", acts},
	} {
		if strings.HasPrefix(point, known.prefix) {
			return known.steps
		}
	}
	return nil
}

// alone are the points that are passed only while no other instance is on the node.
func alone(point string) bool {
	return strings.HasPrefix(point, "agent/share/") || strings.HasPrefix(point, "agent/unshare/")
}

// enrolls are the points that a node passes once in its life.
func enrolls(point string) bool { return strings.Contains(point, "/enroll/") }

// often reports whether every step passes the point many times, so that the hit may be another one each time.
func often(point string) bool {
	return slices.Contains([]string{
		"agent/state/writing", "agent/state/synced", "agent/action/begun", "agent/action/done",
		"hub/db/committing", "hub/db/committed",
	}, point)
}

// killTest is one run over all points.
type killTest struct {
	*harness.Testbed
	random *rand.Rand
	// hubProgram and node are the hub and the agent; mortals those that are started again when they have died.
	hubProgram, agentProgram *crashable
	programs                 []*crashable
	// due are the points that are still to be reached, and how often each was armed.
	due    []string
	armed  map[string]int
	oracle *harness.ContainerdOracle
	// shipped counts the versions whose image no node has pulled.
	shipped int
}

// TestEverythingResumesAfterAKillAtAnyPoint kills hub and agent at each of their failpoints while an instance goes
// through its life, starts them again, and holds everything against the laws: nothing is stuck, lost, doubled or left
// over. The environment may give the seed (GPUAAS_E2E_SEED), how often each point is reached (GPUAAS_E2E_KILL_REPEATS),
// and a part of the names of the points to be reached (GPUAAS_E2E_KILL_POINTS).
func TestEverythingResumesAfterAKillAtAnyPoint(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("GPUAAS_E2E_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("GPUAAS_E2E_SEED=%d", seed)
	k := newKillTest(t, seed)
	// The first instance caches the image and makes the directories of the first start; what it leaves is the state to
	// return to.
	k.Decommission(k.Launch("first"))

	k.rounds(func(point string) bool { return alone(point) })
	keeper := k.Launch("keeper")
	pid := k.PidOf(keeper)
	for range k.repeats() {
		k.rounds(func(point string) bool { return !alone(point) && !enrolls(point) })
	}
	require.Equal(t, pid, k.PidOf(keeper), "the one that nobody touched is the very same process")
	k.RequireAnswer(keeper)
	k.Decommission(keeper)
	k.requireWhole(instanceHistory{id: keeper.ID, member: keeper.Members[0].ID, events: []string{
		"requested", "deploying",
		"running", "decommission_requested", "decommissioned",
	}, uninterrupted: true})
	for _, m := range k.programs {
		t.Logf("%s died %d times at its points; %d starts took %s", m.name, m.crashes, m.starts,
			m.starting.Round(time.Millisecond))
	}
}

// repeats is how often every point is reached.
func (k *killTest) repeats() int {
	n, err := strconv.Atoi(os.Getenv("GPUAAS_E2E_KILL_REPEATS"))
	if err != nil {
		return 1
	}
	return n
}

// newKillTest makes a platform of programs that were built with failpoints. The node's enrollment dies at each of its
// points.
func newKillTest(t *testing.T, seed uint64) *killTest {
	t.Helper()
	k := &killTest{Testbed: harness.New(t), random: rand.New(rand.NewPCG(seed, 0)), armed: map[string]int{}}
	ctx, cancel := context.WithTimeout(context.Background(), killLimit)
	t.Cleanup(cancel)
	k.Ctx = ctx
	k.hubProgram = &crashable{
		name: "hub", process: func() *devcluster.Process { return k.Hub.Process },
		start: func() error { return k.Hub.Restart(k.Ctx) },
	}
	k.agentProgram = &crashable{name: "agent", process: func() *devcluster.Process {
		return k.Agent.Process
	}, start: func() error { return k.Agent.Restart(k.Ctx) }}
	k.programs = []*crashable{k.hubProgram}
	for _, m := range []*crashable{k.hubProgram, k.agentProgram} {
		m.arms, m.crashedAt = filepath.Join(k.Dir, "arms-"+m.name), map[string]bool{}
	}
	k.StartContainerd()
	h := k.HubConfig()
	h.Bin, h.Env = harness.FailpointBinaries(t), k.hubProgram.env()
	k.StartHub(h)
	k.NewTenant("acme")

	c := k.AgentConfig("node")
	c.Bin, c.Env = harness.FailpointBinaries(t), k.agentProgram.env()
	c.ExtraArgs = []string{
		"--metering-interval", harness.MeteringInterval.String(), "--usage-interval", "1s", "--resync", "5s",
		"--report-interval",
		"250ms", "--dial-retry-max", "500ms",
	}
	k.Agent = &devcluster.Agent{Config: c}
	k.Agents = append(k.Agents, k.Agent)
	k.enroll()
	t.Cleanup(func() {
		require.NoError(t, k.Agent.Stop())
		require.NoError(t, devcluster.Uninstall(context.WithoutCancel(k.Ctx), c))
	})

	k.ShipApp()
	k.ShipVersion("2.0.0", harness.FirstGreeting, harness.SecondGreeting)
	k.ShipVersion("3.0.0", "path: /healthz", "path: /nowhere", "readiness_timeout_seconds: 30",
		"readiness_timeout_seconds: 2")
	k.Allocate(k.Agent)
	k.oracle = k.WatchContainerd(c.ContainerdNamespace)
	return k
}

// enroll enrolls the node and kills both programs at each point of that: a join token makes one node, however often it
// is shown.
func (k *killTest) enroll() {
	k.T.Helper()
	token, err := scenario.JoinToken(k.Ctx, k.Admin())
	require.NoError(k.T, err)
	k.Agent.Config.JoinToken = token
	for _, point := range slices.DeleteFunc(failpoint.Names(), func(p string) bool { return !enrolls(p) }) {
		if strings.HasPrefix(point, "hub/") {
			k.hubProgram.arm(k.T, point, 1)
			continue
		}
		k.agentProgram.arm(k.T, point, 1)
		require.Error(k.T, k.agentProgram.start(), point)
		require.NoError(k.T, k.agentProgram.recordCrash())
		require.True(k.T, k.agentProgram.crashedAt[point], "%s is not reached", point)
	}
	k.restartWhile(func(context.Context) error { return k.agentProgram.startUntilServing() })
	require.Empty(k.T, k.hubProgram.point, "it is not reached")
	k.programs = append(k.programs, k.agentProgram)
	k.Agent.Config.JoinToken = ""
	_, err = scenario.AwaitNode(k.Ctx, k.Admin(), k.Agent.Ready.NodeID)
	require.NoError(k.T, err)
}

// restartWhile runs do and restarts the programs that crash meanwhile.
func (k *killTest) restartWhile(do func(ctx context.Context) error) {
	k.T.Helper()
	ctx, cancel := context.WithTimeout(k.Ctx, stepLimit)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	for {
		hub, agent := k.exits()
		select {
		case err := <-done:
			require.NoError(k.T, err)
			return
		case <-hub:
		case <-agent:
		}
		k.restartCrashed()
	}
}

// exits are closed when hub and agent end; agent is nil as long as the node enrolls.
func (k *killTest) exits() (hub, agent <-chan struct{}) {
	if slices.Contains(k.programs, k.agentProgram) {
		agent = k.agentProgram.process().Exited()
	}
	return k.hubProgram.process().Exited(), agent
}

// until waits until the condition returns no error, and restarts the programs that crash meanwhile.
func (k *killTest) until(what string, condition func(ctx context.Context) error) {
	k.T.Helper()
	k.restartWhile(func(ctx context.Context) error {
		var last error
		for {
			err := condition(ctx)
			if err == nil {
				return nil
			}
			if ctx.Err() == nil {
				last = err
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s: %w", what, last)
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
}

// restartCrashed restarts the programs that have crashed at their point.
func (k *killTest) restartCrashed() {
	k.T.Helper()
	for _, m := range k.programs {
		require.NoError(k.T, m.restartIfCrashed())
	}
}
