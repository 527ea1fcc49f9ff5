package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
)

// The objectives of the rows that drive a load up until one fails.
const (
	// maxAPIMillis is the 99th percentile of API requests of manyCallers.
	maxAPIMillis = 200
	// maxAckSeconds is the 99th percentile of the time from the cut of a usage segment to its acknowledgement.
	maxAckSeconds = 5
	// maxAllBackSeconds is from a killed hub's ready line until all nodes are back: law 13, without its resync periods.
	maxAllBackSeconds = 60
	// maxReadySeconds is how long a killed hub may take until it serves again.
	maxReadySeconds = 30

	// usageCadence is the agent's default interval of usage segments.
	usageCadence = 30 * time.Second
	// breakFor is how long a load lasts.
	breakFor = time.Minute
)

// breakRows drive one thing up each.
func breakRows() []Row {
	return []Row{
		{Name: "breaks-nodes", Long: true, Measure: measureNodesBreak},
		{Name: "breaks-instances", Long: true, Measure: measureInstancesBreak},
		{Name: "breaks-launches", Long: true, Measure: measureLaunchesBreak},
		{Name: "breaks-records", Long: true, Measure: measureRecordsBreak},
		{Name: "breaks-events", Long: true, Measure: measureEventsBreak},
	}
}

// HubWithSymbols builds a hub whose profile has names, and returns its directory: the one that `make build` makes is
// stripped.
func (e *Env) HubWithSymbols(ctx context.Context) (bin string, err error) {
	bin = filepath.Join(e.root, "with-symbols")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-w", "-o", filepath.Join(bin, "gpuaas-hub"),
		"./hub/cmd/gpuaas-hub")
	build.Dir, build.Env = e.Source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build a hub with symbols: %w: %s", err, out)
	}
	return bin, nil
}

// breaking is what the rows have in common: a hub under a load, and callers that ask its API meanwhile.
type breaking struct {
	*LoadTest
	e         *Env
	tokens    []string
	workloads int
	// each is how long a load lasts.
	each time.Duration
}

// startBreaking starts a hub with loaded nodes, and makes the callers.
func startBreaking(ctx context.Context, e *Env, name string, nodes, workloads int) (*breaking, error) {
	bin, err := e.HubWithSymbols(ctx)
	if err != nil {
		return nil, err
	}
	c, err := startLoaded(ctx, e, bin, name, nodes, workloads)
	if err != nil {
		return nil, err
	}
	b := &breaking{LoadTest: c, e: e, workloads: workloads, each: or(e.Params.For, breakFor)}
	b.tokens, err = c.addCallers(ctx, or(e.Params.Callers, manyCallers))
	return b, err
}

// trial measures a load with the machine's use, a profile of the hub and the callers' times beside it.
func (b *breaking) trial(ctx context.Context, load func(context.Context) ([]Objective, error)) (t Trial, err error) {
	callers, err := b.open(b.tokens)
	if err != nil {
		return t, err
	}
	use, err := b.watchUse(ctx)
	if err != nil {
		return t, err
	}
	calls, stop := b.callAPI(ctx, callers, callerPause)
	profile := b.recordProfile(ctx)
	t.Objectives, err = load(ctx)
	stop()
	var useErr error
	t.Use, useErr = use()
	took, callErr := calls()
	t.Calls = took
	// A call that fails is a missed objective: a hub that is overloaded may refuse it.
	failed := Objective{Name: "API calls that fail", Unit: "calls"}
	if callErr != nil {
		failed.Got = 1
		b.e.Say("a call fails: %v", callErr)
	}
	t.Objectives = append(t.Objectives, failed,
		Objective{Name: "API p99", Got: took.P99(), Limit: maxAPIMillis, Unit: "ms"})
	report := profile(ctx)
	if len(t.missed()) > 0 {
		t.Profile = report
	}
	return t, errors.Join(err, useErr)
}

// say prints a trial as it ends.
func (b *breaking) say(what string, load float64, t Trial) {
	b.e.Say("%s %s: %v; %.2f of %.0f cores busy; missed: %q", number(load), what, t.Objectives, t.Use.Busy, t.Use.Cores,
		t.missed())
}

// liveUsage has the nodes send usage every so often while the load lasts.
func (b *breaking) liveUsage(ctx context.Context, members [][]string, every time.Duration) (swarm.Reply, error) {
	return b.Swarm.Do(ctx, swarm.Command{Live: &swarm.Live{
		Members: members, Meters: usageMeters(), Every: every, For: b.each,
	}})
}

