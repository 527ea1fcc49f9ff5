package chaos_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// instanceHistory is what a round did with its instance.
type instanceHistory struct {
	id, member string
	events     []string
	// uninterrupted reports whether the instance ran without a break.
	uninterrupted bool
}

// rounds takes one instance after the other through its lifecycle, until each of the points was reached.
func (k *killTest) rounds(which func(point string) bool) {
	k.T.Helper()
	k.due, k.armed = nil, map[string]int{}
	clear(k.hubProgram.crashedAt)
	clear(k.agentProgram.crashedAt)
	for _, p := range failpoint.Names() {
		require.NotEmpty(k.T, passedIn(p), "no step is known to pass %s", p)
		if which(p) && strings.Contains(p, os.Getenv("GPUAAS_E2E_KILL_POINTS")) {
			k.due = append(k.due, p)
		}
	}
	k.random.Shuffle(len(k.due), func(i, j int) { k.due[i], k.due[j] = k.due[j], k.due[i] })
	nothingLeft := k.leakCheck()
	for len(k.due) > 0 {
		began := time.Now()
		l := k.round()
		nothingLeft()
		k.requireLaws(l)
		k.T.Logf("round of %s, %d points to go", time.Since(began).Round(time.Millisecond), len(k.due))
	}
}

// leakCheck takes the state of the machine, and returns a function that waits until it is the same again.
func (k *killTest) leakCheck() (nothingLeft func()) {
	k.T.Helper()
	scope := k.Scope()
	scope.ContainerdAddress, scope.KeepImages, scope.IgnoreFiles = k.Containerd.Address, true, append(scope.IgnoreFiles,
		k.Dir)
	// Processes are left out, because hub and agent are restarted; a workload shows in its task and cgroup. Routes end
	// with their links, and those of the sentinel's bridge appear seconds later.
	scope.Kinds = []leakcheck.Kind{
		leakcheck.Mount, leakcheck.NetNS, leakcheck.Link, leakcheck.Firewall, leakcheck.Sysctl,
		leakcheck.Cgroup, leakcheck.Containerd, leakcheck.File,
	}
	before, err := leakcheck.Take(scope)
	require.NoError(k.T, err)
	return func() {
		k.T.Helper()
		k.until("nothing is left of the instance", func(context.Context) error {
			after, err := leakcheck.Take(scope)
			if err != nil {
				return err
			}
			return harness.DifferenceError(leakcheck.Diff(before, after))
		})
	}
}

