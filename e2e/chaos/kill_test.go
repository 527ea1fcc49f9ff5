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
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// The steps of a round, in this order; nodeReconnect and hubRestart kill the whole program while the instance runs.
const (
	launch        = "launch"
	launchNew     = "launch of an image that the node must pull"
	nodeReconnect = "reconnect of the node"
	hubRestart    = "restart of the hub"
	upgrade       = "upgrade"
	failedUpgrade = "failed upgrade"
	startFirst    = "upgrade that starts first"
	reconfigure   = "change of the config"
	rotate        = "rotation of a secret"
	onVolume      = "work on a volume"
	installs      = "upgrade that installs an environment"
	stop          = "stop"
	start         = "start"
	decommission  = "decommission"
)

const (
	// stepLimit bounds one step with its crashes; a passing step does not reach it.
	stepLimit = 90 * time.Second
	// pointWait is how long to wait for a point after its step, before it is armed in another step.
	pointWait = 3 * time.Second
	// killLimit bounds the whole test on a busy machine.
	killLimit = 15 * time.Minute
	// maxArms bounds how often a point is armed: of two crashes at once one may prevent the other.
	maxArms = 4
	// maxHit bounds the hit at which a point crashes that each step passes many times.
	maxHit = 4
)

// passedIn returns the steps that pass a point, by the prefix of its name.
func passedIn(point string) []string {
	starts, ends := []string{launch, upgrade, start}, []string{upgrade, stop, decommission}
	acts := []string{launch, upgrade, stop, start, decommission}
	for _, known := range []struct {
		prefix string
		steps  []string
	}{
		{"agent/session/", []string{nodeReconnect}},
		{"agent/accept/", starts},
		{"agent/admission/", starts},
		{"agent/leases/", []string{launch}},
		{"agent/pull/", []string{launchNew}},
		{"agent/publish/", []string{startFirst}},
		{"agent/network/removed", []string{decommission}},
		{"agent/network/", []string{launch}},
		{"agent/shared_network/", []string{launch}},
		{"agent/attach/", []string{launch}},
		{"agent/start/", starts},
		{"agent/ready/", starts},
		{"agent/confirm/", []string{upgrade}},
		{"agent/fallback/", []string{failedUpgrade}},
		{"agent/config/", []string{reconfigure}},
		{"agent/secrets/", []string{rotate}},
		{"agent/volume/", []string{onVolume}},
		{"agent/environment/", []string{installs}},
		{"agent/stop/", ends},
		{"agent/exit/", ends},
		{"agent/remove/", ends},
		{"agent/detach/", []string{decommission}},
		{"agent/shared_network_removal/", []string{decommission}},
		{"agent/retire/", []string{decommission}},
		{"agent/report/acknowledged", []string{decommission}},
		{"agent/", acts},
		{"hub/database/", []string{hubRestart}},
		{"hub/create/", []string{launch}},
		{"hub/secret/", []string{rotate}},
		{"hub/leases/", []string{launch}},
		{"hub/hello/", []string{nodeReconnect}},
		{"hub/session/registered", []string{nodeReconnect}},
		{"hub/disconnect/", []string{nodeReconnect}},
		{"hub/report/capacity_freed", []string{decommission}},
		{"hub/", acts},
	} {
		if strings.HasPrefix(point, known.prefix) {
			return known.steps
		}
	}
	return nil
}

// needsEmptyNode reports whether a point is passed only while the node has no other instance.
func needsEmptyNode(point string) bool { return strings.HasPrefix(point, "agent/shared_network") }

// enrolls reports whether a node passes the point at its enrollment, and never again.
func enrolls(point string) bool { return strings.Contains(point, "/enroll/") }

// passedOften reports whether every step passes the point many times, so that the hit may differ.
func passedOften(point string) bool {
	return slices.Contains([]string{
		"agent/store/writing", "agent/store/synced", "agent/action/begun", "agent/action/done",
		"hub/db/committing", "hub/db/committed",
	}, point)
}

// killTest is a run over all failpoints.
type killTest struct {
	*harness.Testbed
	random *rand.Rand
	// programs are those that are restarted when they crash: the hub, and the agent once it is enrolled.
	hubProgram, agentProgram *crashable
	programs                 []*crashable
	// due are the points that are still to be reached; armed counts how often each was armed.
	due    []string
	armed  map[string]int
	oracle *harness.ContainerdOracle
	// secret is the one that the app's instances refer to, as its last answer shows it; value is what they must have.
	secret api.Secret
	value  string
	// shipped counts the versions with an image of their own.
	shipped int
}

