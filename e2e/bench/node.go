package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/e2e/floor"
)

// How much is measured.
const (
	fullSamples   = 300
	warmUpSamples = 10
	// floorEvery spreads the floor's samples between the launches, so that both see the same machine.
	floorEvery = 3
	// manyAtOnce is how many instances start together, and how many workloads a busy node has.
	manyAtOnce = 20
	// manyRounds is how often they do.
	manyRounds = 10
)

// nodeRows are about one node.
func nodeRows() []Row {
	return []Row{
		{"lifecycle", measureLifecycle},
		{"many", measureMany},
		{"idle", measureIdle},
		{"restart", measureRestart},
	}
}

// floorSamples are the parts of the floor, a sample each.
type floorSamples struct {
	launch, removal                                  Samples
	newContainer, newTask, start, network            Samples
	kill, deleteTask, deleteContainer, removeNetwork Samples
}

func (f *floorSamples) add(p floor.Parts) {
	f.launch.Add(p.Total())
	f.removal.Add(p.Removal())
	f.newContainer.Add(p.NewContainer)
	f.newTask.Add(p.NewTask)
	f.start.Add(p.Start)
	f.network.Add(p.Network)
	f.kill.Add(p.Kill)
	f.deleteTask.Add(p.DeleteTask)
	f.deleteContainer.Add(p.DeleteContainer)
	f.removeNetwork.Add(p.RemoveNetwork)
}

// measureLifecycle launches and decommissions one instance after the other, each seen by a client that watches it.
func measureLifecycle(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Stand(ctx)
	if err != nil {
		return nil, err
	}
	model, _, err := s.Launch(ctx, "model")
	if err != nil {
		return nil, err
	}
	bench, err := s.Floor(ctx, e, model.ID)
	if err != nil {
		return nil, err
	}
	defer func() {
		_, gone := s.Decommission(ctx, model.ID)
		err = errors.Join(err, bench.Close(ctx), gone)
	}()
	var launch, removal Samples
	var floors floorSamples
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
		if i%floorEvery == 0 {
			p, err := bench.Measure(ctx)
			if err != nil {
				return nil, err
			}
			floors.add(p)
		}
	}
	return lifecycleResults(launch, removal, floors), nil
}

func lifecycleResults(launch, removal Samples, floors floorSamples) []Result {
	up := launch.Into(Result{
		Name: "lifecycle.launch", What: "POST app-instance → running, seen by a watching client", Unit: "ms",
		Target: "p50 ≤ floor + 60 and ≤ 200, p99 ≤ floor + 250",
		Parts: []Part{
			{"floor: NewContainer", floors.newContainer.P50()},
			{"NewTask", floors.newTask.P50()},
			{"Start", floors.start.P50()},
			{"go-cni Setup (bridge, portmap)", floors.network.P50()},
		},
		Note: fmt.Sprintf("image present, app ready at once; floor n = %d, between the launches", len(floors.launch)),
	}).against(floors.launch.P50())
	up.Reached = up.P50 <= up.Floor+60 && up.P50 <= 200 && up.P99 <= up.Floor+250
	down := removal.Into(Result{
		Name: "lifecycle.decommission", What: "decommission → gone by the node's proof, seen by a watching client",
		Unit: "ms", Target: "p50 ≤ 1.3 × floor",
		Parts: []Part{
			{"floor: kill", floors.kill.P50()},
			{"delete task", floors.deleteTask.P50()},
			{"delete container and snapshot", floors.deleteContainer.P50()},
			{"go-cni Remove (portmap, bridge)", floors.removeNetwork.P50()},
		},
	}).against(floors.removal.P50())
	down.Reached = down.Ratio <= 1.3
	return []Result{up, down}
}

// measureMany launches many instances at once, again and again.
func measureMany(ctx context.Context, e *Env) ([]Result, error) {
	s, err := e.Stand(ctx)
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

// measureRestart stops the agent beside running workloads and starts it again.
func measureRestart(ctx context.Context, e *Env) ([]Result, error) {
	s, err := e.Stand(ctx)
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
func (s *Stand) restart(ctx context.Context) (time.Duration, error) {
	before, err := s.processes(ctx)
	if err != nil {
		return 0, err
	}
	if err := s.Agent.Kill9(); err != nil {
		return 0, err
	}
	start := time.Now()
	if err := s.RestartAgent(ctx); err != nil {
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
