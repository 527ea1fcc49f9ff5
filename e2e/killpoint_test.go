package e2e_test

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

// killing is one run over all points.
type killing struct {
	*world
	random *rand.Rand
	// center and node are the hub and the agent; mortals those that are started again when they have died.
	center, node *mortal
	mortals      []*mortal
	// due are the points that are still to be reached, and how often each was armed.
	due    []string
	armed  map[string]int
	truths *truth
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
	k := newKilling(t, seed)
	// A first instance brings the cached image and the directories of the first start; what it leaves is the state to
	// return to.
	k.decommission(k.launch("first"))

	k.rounds(func(point string) bool { return alone(point) })
	keeper := k.launch("keeper")
	pid := k.pidOf(keeper)
	for range k.repeats() {
		k.rounds(func(point string) bool { return !alone(point) && !enrolls(point) })
	}
	require.Equal(t, pid, k.pidOf(keeper), "the one that nobody touched is the very same process")
	k.answers(keeper)
	k.decommission(keeper)
	k.requireWhole(course{id: keeper.ID, member: keeper.Members[0].ID, events: []string{
		"requested", "deploying",
		"running", "decommission_requested", "decommissioned",
	}, keeps: true})
	for _, m := range k.mortals {
		t.Logf("%s died %d times at its points; %d starts took %s", m.name, m.deaths, m.starts,
			m.starting.Round(time.Millisecond))
	}
}

// repeats is how often every point is reached.
func (k *killing) repeats() int {
	n, err := strconv.Atoi(os.Getenv("GPUAAS_E2E_KILL_REPEATS"))
	if err != nil {
		return 1
	}
	return n
}

// newKilling makes a platform of programs that were built with failpoints. The node's enrollment dies at each of its
// points.
func newKilling(t *testing.T, seed uint64) *killing {
	t.Helper()
	k := &killing{world: newWorld(t), random: rand.New(rand.NewPCG(seed, 0)), armed: map[string]int{}}
	ctx, cancel := context.WithTimeout(context.Background(), killLimit)
	t.Cleanup(cancel)
	k.ctx = ctx
	k.center = &mortal{name: "hub", process: func() *devcluster.Process { return k.hub.Process }, start: k.startHubAgain}
	k.node = &mortal{name: "agent", process: func() *devcluster.Process {
		return k.agent.Process
	}, start: k.startAgentAgain}
	k.mortals = []*mortal{k.center}
	for _, m := range []*mortal{k.center, k.node} {
		m.arms, m.reached = filepath.Join(k.dir, "arms-"+m.name), map[string]bool{}
	}
	k.startContainerd()
	h := k.hubConfig()
	h.Bin, h.Env = failpointBinaries(t), k.center.env()
	k.startHub(h)
	k.newTenant("acme")

	c := k.agentConfig("node")
	c.Bin, c.Env = failpointBinaries(t), k.node.env()
	c.ExtraArgs = []string{
		"--metering-interval", beat.String(), "--usage-interval", "1s", "--resync", "5s", "--report-interval",
		"250ms", "--dial-retry-max", "500ms",
	}
	k.agent = &devcluster.Agent{Config: c}
	k.agents = append(k.agents, k.agent)
	k.enroll()
	t.Cleanup(func() {
		require.NoError(t, k.agent.Stop())
		require.NoError(t, devcluster.Uninstall(context.WithoutCancel(k.ctx), c))
	})

	k.shipApp()
	k.shipVersion("2.0.0", firstGreeting, secondGreeting)
	k.shipVersion("3.0.0", "path: /healthz", "path: /nowhere", "readiness_timeout_seconds: 30",
		"readiness_timeout_seconds: 2")
	k.allocate(k.agent)
	k.truths = k.listen(c.ContainerdNamespace)
	return k
}

// enroll brings the node in, dying at each point of that: a join token is worth one node, however often it is shown.
func (k *killing) enroll() {
	k.t.Helper()
	token, err := scenario.JoinToken(k.ctx, k.admin())
	require.NoError(k.t, err)
	k.agent.Config.JoinToken = token
	for _, point := range slices.DeleteFunc(failpoint.Names(), func(p string) bool { return !enrolls(p) }) {
		if strings.HasPrefix(point, "hub/") {
			k.center.arm(k.t, point, 1)
			continue
		}
		k.node.arm(k.t, point, 1)
		require.Error(k.t, k.node.start(), point)
		require.NoError(k.t, k.node.note())
		require.True(k.t, k.node.reached[point], "%s is not reached", point)
	}
	k.while(func(context.Context) error { return k.node.live() })
	require.Empty(k.t, k.center.point, "it is not reached")
	k.mortals = append(k.mortals, k.node)
	k.agent.Config.JoinToken = ""
	_, err = scenario.AwaitNode(k.ctx, k.admin(), k.agent.Ready.NodeID)
	require.NoError(k.t, err)
}

func (k *killing) startHubAgain() error {
	c, fingerprint := k.hub.Config, k.hub.RootFingerprint
	c.Listen, c.SessionListen = strings.TrimPrefix(k.hub.Ready.APIURL, "https://"), k.hub.Ready.SessionAddr
	again, err := devcluster.StartHub(k.ctx, c)
	if err == nil {
		again.RootFingerprint = fingerprint
		k.hub = again
	}
	return err
}

func (k *killing) startAgentAgain() error {
	again, err := devcluster.StartAgent(k.ctx, k.agent.Config)
	if err == nil {
		k.agent.Process, k.agent.Ready = again.Process, again.Ready
	}
	return err
}

// while does something that outlasts the programs, and starts those again that die meanwhile.
func (k *killing) while(do func(ctx context.Context) error) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.ctx, stepLimit)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			require.NoError(k.t, err)
			return
		case <-tick.C:
			k.tend()
		}
	}
}

// until looks until there is no error.
func (k *killing) until(what string, look func(ctx context.Context) error) {
	k.t.Helper()
	k.while(func(ctx context.Context) error {
		var last error
		for {
			err := look(ctx)
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

// tend starts again what has died at its point.
func (k *killing) tend() {
	k.t.Helper()
	for _, m := range k.mortals {
		require.NoError(k.t, m.tend())
	}
}