// TestEverythingResumesAfterAKillAtAnyPoint kills hub and agent at each of their failpoints while an instance goes
// through its lifecycle, restarts them, and checks that nothing is stuck, lost, doubled or left over. GPUAAS_E2E_SEED
// sets the seed, GPUAAS_E2E_KILL_REPEATS how often each point is reached, GPUAAS_E2E_KILL_POINTS a part of their names.
func TestEverythingResumesAfterAKillAtAnyPoint(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("GPUAAS_E2E_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("GPUAAS_E2E_SEED=%d", seed)
	k := newKillTest(t, seed)
	// The first instance caches the image and makes the directories of a first start; the leak checks compare with the
	// state after it.
	k.Decommission(k.Launch("first"))

	k.rounds(func(point string) bool { return needsEmptyNode(point) })
	sentinel := k.Launch("sentinel")
	pid := k.PidOf(sentinel)
	for range k.repeats() {
		k.rounds(func(point string) bool { return !needsEmptyNode(point) && !enrolls(point) })
	}
	k.removals()
	require.Equal(t, pid, k.PidOf(sentinel), "the sentinel was restarted")
	k.RequireAnswer(sentinel)
	k.Decommission(sentinel)
	k.requireLaws(instanceHistory{id: sentinel.ID, member: sentinel.Members[0].ID, events: []string{
		"requested", "deploying",
		"running", "decommission_requested", "decommissioned",
	}, uninterrupted: true})
	k.AdminShell().MustRun("audit", "verify", "--org", k.Tenant.Org.ID)
	k.explainKills()
	for _, m := range k.programs {
		t.Logf("%s crashed %d times at its points; %d starts took %s", m.name, m.crashes, m.starts,
			m.starting.Round(time.Millisecond))
	}
}

// explainKills tells the audit what the kills may cause: a pull or a start that is repeated, and a bill that begins
// with the call of the start, whose answer was lost.
func (k *killTest) explainKills() {
	k.Explain(harness.Faults{
		Why:        "the agent is killed while it pulls or starts",
		Pulls:      true,
		Restarts:   k.agentProgram.crashes,
		Overbilled: time.Duration(k.agentProgram.crashes) * resolution,
	})
}

// repeats is how often every point is reached.
func (k *killTest) repeats() int {
	n, err := strconv.Atoi(os.Getenv("GPUAAS_E2E_KILL_REPEATS"))
	if err != nil {
		return 1
	}
	return n
}

// newKillTest makes a platform of programs with failpoints; the node's enrollment is killed at each of its points.
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
	k.WatchForAudit(c)
	k.enroll()
	t.Cleanup(func() {
		require.NoError(t, k.Agent.Stop())
		require.NoError(t, devcluster.Uninstall(context.WithoutCancel(k.Ctx), c))
	})
	k.AuditAtEnd()

	second := []string{harness.FirstGreeting, harness.SecondGreeting}
	unready := []string{
		"path: /healthz", "path: /nowhere", "readiness_timeout_seconds: 30",
		"readiness_timeout_seconds: 2",
	}
	k.ShipApp(takesSecret()...)
	for version, changes := range map[string][]string{
		"2.0.0": second,
		"3.0.0": unready,
		"4.0.0": append(second, "metering:", "upgrade: {strategy: start_first}\n  metering:"),
		"5.0.0": append(second, "    scratch:", "    environment: {path: /opt/environment, python: /app, "+
			"max_size_mib: 32, build_timeout_seconds: 60}\n    scratch:"),
	} {
		k.ShipVersion(version, append(takesSecret(), changes...)...)
	}
	k.ShipProject(map[string][]string{"1.0.0": nil, "2.0.0": second, "3.0.0": unready})
	// There is room for the sentinel and for two copies of another instance.
	var err error
	k.Allocation, err = k.Tenant.Allocate(k.Ctx, k.Tenant.Admin, k.Agent.Ready.NodeID, 2, 512)
	require.NoError(t, err)
	k.issueSecret()
	k.oracle = k.WatchContainerd(c.ContainerdNamespace)
	return k
}

// enroll enrolls the node and kills both programs at each point of the enrollment: a join token makes one node, however
// often the agent shows it.
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
	k.AwaitOnline(k.Agent.Ready.NodeID)
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
