package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/e2e/load"
)

const (
	// upgradeRounds is the number of upgrades under requestsPerSecond.
	upgradeRounds     = 10
	requestsPerSecond = 200
	// quietTime lies between two upgrades.
	quietTime = time.Second
)

// measureUpgrade upgrades an instance again and again while a client sends requests to its published port.
func measureUpgrade(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	version := s.version
	defer func() { s.version = version }()
	beside := bytes.Replace(appManifest, []byte("  metering:"),
		[]byte("  upgrade: {strategy: start_first}\n  metering:"), 1)
	rounds := e.Samples(upgradeRounds)
	for n := range rounds + 1 {
		// Another environment: the container of the version before would go on otherwise.
		env := fmt.Sprintf("command: [/app]\n    env: [{name: BENCH_VERSION, value: \"%d\"}]", n)
		if err := s.release(ctx, upgradeVersion(n), bytes.Replace(beside, []byte("command: [/app]"), []byte(env),
			1)); err != nil {
			return nil, err
		}
	}
	s.version = upgradeVersion(0)
	i, _, err := s.Launch(ctx, "upgraded")
	if err != nil {
		return nil, err
	}
	defer func() {
		_, gone := s.Decommission(ctx, i.ID)
		err = errors.Join(err, gone)
	}()
	requests := load.Start(ctx, i.Endpoints[0].URL+"/", requestsPerSecond)
	var took Samples
	for n := range rounds {
		began := time.Now()
		if _, err := s.Tenant.Upgrade(ctx, s.Operator, i.ID, upgradeVersion(n+1), nil); err != nil {
			requests.Stop()
			return nil, err
		}
		took.Add(time.Since(began))
		time.Sleep(quietTime)
	}
	got := requests.Stop()
	var answers Samples
	for _, d := range got.Took {
		answers.Add(d)
	}
	r := Result{
		Name: "start-first", What: fmt.Sprintf("requests that fail while an instance is upgraded under %d requests a second",
			requestsPerSecond), Unit: "requests", Target: "0",
		Parts: []Part{
			{"upgrade → running, ms", took.P50()},
			{"answer, p50 in ms", answers.P50()},
			{"answer, p99 in ms", answers.P(99)},
			{"answer, longest in ms", answers.P(100)},
		},
		Note: fmt.Sprintf("%d upgrades, %d requests, every other on a connection of its own; image present", rounds,
			got.Requests),
	}.single(float64(got.Failed))
	r.Reached = got.Failed == 0
	if got.Failed > 0 {
		r.Note += fmt.Sprintf("; first failure: %v", got.Errors[0])
	}
	return []Result{r}, nil
}

func upgradeVersion(n int) string { return fmt.Sprintf("1.1.%d", n) }