// round takes one instance, of one service or of several, through its lifecycle, without the steps that pass no due
// point.
func (k *killTest) round() instanceHistory {
	k.T.Helper()
	l, version, first, slug := instanceHistory{}, "1.0.0", launch, harness.AppSlug
	parameters := k.refersToSecret()
	switch {
	case k.isDue(launchNew):
		first, version = launchNew, k.shipNew()
	case k.random.IntN(2) == 0:
		slug, parameters = harness.ProjectSlug, nil
	}
	k.step(first, api.AppInstanceStatusRunning, &l, func(ctx context.Context, once api.RequestEditorFn) error {
		i, err := api.Read[api.AppInstance](k.Operator.CreateAppInstance(ctx, k.Tenant.Project.ID, api.AppInstanceCreate{
			AppSlug: slug, Version: version, DisplayName: "killed", Parameters: parameters, PlacementIntent: api.PlacementIntent{
				AllocationIds: []string{k.Allocation.ID},
			},
		}, once))
		if err == nil {
			l.id, l.member = i.ID, i.Members[0].ID
		}
		return err
	}, "requested", "deploying", "running")
	if k.isDue(nodeReconnect) {
		k.step(nodeReconnect, api.AppInstanceStatusRunning, &l, nil)
	}
	if k.isDue(hubRestart) {
		k.step(hubRestart, api.AppInstanceStatusRunning, &l, nil)
	}
	// Before the upgrades: they may leave a container that is still being removed.
	if slug == harness.AppSlug && k.isDue(rotate) {
		k.rotateSecret(&l)
	}
	if k.isDue(upgrade) {
		k.step(upgrade, api.AppInstanceStatusRunning, &l, k.upgradeTo(&l, "2.0.0"), "upgrade_requested", "upgraded")
	}
	if k.isDue(failedUpgrade) {
		k.step(failedUpgrade, api.AppInstanceStatusRunning, &l, k.upgradeTo(&l, "3.0.0"), "upgrade_requested", "failed",
			"rolled_back")
	}
	if slug == harness.AppSlug && k.isDue(startFirst) {
		k.step(startFirst, api.AppInstanceStatusRunning, &l, k.upgradeTo(&l, "4.0.0"), "upgrade_requested", "upgraded")
	}
	if slug == harness.AppSlug && k.isDue(installs) {
		k.step(installs, api.AppInstanceStatusRunning, &l, k.installEnvironment(&l), "upgrade_requested", "upgraded")
		defer k.deleteEnvironments()
	}
	if k.isDue(reconfigure) {
		k.step(reconfigure, api.AppInstanceStatusRunning, &l, k.reconfigure(&l), "changed")
	}
	if k.isDue(onVolume) {
		k.step(onVolume, api.AppInstanceStatusRunning, &l, k.workOnVolume())
	}
	if k.isDue(stop) || k.isDue(start) {
		k.step(stop, api.AppInstanceStatusStopped, &l, func(ctx context.Context, once api.RequestEditorFn) error {
			_, err := api.Read[api.AppInstance](k.Operator.StopAppInstance(ctx, k.Tenant.Project.ID, l.id, once))
			return err
		}, "stop_requested", "stopped")
		k.step(start, api.AppInstanceStatusRunning, &l, func(ctx context.Context, once api.RequestEditorFn) error {
			_, err := api.Read[api.AppInstance](k.Operator.StartAppInstance(ctx, k.Tenant.Project.ID, l.id, once))
			return err
		}, "start_requested", "running")
	}
	k.step(decommission, api.AppInstanceStatusDecommissioned, &l, func(ctx context.Context,
		once api.RequestEditorFn,
	) error {
		_, err := api.Read[api.AppInstance](k.Operator.DecommissionAppInstance(ctx, k.Tenant.Project.ID, l.id, once))
		return err
	}, "decommission_requested", "decommissioned")
	return l
}

func (k *killTest) upgradeTo(l *instanceHistory, version string) func(context.Context, api.RequestEditorFn) error {
	return func(ctx context.Context, once api.RequestEditorFn) error {
		_, err := api.Read[api.AppInstance](k.Operator.UpgradeAppInstance(ctx, k.Tenant.Project.ID, l.id,
			api.AppInstanceUpgrade{TargetVersion: version}, once))
		return err
	}
}

// installEnvironment upgrades to a version with a package that no environment has yet.
func (k *killTest) installEnvironment(l *instanceHistory) func(context.Context, api.RequestEditorFn) error {
	requirements := []string{"package-" + scenario.NewID()}
	return func(ctx context.Context, once api.RequestEditorFn) error {
		_, err := api.Read[api.AppInstance](k.Operator.UpgradeAppInstance(ctx, k.Tenant.Project.ID, l.id,
			api.AppInstanceUpgrade{
				TargetVersion: "5.0.0", Environment: api.EnvironmentChoice{Requirements: requirements},
			}, once))
		return err
	}
}

// deleteEnvironments removes the environments that a round has left on the node.
func (k *killTest) deleteEnvironments() {
	k.T.Helper()
	k.until("no environment is kept", func(ctx context.Context) error {
		list, err := api.Read[api.EnvironmentList](k.Operator.ListEnvironments(ctx, k.Tenant.Project.ID,
			&api.ListEnvironmentsParams{}))
		for _, e := range list.Items {
			res, deleteErr := k.Operator.DeleteEnvironment(ctx, k.Tenant.Project.ID, e.Digest, e.NodeID)
			if deleteErr == nil {
				deleteErr = res.Body.Close()
			}
			err = errors.Join(err, deleteErr)
		}
		return harness.Pending(err, len(list.Items) == 0)
	})
}

