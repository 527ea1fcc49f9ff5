package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/e2e/baseline"
)

// The numbers of samples.
const (
	fullSamples   = 300
	warmUpSamples = 10
	// baselineEvery spreads the baseline's samples between the launches, so that both see the same machine.
	baselineEvery = 3
	// manyAtOnce is how many instances start together, and how many workloads a busy node has.
	manyAtOnce = 20
	// manyRounds is the number of rounds.
	manyRounds = 10
)

// nodeRows measure one node.
func nodeRows() []Row {
	return []Row{
		{Name: "lifecycle", Measure: measureLifecycle},
		{Name: "launch-configured", Measure: measureConfigured},
		{Name: "many", Measure: measureMany},
		{Name: "idle", Measure: measureIdle},
		{Name: "restart", Measure: measureRestart},
		{Name: "pass", Measure: measurePass},
		{Name: "logs", Measure: measureLogs},
		{Name: "port-forward", Measure: measureForward},
		{Name: "project", Measure: measureProject},
		{Name: "start-first", Measure: measureUpgrade},
	}
}

// baselineSamples are the parts of the references, a sample each.
type baselineSamples struct {
	launch, removal                            Samples
	newContainer, network, newTask, start      Samples
	kill, deleteTask, deleteContainer, detach  Samples
	cniLaunch, cniRemoval, dockerRun, dockerRm Samples
}

func (f *baselineSamples) add(p baseline.Reference) {
	f.launch.Add(p.Launch)
	f.removal.Add(p.Removal)
	f.newContainer.Add(p.NewContainer)
	f.network.Add(p.Network)
	f.newTask.Add(p.NewTask)
	f.start.Add(p.Start)
	f.kill.Add(p.Kill)
	f.deleteTask.Add(p.DeleteTask)
	f.deleteContainer.Add(p.DeleteContainer)
	f.detach.Add(p.Detach)
}

// measure takes a sample of each reference that this machine has.
func (f *baselineSamples) measure(ctx context.Context, r *references) error {
	p, err := r.bench.MeasureReference(ctx, r.attacher)
	if err != nil {
		return err
	}
	f.add(p)
	cni, err := r.bench.Measure(ctx)
	if err != nil {
		return err
	}
	f.cniLaunch.Add(cni.Total())
	f.cniRemoval.Add(cni.Removal())
	if r.docker == nil {
		return nil
	}
	run, rm, err := r.docker.Measure(ctx)
	f.dockerRun.Add(run)
	f.dockerRm.Add(rm)
	return err
}

// measureLifecycle launches and decommissions one instance after the other, watched by a client.
func measureLifecycle(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	r, err := s.references(ctx, e)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	var launch, removal Samples
	var baselines baselineSamples
	for i := range warmUpSamples + e.Samples(fullSamples) {
		instance, up, err := s.Launch(ctx, fmt.Sprintf("bench-%d", i))
		if err != nil {
			return nil, err
		}
		down, err := s.Decommission(ctx, instance.ID)
		if err != nil {
			return nil, err
		}
		if i < warmUpSamples {
			continue
		}
		launch.Add(up)
		removal.Add(down)
		if i%baselineEvery == 0 {
			if err := baselines.measure(ctx, r); err != nil {
				return nil, err
			}
		}
	}
	return lifecycleResults(launch, removal, baselines), nil
}