// usageObjectives are those of live usage.
func usageObjectives(sent swarm.Reply, lasts time.Duration) []Objective {
	var ended int64
	for _, n := range sent.Failures {
		ended += n
	}
	return []Objective{
		{Name: "usage acknowledged, p99", Got: Samples(sent.Millis).P99() / 1000, Limit: maxAckSeconds, Unit: "s"},
		{
			Name: "usage still waits at the end, for", Got: max(0, sent.Seconds-lasts.Seconds()), Limit: maxAckSeconds,
			Unit: "s",
		},
		{Name: "nodes whose usage broke off", Got: float64(sent.Broken), Unit: "nodes"},
		{Name: "sessions that ended", Got: float64(ended), Unit: "sessions"},
	}
}

const (
	// The rows go from first to most: nodes; instances on loadedNodes; launches, records and events a second.
	firstNodes, mostNodes           = 1250, 20_000
	firstInstances, mostInstances   = 10_000, 320_000
	firstRecords, mostRecords       = 1000, 128_000
	loadedNodes                     = 1000
	fineResolution, onlyUpwardsStep = 1.15, 2
)

// measureNodesBreak drives up the number of nodes with workloads that report, send usage and come back after a kill.
func measureNodesBreak(ctx context.Context, e *Env) (_ []Result, err error) {
	most := or(e.Params.Nodes, mostNodes)
	first := min(firstNodes, max(most/4, 1))
	b, err := startBreaking(ctx, e, "breaks-nodes", first, or(e.Params.Workloads, workloadsPerNode))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.end()) }()
	s := Search{Start: float64(first), Max: float64(most), Resolution: fineResolution, Whole: true}
	k, err := s.find(func(load float64) (Trial, error) {
		t, err := b.tryNodes(ctx, int(load))
		b.say("nodes", load, t)
		return t, err
	})
	if err != nil {
		return nil, err
	}
	r := k.result(Result{
		Name: "breaks-nodes", What: fmt.Sprintf("nodes with %d workloads each that one hub serves", b.workloads),
		Target: fmt.Sprintf("≥ %d", 10_000),
		Note: fmt.Sprintf("each load: %s of reports every 30 s and usage every %s of %d meters, then a kill of the hub; "+
			"%d callers", b.each, usageCadence, len(usageMeters()), len(b.tokens)),
	}, "nodes")
	r.Reached = r.P50 >= 10_000
	return []Result{r}, nil
}

// tryNodes has so many nodes live for a while, and kills the hub under them.
func (b *breaking) tryNodes(ctx context.Context, nodes int) (t Trial, err error) {
	if have := len(b.Nodes); nodes > have {
		if err := b.enroll(ctx, nodes-have); err != nil {
			return t, err
		}
		if err := b.load(ctx, b.Nodes[have:], b.workloads); err != nil {
			return t, err
		}
	}
	b.e.Say("connecting %d nodes", nodes)
	if _, err := b.connectLoaded(ctx, nodes, b.workloads, 0); err != nil {
		return t, err
	}
	if err := b.awaitSequenced(ctx); err != nil {
		return t, err
	}
	members, err := b.membersOf(ctx, nodes, b.workloads)
	if err != nil {
		return t, err
	}
	if t, err = b.trial(ctx, func(ctx context.Context) ([]Objective, error) {
		sent, err := b.liveUsage(ctx, members, min(usageCadence, b.each))
		return usageObjectives(sent, b.each), err
	}); err != nil {
		return t, err
	}
	back := killed{nodes: nodes, ends: map[string]int64{}}
	if err := b.kill(ctx, b.tokens, &back); err != nil {
		return t, err
	}
	t.Objectives = append(t.Objectives,
		Objective{Name: "hub serves after a kill", Got: back.away.P(100), Limit: maxReadySeconds, Unit: "s"},
		Objective{Name: "all nodes back", Got: back.back.P(100), Limit: maxAllBackSeconds, Unit: "s"})
	return t, nil
}

