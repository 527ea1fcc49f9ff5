package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
)

const (
	// killRounds is how often the hub is killed at each round-trip time.
	killRounds = 5
	// roundPause lets the hub finish what a reconnect has left to do.
	roundPause = 10 * time.Second
	// maxBackSeconds and maxCallMillis are the targets of all reconnects.
	maxBackSeconds, maxCallMillis = 20, 200
)

// reconnectRows kill the hub under nodes with workloads, one row for each number of nodes.
func reconnectRows() []Row {
	var all []Row
	for _, nodes := range []int{1000, 5000, 10_000} {
		name := fmt.Sprintf("reconnect-%dk", nodes/1000)
		all = append(all, Row{Name: name, Long: true, Measure: func(ctx context.Context, e *Env) ([]Result, error) {
			return measureKills(ctx, e, name, or(e.Params.Nodes, nodes))
		}})
	}
	return all
}

// roundTrips are the round-trip times between nodes and hub: one machine, one continent, the far side of the world.
func roundTrips(e *Env) []time.Duration {
	if e.Params.RTT >= 0 {
		return []time.Duration{e.Params.RTT}
	}
	return []time.Duration{0, 50 * time.Millisecond, 300 * time.Millisecond}
}

// killed is what several kills of a hub gave, in seconds unless it says otherwise.
type killed struct {
	// back is until the last node of a round was back, half and most until half and 99 % of them were.
	back, half, most, away Samples
	// calls are times of API requests from the moment that the hub serves, in milliseconds.
	calls        Samples
	dials        int64
	cpu          [3]time.Duration
	ends         map[string]int64
	nodes, times int
}

// measureKills kills the hub at each round-trip time.
func measureKills(ctx context.Context, e *Env, name string, nodes int) (results []Result, err error) {
	workloads := or(e.Params.Workloads, workloadsPerNode)
	c, err := startLoaded(ctx, e, e.Bin, name, nodes, workloads)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	tokens, err := c.addCallers(ctx, or(e.Params.Callers, manyCallers))
	if err != nil {
		return nil, err
	}
	for _, rtt := range roundTrips(e) {
		k := killed{nodes: nodes, ends: map[string]int64{}}
		for range e.Samples(killRounds) {
			// They dial as after sessions of hours, over paths of this length.
			if _, err := c.connectLoaded(ctx, nodes, workloads, rtt); err != nil {
				return results, err
			}
			if err := pause(ctx, roundPause); err != nil {
				return results, err
			}
			if err := c.kill(ctx, tokens, &k); err != nil {
				return results, fmt.Errorf("%s of round-trip time: %w", rtt, err)
			}
		}
		results = append(results, k.results(name, rtt, workloads, len(tokens))...)
	}
	return results, nil
}

// kill ends the hub by SIGKILL, starts it again at once and waits until all nodes are back.
func (c *LoadTest) kill(ctx context.Context, tokens []string, k *killed) error {
	gone := time.Now()
	if err := c.Hub.Kill9(); err != nil {
		return err
	}
	if err := c.Hub.Restart(ctx); err != nil {
		return err
	}
	serving := time.Now()
	before, err := c.cpu()
	if err != nil {
		return err
	}
	callers, err := c.open(tokens)
	if err != nil {
		return err
	}
	calls, stop := c.callAPI(ctx, callers, callerPause)
	back, err := c.Swarm.Do(ctx, swarm.Command{Back: &swarm.Back{Nodes: k.nodes, Since: gone}})
	stop()
	after, cpuErr := c.cpu()
	took, callErr := calls()
	if err := errors.Join(err, cpuErr, callErr); err != nil {
		return err
	}
	away := serving.Sub(gone)
	var times Samples
	for _, ms := range back.Millis {
		times = append(times, ms/1000-away.Seconds())
	}
	k.times++
	k.back, k.half, k.most = append(k.back, times.P(100)), append(k.half, times.P50()), append(k.most, times.P99())
	k.away, k.calls = append(k.away, away.Seconds()), append(k.calls, took...)
	k.dials += back.Dials
	for i := range k.cpu {
		k.cpu[i] += after[i] - before[i]
	}
	for reason, n := range back.Failures {
		k.ends[reason] += n
	}
	return nil
}

// perRound are the parts of a line that are sums of all rounds.
func (k killed) perRound(sum float64) float64 { return sum / float64(k.times) }

func (k killed) results(name string, rtt time.Duration, workloads, callers int) []Result {
	name = fmt.Sprintf("%s.%dms", name, rtt.Milliseconds())
	nodes := k.back.Into(Result{
		Name: name + ".nodes", What: fmt.Sprintf("%d nodes with %d workloads each after a killed hub, %s of round-trip "+
			"time: all back", k.nodes, workloads, rtt), Unit: "s",
		Target: fmt.Sprintf("p50 ≤ %d", maxBackSeconds), Reached: k.back.P50() <= maxBackSeconds,
		Parts: []Part{
			{Name: "half back after", Value: k.half.P50()},
			{Name: "99 % back after", Value: k.most.P50()},
			{Name: "slowest round", Value: k.back.P(100)},
			{Name: "hub was away", Value: k.away.P50()},
			{Name: "dials per node", Value: k.perRound(float64(k.dials) / float64(k.nodes))},
			{Name: "hub core-s", Value: k.perRound(k.cpu[0].Seconds())},
			{Name: "PostgreSQL core-s", Value: k.perRound(k.cpu[1].Seconds())},
			{Name: "simulated nodes core-s", Value: k.perRound(k.cpu[2].Seconds())},
		},
		Note: "from the hub's ready line after SIGKILL, one sample a kill; backoff as the agent's after sessions of hours; " +
			"ends of dials and sessions in all rounds: " + ends(k.ends),
	})
	api := k.calls.Into(Result{
		Name: name + ".api", What: fmt.Sprintf("API of the same hub meanwhile, %d callers", callers), Unit: "ms",
		Target: fmt.Sprintf("p99 ≤ %d", maxCallMillis), Reached: k.calls.P99() <= maxCallMillis,
		Note: fmt.Sprintf("each caller asks %s after its last answer, three reads to one write, over a new connection after "+
			"each kill; instances, leases, events and audit rows of all workloads are in the tables", callerPause),
	})
	return []Result{nodes, api}
}