func lifecycleResults(launch, removal Samples, baselines baselineSamples) []Result {
	up := launch.Into(Result{
		Name: "lifecycle.launch", What: "POST app-instance → running, seen by a watching client", Unit: "ms",
		Target: "p50 ≤ baseline + 60 and ≤ 200, p99 ≤ baseline + 250",
		Parts: []Part{
			{"baseline: NewContainer", baselines.newContainer.P50()},
			{"the product's network, complete after", baselines.network.P50()},
			{"NewTask", baselines.newTask.P50()},
			{"Start", baselines.start.P50()},
			{"containerd and go-cni, one after the other", baselines.cniLaunch.P50()},
		},
		Note: fmt.Sprintf("image present, app ready at once; baseline n = %d, between the launches; its steps overlap as "+
			"the product's do", len(baselines.launch)),
	}).against(baselines.launch.P50())
	up.Reached = up.N >= minForP99 && up.P50 <= up.Baseline+60 && up.P50 <= 200 && up.P99 <= up.Baseline+250
	down := removal.Into(Result{
		Name: "lifecycle.decommission", What: "decommission → gone by the node's proof, seen by a watching client",
		Unit: "ms", Target: "p50 ≤ 1.3 × baseline",
		Parts: []Part{
			{"baseline: kill", baselines.kill.P50()},
			{"delete task", baselines.deleteTask.P50()},
			{"delete container and snapshot", baselines.deleteContainer.P50()},
			{"remove the product's network", baselines.detach.P50()},
			{"containerd and go-cni", baselines.cniRemoval.P50()},
		},
	}).against(baselines.removal.P50())
	down.Reached = down.Ratio <= 1.3
	if len(baselines.dockerRun) > 0 {
		up.Parts = append(up.Parts, Part{"docker run -p", baselines.dockerRun.P50()})
		down.Parts = append(down.Parts, Part{"docker rm", baselines.dockerRm.P50()})
	}
	return []Result{up, down}
}

// measureMany launches many instances at once, in several rounds.
func measureMany(ctx context.Context, e *Env) ([]Result, error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	var all Samples
	for i := range 1 + e.Samples(manyRounds) {
		ids, took, err := s.LaunchMany(ctx, manyAtOnce)
		if err := errors.Join(err, s.DecommissionAll(ctx, ids)); err != nil {
			return nil, err
		}
		if i > 0 { // the first is for warming up
			all.Add(took)
		}
	}
	r := all.Into(Result{
		Name: "many.running", What: fmt.Sprintf("%d instances at once → all running", manyAtOnce), Unit: "ms",
		Target: "p50 ≤ 1200",
		Note: fmt.Sprintf("%d requests at once, each instance watched by the one client; hub, PostgreSQL, containerd and "+
			"node on the one machine", manyAtOnce),
	})
	r.Reached = r.P50 <= 1200
	return []Result{r}, nil
}

// measureRestart kills the agent while workloads run and starts it again.
func measureRestart(ctx context.Context, e *Env) ([]Result, error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	ids, _, err := s.LaunchMany(ctx, manyAtOnce)
	if err != nil {
		return nil, errors.Join(err, s.DecommissionAll(ctx, ids))
	}
	var all Samples
	for range e.Samples(manyRounds) {
		took, err := s.restart(ctx)
		if err != nil {
			return nil, errors.Join(err, s.DecommissionAll(ctx, ids))
		}
		all.Add(took)
	}
	r := all.Into(Result{
		Name: "restart.recognised", What: fmt.Sprintf("agent start beside %d running workloads → all ready again in its "+
			"own report, none touched", manyAtOnce),
		Unit: "ms", Target: "p50 ≤ 1000", Note: "from the start of the program after kill -9; same process ids before and " +
			"after",
	})
	r.Reached = r.P50 <= 1000
	return []Result{r}, s.DecommissionAll(ctx, ids)
}

// restart kills the agent and starts it again; it returns the time until all workloads were recognised.
func (s *Testbed) restart(ctx context.Context) (time.Duration, error) {
	before, err := s.processes(ctx)
	if err != nil {
		return 0, err
	}
	if err := s.Agent.Kill9(); err != nil {
		return 0, err
	}
	start := time.Now()
	if err := s.Agent.Restart(ctx); err != nil {
		return 0, err
	}
	if err := s.awaitRecognised(ctx, manyAtOnce); err != nil {
		return 0, err
	}
	took := time.Since(start)
	after, err := s.processes(ctx)
	if err == nil && before != after {
		err = fmt.Errorf("the processes changed from %s to %s", before, after)
	}
	return took, err
}