// measureRecordsBreak drives up the rate of usage by cutting it more often.
func measureRecordsBreak(ctx context.Context, e *Env) (_ []Result, err error) {
	nodes := or(e.Params.Nodes, loadedNodes)
	b, err := startBreaking(ctx, e, "breaks-records", nodes, or(e.Params.Workloads, workloadsPerNode))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.end()) }()
	members, err := b.membersOf(ctx, nodes, b.workloads)
	if err != nil {
		return nil, err
	}
	perCut := nodes * b.workloads * len(usageMeters())
	s := Search{
		Start: firstRecords, Max: float64(or(e.Params.Rows, mostRecords)), Resolution: fineResolution, Whole: true,
	}
	k, err := s.find(func(perSecond float64) (Trial, error) {
		// Sessions that an overload has ended come back first.
		if _, err := b.connectLoaded(ctx, nodes, b.workloads, 0); err != nil {
			return Trial{}, err
		}
		every := time.Duration(float64(perCut) / perSecond * float64(time.Second))
		t, err := b.trial(ctx, func(ctx context.Context) ([]Objective, error) {
			sent, err := b.liveUsage(ctx, members, every)
			return usageObjectives(sent, b.each), err
		})
		b.say("records a second", perSecond, t)
		return t, err
	})
	if err != nil {
		return nil, err
	}
	r := k.result(Result{
		Name: "breaks-records", What: fmt.Sprintf("usage records a second of %d nodes with %d workloads each", nodes,
			b.workloads), Target: fmt.Sprintf("≥ %d", recordsOfTarget),
		Note: fmt.Sprintf("each load lasts %s; segments of %d records, cut the more often the higher the rate; %d callers",
			b.each, b.workloads*len(usageMeters()), len(b.tokens)),
	}, "records/s")
	r.Reached = r.P50 >= recordsOfTarget
	return []Result{r}, nil
}

// recordsOfTarget is what 10,000 nodes with 10 workloads measure: 3 meters, every 30 s.
const recordsOfTarget = 10_000

// measureInstancesBreak drives up how many instances the hub has, on a fixed number of nodes.
func measureInstancesBreak(ctx context.Context, e *Env) (_ []Result, err error) {
	nodes := or(e.Params.Nodes, loadedNodes)
	most := or(e.Params.Rows, mostInstances)
	perNode := max(min(firstInstances, most/4)/nodes, 1)
	b, err := startBreaking(ctx, e, "breaks-instances", nodes, perNode)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.end()) }()
	s := Search{
		Start: float64(perNode), Max: float64(most / nodes), Resolution: onlyUpwardsStep, OnlyUp: true, Whole: true,
	}
	k, err := s.find(func(perNode float64) (Trial, error) {
		t, err := b.tryInstances(ctx, nodes, int(perNode))
		b.say(fmt.Sprintf("instances on each of %d nodes", nodes), perNode, t)
		return t, err
	})
	if err != nil {
		return nil, err
	}
	k = k.times(float64(nodes))
	r := k.result(Result{
		Name: "breaks-instances", What: fmt.Sprintf("running instances of one hub, on %d nodes", nodes),
		Target: fmt.Sprintf("≥ %d", instancesOfTarget),
		Note: fmt.Sprintf("instances are doubled; each number: a kill of the hub, then %s of reports and usage; %d callers",
			b.each, len(b.tokens)),
	}, "instances")
	r.Reached = r.P50 >= instancesOfTarget
	return []Result{r}, nil
}

// instancesOfTarget are those of 10,000 nodes with 10 workloads.
const instancesOfTarget = 100_000

// tryInstances fills the nodes up, kills the hub and has the nodes live for a while.
func (b *breaking) tryInstances(ctx context.Context, nodes, perNode int) (t Trial, err error) {
	if perNode > b.workloads {
		b.e.Say("making %d instances", nodes*(perNode-b.workloads))
		if err := b.load(ctx, b.Nodes[:nodes], perNode-b.workloads); err != nil {
			return t, err
		}
		b.workloads = perNode
	}
	back := killed{nodes: nodes, ends: map[string]int64{}}
	if err := b.kill(ctx, b.tokens, &back); err != nil {
		return t, err
	}
	if _, err := b.connectLoaded(ctx, nodes, perNode, 0); err != nil {
		return t, err
	}
	if err := b.awaitSequenced(ctx); err != nil {
		return t, err
	}
	members, err := b.membersOf(ctx, nodes, perNode)
	if err != nil {
		return t, err
	}
	t, err = b.trial(ctx, func(ctx context.Context) ([]Objective, error) {
		sent, err := b.liveUsage(ctx, members, min(usageCadence, b.each))
		return usageObjectives(sent, b.each), err
	})
	t.Objectives = append(t.Objectives,
		Objective{Name: "hub serves after a kill", Got: back.away.P(100), Limit: maxReadySeconds, Unit: "s"},
		Objective{Name: "all nodes back", Got: back.back.P(100), Limit: maxAllBackSeconds, Unit: "s"})
	return t, err
}
