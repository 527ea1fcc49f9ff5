package main

import (
	"context"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

// simulationSamples are rounds of two worlds side by side, which is what two cores run.
const (
	simulationSamples = 5
	simulatedWorlds   = 2
)

// simulationRows measure the simulation, which runs the product's pure cores.
func simulationRows() []Row {
	return []Row{{Name: "simulation", Measure: measureSimulation}}
}

func measureSimulation(ctx context.Context, e *Env) ([]Result, error) {
	defer debug.SetGCPercent(debug.SetGCPercent(sim.GCPercent))
	var perSecond Samples
	for round := range e.Samples(simulationSamples) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		rate, err := simulate(uint64(round))
		if err != nil {
			return nil, err
		}
		perSecond = append(perSecond, rate)
	}
	r := perSecond.Into(Result{
		Name: "simulation", What: "simulation of hub and 250 nodes: events in a second of one core", Unit: "events/s",
		Target: "≥ 150000", Note: "two worlds side by side, 30 days each; doc.go of e2e/sim says what they cost",
	})
	r.Reached = r.P50 >= 150_000
	return []Result{r}, nil
}

// simulate runs two worlds at the same time and returns their events in a second of processor time.
func simulate(round uint64) (perSecond float64, err error) {
	before, err := usedCPU()
	if err != nil {
		return 0, err
	}
	var worlds [simulatedWorlds]sim.Result
	var errs [simulatedWorlds]error
	var running sync.WaitGroup
	for i := range worlds {
		running.Go(func() { worlds[i], errs[i] = sim.Run(sim.LargeWorld(1 + simulatedWorlds*round + uint64(i))) })
	}
	running.Wait()
	events := 0
	for i := range worlds {
		if errs[i] != nil {
			return 0, errs[i]
		}
		events += worlds[i].Events
	}
	after, err := usedCPU()
	return float64(events) / (after - before).Seconds(), err
}

// usedCPU is the processor time of this process.
func usedCPU() (time.Duration, error) {
	var used syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), err
}
