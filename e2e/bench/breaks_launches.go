package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// launchNodes share the launches.
	launchNodes = 500
	// The rate of launches goes from first to most a second; the hub's own budget permits 2,000 requests a second.
	firstLaunches, mostLaunches = 25, 1600
	// launchesOfTarget a second is what the row api asks of POST.
	launchesOfTarget = 300
	// maxPostMillis and maxRunningMillis are 99th percentiles: of the request, and of the time until the instance runs.
	maxPostMillis, maxRunningMillis = 200, 1000
	// maxDrainSeconds is from the last answer until every instance runs.
	maxDrainSeconds = 5
	// launchPatience is how long launches of an overload are awaited.
	launchPatience = time.Minute
	// decommissionsAtOnce take a load's instances away again.
	decommissionsAtOnce = 16
)

// measureLaunchesBreak drives up the rate of launches on nodes whose workloads are ready as soon as they are accepted.
func measureLaunchesBreak(ctx context.Context, e *Env) (_ []Result, err error) {
	bin, err := e.HubWithSymbols(ctx)
	if err != nil {
		return nil, err
	}
	nodes := max(or(e.Params.Nodes, launchNodes)/apiTenants, 1) * apiTenants
	l, err := startLoadTestOf(ctx, e, bin, "breaks-launches", nodes)
	if err != nil {
		return nil, err
	}
	b := &breaking{LoadTest: l, e: e, each: or(e.Params.For, breakFor)}
	defer func() { err = errors.Join(err, b.end()) }()
	if _, err := l.connect(ctx, nodes); err != nil {
		return nil, err
	}
	c, err := newAPITest(ctx, l)
	if err != nil {
		return nil, err
	}
	defer c.web.CloseIdleConnections()
	if b.tokens, err = l.addCallers(ctx, or(e.Params.Callers, manyCallers)); err != nil {
		return nil, err
	}
	s := Search{
		Start: firstLaunches, Max: float64(or(e.Params.Rows, mostLaunches)), Resolution: fineResolution, Whole: true,
	}
	k, err := s.find(func(perSecond float64) (Trial, error) {
		t, err := c.tryLaunches(ctx, b, int(perSecond))
		b.say("launches a second", perSecond, t)
		return t, err
	})
	if err != nil {
		return nil, err
	}
	r := k.result(Result{
		Name: "breaks-launches", What: fmt.Sprintf("launches a second on %d simulated nodes", nodes),
		Target: fmt.Sprintf("≥ %d", launchesOfTarget),
		Note: fmt.Sprintf("each load: POST of instances at a steady rate for %s, running as soon as the node has accepted "+
			"and reported; then all are decommissioned; %d orgs with %d service accounts each; %d callers beside", b.each,
			apiTenants, operatorsInTenant, len(b.tokens)),
	}, "launches/s")
	r.Reached = r.P50 >= launchesOfTarget
	return []Result{r}, nil
}

// tryLaunches launches at a steady rate and takes all away again.
func (c *APITest) tryLaunches(ctx context.Context, b *breaking, perSecond int) (Trial, error) {
	var mu sync.Mutex
	made := map[string]operator{}
	t, err := b.trial(ctx, func(ctx context.Context) ([]Objective, error) {
		n := max(int(float64(perSecond)*b.each.Seconds()), 1)
		refused := 0
		posts, err := steady(ctx, perSecond, n, func(ctx context.Context, i int) error {
			o := c.operators[i%len(c.operators)]
			body, err := c.call(ctx, http.MethodPost, o.url, o.token, o.creations[i/len(c.operators)%len(o.creations)])
			var instance client.AppInstance
			if err == nil {
				err = json.Unmarshal(body, &instance)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				refused++
				if refused == 1 {
					b.e.Say("a launch fails: %v", err)
				}
				return nil
			}
			made[instance.ID] = o
			return nil
		})
		if err != nil {
			return nil, err
		}
		drain, running, err := c.awaitLaunched(ctx, made)
		return []Objective{
			{Name: "launches that are refused", Got: float64(refused), Unit: "launches"},
			{Name: "POST, p99", Got: posts.P99(), Limit: maxPostMillis, Unit: "ms"},
			{Name: "from the row to running, p99", Got: running.P99(), Limit: maxRunningMillis, Unit: "ms"},
			{Name: "all running after the last answer", Got: drain, Limit: maxDrainSeconds, Unit: "s"},
		}, err
	})
	if err != nil {
		return t, err
	}
	return t, c.decommission(ctx, made)
}

// awaitLaunched waits until the instances run; it returns for how long, and how long each took from its row to running.
func (c *APITest) awaitLaunched(ctx context.Context, made map[string]operator) (seconds float64, took Samples,
	err error,
) {
	var ids []string
	for id := range made {
		ids = append(ids, id)
	}
	wait := stopwatch()
	limit, cancel := context.WithTimeout(ctx, launchPatience)
	defer cancel()
	// One that does not run by then shows in the time.
	if err := c.awaitRunning(limit); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return 0, nil, err
	}
	seconds = wait().Seconds()
	err = c.sql(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `SELECT extract(epoch FROM activated_at - created_at)::float8 * 1000 FROM app_instances
			WHERE id = ANY($1::uuid[]) AND activated_at IS NOT NULL`, ids)
		if err != nil {
			return err
		}
		took, err = pgx.CollectRows(rows, pgx.RowTo[float64])
		return err
	})
	return seconds, took, err
}

// decommission ends instances and waits until their nodes have proved that nothing is left.
func (c *APITest) decommission(ctx context.Context, made map[string]operator) error {
	next := make(chan string)
	errs := make([]error, decommissionsAtOnce)
	var running sync.WaitGroup
	for k := range decommissionsAtOnce {
		running.Go(func() {
			for id := range next {
				o := made[id]
				if errs[k] == nil {
					_, errs[k] = c.call(ctx, http.MethodPost, o.url+"/"+id+"/decommission", o.token, []byte("{}"))
				}
			}
		})
	}
	for id := range made {
		next <- id
	}
	close(next)
	running.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return c.awaitNone(ctx, "instances that are not decommissioned", `SELECT count(*) FROM app_instances
		WHERE status = 'decommissioning'`)
}