// reconfigure changes the config once, however often it is asked: the operation takes no idempotency key.
func (k *killTest) reconfigure(l *instanceHistory) func(context.Context, api.RequestEditorFn) error {
	want := map[string]any{"motto": "after a crash"}
	return func(ctx context.Context, _ api.RequestEditorFn) error {
		i, err := api.Read[api.AppInstance](k.Operator.GetAppInstance(ctx, k.Tenant.Project.ID, l.id))
		if err != nil || maps.Equal(i.Config, want) {
			return err
		}
		_, err = api.Read[api.AppInstance](k.Operator.ChangeAppInstance(ctx, k.Tenant.Project.ID, l.id,
			api.AppInstanceChange{Config: want}))
		return err
	}
}

// shipNew ships a version with an image that no node has pulled.
func (k *killTest) shipNew() string {
	k.T.Helper()
	k.shipped++
	r := k.Release(fmt.Sprintf("1.1.%d", k.shipped))
	r.Template = harness.Edited(k.T, r.Template, takesSecret()...)
	image, err := appkit.ImageFromFiles([]appkit.File{
		{Path: "/app", Source: harness.DemoBinary(k.T), Mode: 0o755},
		{Path: "/mark", Content: []byte(r.Version), Mode: 0o644},
	},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	require.NoError(k.T, err)
	r.Image = image
	_, err = k.Tenant.Ship(k.Ctx, k.Publisher, r)
	require.NoError(k.T, err)
	return r.Version
}

func passes(step, point string) bool {
	in := passedIn(point)
	return slices.Contains(in, step) || step == launchNew && slices.Contains(in, launch)
}

// isDue reports whether the step passes a point that is due.
func (k *killTest) isDue(step string) bool {
	return slices.ContainsFunc(k.due, func(p string) bool { return slices.Contains(passedIn(p), step) })
}

// choose returns a due point of the program that the step passes, preferably one that few other steps pass.
func (k *killTest) choose(m *crashable, step string) string {
	best := ""
	for _, p := range k.due {
		if strings.HasPrefix(p, m.name+"/") && passes(step, p) && (best == "" || len(passedIn(p)) < len(passedIn(best))) {
			best = p
		}
	}
	return best
}

// chooseBoth returns a point of each program, or one alone that was armed before: the other crash may have prevented
// it.
func (k *killTest) chooseBoth(step string) map[*crashable]string {
	points := map[*crashable]string{}
	for _, m := range k.programs {
		points[m] = k.choose(m, step)
	}
	for _, m := range k.programs {
		if k.armed[points[m]] > 0 {
			return map[*crashable]string{m: points[m]}
		}
	}
	return points
}

// step arms hub and agent, asks for the action, and waits until both have crashed, are back, and the instance has the
// wanted status.
func (k *killTest) step(name string, want api.AppInstanceStatus, l *instanceHistory, ask func(ctx context.Context,
	once api.RequestEditorFn) error, events ...string,
) {
	k.T.Helper()
	began := time.Now()
	var chosen []string
	points := k.chooseBoth(name)
	for _, m := range k.programs {
		point, hit := points[m], 1
		if point == "" {
			continue
		}
		if passedOften(point) {
			hit += k.random.IntN(maxHit)
		}
		k.T.Logf("%s crashes in %s at hit %d of %s", m.name, name, hit, point)
		m.arm(k.T, point, hit)
		chosen = append(chosen, point)
	}
	switch name {
	case nodeReconnect:
		require.NoError(k.T, k.Agent.Kill9())
		require.NoError(k.T, k.agentProgram.startUntilServing())
	case hubRestart:
		require.NoError(k.T, k.Hub.Kill9())
		require.NoError(k.T, k.hubProgram.startUntilServing())
	}
	if ask != nil {
		k.restartWhile(func(ctx context.Context) error { return retryUntilAnswered(ctx, ask) })
	}
	l.events = append(l.events, events...)
	arrived := func(ctx context.Context) error { return k.checkArrived(ctx, l.id, want) }
	k.until(name+" converges", arrived)
	k.collectCrashes(chosen)
	k.until(name+" converges again", arrived)
	k.T.Logf("%s took %s", name, time.Since(began).Round(time.Millisecond))
}

// collectCrashes waits for points that are not reached yet. The others are armed again in another step: of two crashes
// at once one may prevent the other.
func (k *killTest) collectCrashes(chosen []string) {
	k.T.Helper()
	for late := time.After(pointWait); late != nil && k.hubProgram.point+k.agentProgram.point != ""; k.restartCrashed() {
		hub, agent := k.exits()
		select {
		case <-hub:
		case <-agent:
		case <-late:
			late = nil
		}
	}
	require.NoError(k.T, k.hubProgram.disarm())
	require.NoError(k.T, k.agentProgram.disarm())
	k.due = slices.DeleteFunc(k.due, func(p string) bool {
		return k.hubProgram.crashedAt[p] || k.agentProgram.crashedAt[p]
	})
	for _, p := range chosen {
		k.armed[p]++
		require.False(k.T, slices.Contains(k.due, p) && k.armed[p] == maxArms, "%s is never reached", p)
	}
}

// checkArrived returns an error until the instance has the wanted status; a running one must be healthy, answer, and
// have its config and its secret.
func (k *killTest) checkArrived(ctx context.Context, id string, want api.AppInstanceStatus) error {
	i, err := api.Read[api.AppInstance](k.Operator.GetAppInstance(ctx, k.Tenant.Project.ID, id))
	switch {
	case err != nil:
		return err
	case i.Status != want || want == api.AppInstanceStatusRunning && i.Health != api.AppInstanceHealthHealthy:
		return fmt.Errorf("it is %s (%s), %s, revision %d of version %s, members %+v", i.Status, i.StatusReason, i.Health,
			i.Revision, i.Version, i.Members)
	case want != api.AppInstanceStatusRunning:
		return nil
	}
	body, err := scenario.Get(ctx, i.Endpoints[0].URL+"/config")
	if err != nil {
		return err
	}
	var shown struct{ Loaded, File string }
	config, err := json.Marshal(i.Config)
	err = errors.Join(err, json.Unmarshal([]byte(body), &shown))
	if err != nil || !i.Members[0].ConfigCurrent || shown.File != string(config) || shown.Loaded != shown.File {
		return harness.Pending(err, false)
	}
	return k.checkSecret(ctx, i)
}

// retryUntilAnswered repeats a request with one idempotency key until the hub answers.
func retryUntilAnswered(ctx context.Context, ask func(ctx context.Context, once api.RequestEditorFn) error) error {
	key := scenario.NewID()
	for {
		err := ask(ctx, func(_ context.Context, r *http.Request) error {
			r.Header.Set("X-Idempotency-Key", key)
			return nil
		})
		_, away := errors.AsType[*api.UnreachableError](err)
		problem, answered := errors.AsType[*api.Problem](err)
		if err == nil || ctx.Err() != nil || !away && (!answered || problem.Status != http.StatusServiceUnavailable) {
			return err
		}
	}
}

// requireLaws checks an ended instance: each event once and in order, each posting balanced, and a bill that matches
// what containerd reported.
func (k *killTest) requireLaws(l instanceHistory) {
	k.T.Helper()
	k.until("its events are published", func(ctx context.Context) error {
		events, err := k.Tenant.Events(ctx, k.Operator, l.id)
		return harness.Pending(err, len(events) >= len(l.events))
	})
	require.Equal(k.T, l.events, k.EventTypes(l.id))
	var postings []api.Posting
	k.until("the bill is final", func(ctx context.Context) (err error) {
		postings, err = k.Tenant.Postings(ctx, l.id)
		return harness.Pending(err, harness.HasKind(postings, api.PostingKindHoldClosed))
	})
	usage, err := k.Tenant.Usage(k.Ctx, l.id)
	require.NoError(k.T, err)
	if l.uninterrupted {
		harness.RequireContiguous(k.T, usage)
	}
	billed := harness.RequireNoOverlap(k.T, usage)
	_, runs := k.oracle.RunsOf(k.T, l.member)
	k.oracle.RequireBilledRuns(k.T, l.member, runs, billed)
	harness.RequireCost(k.T, postings, billed, 1)
}
