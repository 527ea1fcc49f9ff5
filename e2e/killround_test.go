package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// course is what an instance went through, for the reckoning at its end.
type course struct {
	id, member string
	events     []string
	// keeps says that it ran without a break.
	keeps bool
}

// rounds leads one instance after the other through its life, until each of the points was reached.
func (k *killing) rounds(which func(point string) bool) {
	k.t.Helper()
	k.due, k.armed = nil, map[string]int{}
	clear(k.center.reached)
	clear(k.node.reached)
	for _, p := range failpoint.Names() {
		require.NotEmpty(k.t, passedIn(p), "no step is known to pass %s", p)
		if which(p) && strings.Contains(p, os.Getenv("GPUAAS_E2E_KILL_POINTS")) {
			k.due = append(k.due, p)
		}
	}
	k.random.Shuffle(len(k.due), func(i, j int) { k.due[i], k.due[j] = k.due[j], k.due[i] })
	scope := k.scope()
	scope.ContainerdAddress, scope.KeepImages, scope.IgnoreFiles = k.containerd.Address, true, append(scope.IgnoreFiles,
		k.dir)
	// Not the processes: hub and agent come back as others, and what a workload runs shows in its task and its cgroup. Nor
	// the routes, which go with their links: those of the keeper's bridge come seconds after it.
	scope.Kinds = []leakcheck.Kind{
		leakcheck.Mount, leakcheck.NetNS, leakcheck.Link, leakcheck.Firewall, leakcheck.Sysctl,
		leakcheck.Cgroup, leakcheck.Containerd, leakcheck.File,
	}
	before, err := leakcheck.Take(scope)
	require.NoError(k.t, err)
	for len(k.due) > 0 {
		began := time.Now()
		l := k.round()
		k.until("nothing is left of the instance", func(context.Context) error {
			after, err := leakcheck.Take(scope)
			if err != nil {
				return err
			}
			return differs(leakcheck.Diff(before, after))
		})
		k.requireWhole(l)
		k.t.Logf("round of %s, %d points to go", time.Since(began).Round(time.Millisecond), len(k.due))
	}
}

// round is one life. Steps that no point asks for are left out.
func (k *killing) round() course {
	k.t.Helper()
	l, version, first := course{}, "1.0.0", launch
	if k.wants(launchNew) {
		first, version = launchNew, k.shipNew()
	}
	k.step(first, api.AppInstanceStatusRunning, &l, func(ctx context.Context, once api.RequestEditorFn) error {
		i, err := api.Read[api.AppInstance](k.operator.CreateAppInstance(ctx, k.tenant.Project.ID, api.AppInstanceCreate{
			AppSlug: appSlug, Version: version, DisplayName: "mortal", PlacementIntent: api.PlacementIntent{
				AllocationIds: []string{k.allocation.ID},
			},
		}, once))
		if err == nil {
			l.id, l.member = i.ID, i.Members[0].ID
		}
		return err
	}, "requested", "deploying", "running")
	if k.wants(nodeBack) {
		k.step(nodeBack, api.AppInstanceStatusRunning, &l, nil)
	}
	if k.wants(hubBack) {
		k.step(hubBack, api.AppInstanceStatusRunning, &l, nil)
	}
	if k.wants(upgrade) {
		k.step(upgrade, api.AppInstanceStatusRunning, &l, k.upgradeTo(&l, "2.0.0"), "upgrade_requested", "upgraded")
	}
	if k.wants(failedUpgrade) {
		k.step(failedUpgrade, api.AppInstanceStatusRunning, &l, k.upgradeTo(&l, "3.0.0"), "upgrade_requested", "failed",
			"rolled_back")
	}
	if k.wants(stop) || k.wants(start) {
		k.step(stop, api.AppInstanceStatusStopped, &l, func(ctx context.Context, once api.RequestEditorFn) error {
			_, err := api.Read[api.AppInstance](k.operator.StopAppInstance(ctx, k.tenant.Project.ID, l.id, once))
			return err
		}, "stop_requested", "stopped")
		k.step(start, api.AppInstanceStatusRunning, &l, func(ctx context.Context, once api.RequestEditorFn) error {
			_, err := api.Read[api.AppInstance](k.operator.StartAppInstance(ctx, k.tenant.Project.ID, l.id, once))
			return err
		}, "start_requested", "running")
	}
	k.step(decommission, api.AppInstanceStatusDecommissioned, &l, func(ctx context.Context,
		once api.RequestEditorFn,
	) error {
		_, err := api.Read[api.AppInstance](k.operator.DecommissionAppInstance(ctx, k.tenant.Project.ID, l.id, once))
		return err
	}, "decommission_requested", "decommissioned")
	return l
}

func (k *killing) upgradeTo(l *course, version string) func(context.Context, api.RequestEditorFn) error {
	return func(ctx context.Context, once api.RequestEditorFn) error {
		_, err := api.Read[api.AppInstance](k.operator.UpgradeAppInstance(ctx, k.tenant.Project.ID, l.id,
			api.AppInstanceUpgrade{TargetVersion: version}, once))
		return err
	}
}

// shipNew ships a version whose image nobody has pulled.
func (k *killing) shipNew() string {
	k.t.Helper()
	k.shipped++
	r := k.release(fmt.Sprintf("1.1.%d", k.shipped))
	image, err := appkit.ImageFromFiles([]appkit.File{
		{Path: "/app", Source: demoBinary(k.t), Mode: 0o755},
		{Path: "/mark", Content: []byte(r.Version), Mode: 0o644},
	},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	require.NoError(k.t, err)
	r.Image = image
	_, err = k.tenant.Ship(k.ctx, k.publisher, r)
	require.NoError(k.t, err)
	return r.Version
}

func passes(step, point string) bool {
	in := passedIn(point)
	return slices.Contains(in, step) || step == launchNew && slices.Contains(in, launch)
}

// wants reports whether a step would reach a point that is due.
func (k *killing) wants(step string) bool {
	return slices.ContainsFunc(k.due, func(p string) bool { return slices.Contains(passedIn(p), step) })
}

// choose takes a due point of the program that the step passes; one that few other steps pass goes first.
func (k *killing) choose(m *mortal, step string) string {
	best := ""
	for _, p := range k.due {
		if strings.HasPrefix(p, m.name+"/") && passes(step, p) && (best == "" || len(passedIn(p)) < len(passedIn(best))) {
			best = p
		}
	}
	return best
}

// step asks for something while hub and agent are armed, waits until they have died of it and have come back, and until
// the instance is where it should be.
func (k *killing) step(name string, want api.AppInstanceStatus, l *course, ask func(ctx context.Context,
	once api.RequestEditorFn) error, events ...string,
) {
	k.t.Helper()
	began := time.Now()
	var chosen []string
	for _, m := range k.mortals {
		point, hit := k.choose(m, name), 1
		if point == "" {
			continue
		}
		if often(point) {
			hit += k.random.IntN(anyHit)
		}
		k.t.Logf("%s dies in %s at hit %d of %s", m.name, name, hit, point)
		m.arm(k.t, point, hit)
		chosen = append(chosen, point)
	}
	switch name {
	case nodeBack:
		require.NoError(k.t, k.agent.Kill9())
		require.NoError(k.t, k.node.live())
	case hubBack:
		require.NoError(k.t, k.hub.Kill9())
		require.NoError(k.t, k.center.live())
	}
	if ask != nil {
		k.while(func(ctx context.Context) error { return insist(ctx, ask) })
	}
	l.events = append(l.events, events...)
	arrived := func(ctx context.Context) error { return k.hasArrived(ctx, l.id, want) }
	k.until(name+" converges", arrived)
	k.takeStock(chosen)
	k.until(name+" converges again", arrived)
	k.t.Logf("%s took %s", name, time.Since(began).Round(time.Millisecond))
}

// takeStock waits a little for points that are not reached yet. Those that stay away are tried again in another step:
// two deaths at once may keep each other from their points.
func (k *killing) takeStock(chosen []string) {
	k.t.Helper()
	deadline := time.Now().Add(lingers)
	for k.center.point+k.node.point != "" && time.Now().Before(deadline) {
		k.tend()
		time.Sleep(5 * time.Millisecond)
	}
	require.NoError(k.t, k.center.disarm())
	require.NoError(k.t, k.node.disarm())
	k.due = slices.DeleteFunc(k.due, func(p string) bool { return k.center.reached[p] || k.node.reached[p] })
	for _, p := range chosen {
		k.armed[p]++
		require.False(k.t, slices.Contains(k.due, p) && k.armed[p] == tries, "%s is never reached", p)
	}
}

// hasArrived is nil when the instance is where it should be; a running one is healthy and answers.
func (k *killing) hasArrived(ctx context.Context, id string, want api.AppInstanceStatus) error {
	i, err := api.Read[api.AppInstance](k.operator.GetAppInstance(ctx, k.tenant.Project.ID, id))
	switch {
	case err != nil:
		return err
	case i.Status != want || want == api.AppInstanceStatusRunning && i.Health != api.AppInstanceHealthHealthy:
		return fmt.Errorf("it is %s (%s), %s, revision %d of version %s, members %+v", i.Status, i.StatusReason, i.Health,
			i.Revision, i.Version, i.Members)
	case want != api.AppInstanceStatusRunning:
		return nil
	}
	_, err = scenario.Get(ctx, i.Endpoints[0].URL+"/")
	return err
}

// insist asks under one idempotency key until the hub has answered.
func insist(ctx context.Context, ask func(ctx context.Context, once api.RequestEditorFn) error) error {
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

// requireWhole holds an ended instance against the laws: each event once and in order, each posting in balance, and a
// bill that is what containerd saw.
func (k *killing) requireWhole(l course) {
	k.t.Helper()
	k.until("its events are told", func(ctx context.Context) error {
		events, err := k.tenant.Events(ctx, k.operator, l.id)
		return orMissing(err, len(events) >= len(l.events))
	})
	require.Equal(k.t, l.events, k.eventTypes(l.id))
	var postings []api.Posting
	k.until("the bill is final", func(ctx context.Context) (err error) {
		postings, err = k.tenant.Postings(ctx, l.id)
		return orMissing(err, hasKind(postings, api.PostingKindHoldClosed))
	})
	usage, err := k.tenant.Usage(k.ctx, l.id)
	require.NoError(k.t, err)
	if l.keeps {
		requireContiguous(k.t, usage, "session_seconds")
	}
	billed := requireNoOverlap(k.t, usage)
	ran, runs := k.truths.of(k.t, l.member)
	seen := big.NewRat(ran.Microseconds(), 1_000_000)
	// Containerd's events are written some milliseconds after what they tell of.
	slack := big.NewRat(int64(runs), 4)
	least := new(big.Rat).Sub(seen, new(big.Rat).Add(slack, big.NewRat(int64(runs)*beat.Microseconds(), 1_000_000)))
	require.LessOrEqual(k.t, billed.Cmp(new(big.Rat).Add(seen, slack)), 0, "billed %s s of %s in %d runs",
		billed.FloatString(3), ran, runs)
	require.GreaterOrEqual(k.t, billed.Cmp(least), 0, "billed %s s of %s in %d runs", billed.FloatString(3), ran, runs)
	off := new(big.Rat).Sub(debit(k.t, postings), new(big.Rat).Mul(billed, big.NewRat(1, 1000)))
	require.LessOrEqual(k.t, off.Abs(off).Cmp(big.NewRat(1, 1_000_000_000)), 0, "paid %s off", off.FloatString(9))
}

// requireNoOverlap sums an instance's running time; no second is in two records.
func requireNoOverlap(t *testing.T, usage []api.UsageRecord) *big.Rat {
	t.Helper()
	mine := slices.DeleteFunc(slices.Clone(usage), func(u api.UsageRecord) bool { return u.Meter != "session_seconds" })
	sortByStart(mine)
	total := new(big.Rat)
	for n, u := range mine {
		q, ok := new(big.Rat).SetString(u.Quantity)
		require.True(t, ok)
		total.Add(total, q)
		if n > 0 {
			require.False(t, u.StartedAt.Before(mine[n-1].EndedAt), "usage from %s overlaps usage to %s", u.StartedAt,
				mine[n-1].EndedAt)
		}
	}
	return total
}

// of is how long a member's containers ran in all, and how many did; every one must have exited.
func (tr *truth) of(t *testing.T, member string) (total time.Duration, runs int) {
	t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for id, start := range tr.started {
		if !strings.HasPrefix(id, member+".") {
			continue
		}
		require.Contains(t, tr.exited, id, "the container has not exited")
		total += tr.exited[id].Sub(start)
		runs++
	}
	require.Positive(t, runs)
	return total, runs
}
