package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// The hub's budgets decide how many callers the API needs: 100 requests a second each, 400 an org.
const (
	apiTenants        = 5
	operatorsInTenant = 4
	apiNodes          = 100
	apiNodeCores      = 64
	apiNodeMiB        = 64 << 10

	// apiTimeout is for one request: a hub that cannot keep a steady rate answers late, not never.
	apiTimeout = time.Minute
	// apiAtOnce is how many requests are under way where the rate is measured.
	apiAtOnce = 16
	// getBlock is less than what the budgets' bursts allow at once; getRounds blocks alternate with the baseline's.
	getBlock  = 2000
	getRounds = 5
	// burstRefill is how long the budgets take to be full again.
	burstRefill = 5 * time.Second

	getsPerSecond    = 200
	createsPerSecond = 100
	// steadySeconds is how long a steady rate is kept.
	steadySeconds = 10
	createCount   = 2000
)

func apiRows() []Row { return []Row{{Name: "api", Measure: measureAPI}} }

// APITest is a hub with simulated nodes, whose tenants call its API.
type APITest struct {
	*LoadTest
	web       *http.Client
	operators []operator
}

// operator is a service account that creates instances in the allocations of its project.
type operator struct {
	url, token string
	// creations are bodies of requests; each names another allocation.
	creations [][]byte
	// instance is the URL of one.
	instance string
}

// measureAPI measures creation before reading, so that what is read is in a database with thousands of instances.
func measureAPI(ctx context.Context, e *Env) (results []Result, err error) {
	l, err := startLoadTest(ctx, e, "api", apiNodes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.end()) }()
	if _, err := l.connect(ctx, apiNodes); err != nil {
		return nil, err
	}
	c, err := newAPITest(ctx, l)
	if err != nil {
		return nil, err
	}
	defer c.web.CloseIdleConnections()
	if results, err = c.measureCreates(ctx, e); err != nil {
		return nil, err
	}
	gets, err := c.measureGets(ctx, e)
	return append(results, gets...), err
}

// newAPITest makes the tenants.
func newAPITest(ctx context.Context, l *LoadTest) (*APITest, error) {
	c := &APITest{LoadTest: l, web: apiClient()}
	for k := range apiTenants {
		if err := c.addTenant(ctx, k); err != nil {
			return nil, fmt.Errorf("tenant %d: %w", k, err)
		}
	}
	return c, nil
}

// apiClient uses HTTP/1.1, which costs the measuring client least.
func apiClient() *http.Client {
	return &http.Client{Timeout: apiTimeout, Transport: &http.Transport{
		MaxIdleConnsPerHost: 200,
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true},
	}}
}

// addTenant makes an org with its share of the nodes, an app and operators with an instance each.
func (c *APITest) addTenant(ctx context.Context, k int) error {
	slug := fmt.Sprintf("tenant-%d", k)
	dir := filepath.Join(c.dir, slug)
	t, err := scenario.NewTenant(ctx, c.Hub, dir, slug, "1000000")
	if err != nil {
		return err
	}
	image, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Content: []byte("never run"), Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	if err != nil {
		return err
	}
	publisher, err := t.NewPublisher(ctx)
	if err != nil {
		return err
	}
	app := fmt.Sprintf("%s-%d", appSlug, k)
	if _, err := t.Ship(ctx, publisher, scenario.Release{
		AppSlug: app, Version: appVersion, Image: image,
		Template: bytes.Replace(appManifest, []byte("slug: bench"), []byte("slug: "+app), 1),
	}); err != nil {
		return err
	}
	if err := errors.Join(t.Entitle(ctx, app), t.Price(ctx, app, price)); err != nil {
		return err
	}
	share := len(c.Nodes) / apiTenants
	var creations [][]byte
	for _, node := range c.Nodes[k*share : (k+1)*share] {
		allocation, err := t.Allocate(ctx, t.Admin, node, apiNodeCores, apiNodeMiB)
		if err != nil {
			return err
		}
		body, err := json.Marshal(client.AppInstanceCreate{
			AppSlug: app, Version: appVersion, DisplayName: "measured",
			PlacementIntent: client.PlacementIntent{AllocationIds: []string{allocation.ID}},
		})
		if err != nil {
			return err
		}
		creations = append(creations, body)
	}
	for n := range operatorsInTenant {
		if err := c.addOperator(ctx, t, fmt.Sprint("operator-", n), creations); err != nil {
			return err
		}
	}
	return nil
}

func (c *APITest) addOperator(ctx context.Context, t *scenario.Tenant, slug string, creations [][]byte) error {
	as, err := t.ServiceAccount(ctx, slug, client.ServiceAccountRoleAppOperator)
	if err != nil {
		return err
	}
	token, err := t.AccessToken(ctx, as)
	if err != nil {
		return err
	}
	o := operator{
		url:   c.Hub.Ready.APIURL + "/api/v1/projects/" + t.Project.ID + "/app-instances",
		token: token, creations: creations,
	}
	body, err := c.call(ctx, http.MethodPost, o.url, token, creations[0])
	if err != nil {
		return err
	}
	var i client.AppInstance
	if err := json.Unmarshal(body, &i); err != nil {
		return err
	}
	o.instance = o.url + "/" + i.ID
	c.operators = append(c.operators, o)
	return nil
}

// call makes one request and returns the answer's body.
func (c *APITest) call(ctx context.Context, method, url, token string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Idempotency-Key", uuid.NewString())
	}
	res, err := c.web.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode >= http.StatusBadRequest {
		err = fmt.Errorf("%s %s: %s: %s", method, url, res.Status, answer)
	}
	return answer, err
}

func (c *APITest) create(ctx context.Context, i int) error {
	o := c.operators[i%len(c.operators)]
	_, err := c.call(ctx, http.MethodPost, o.url, o.token, o.creations[i/len(c.operators)%len(o.creations)])
	return err
}

func (c *APITest) get(ctx context.Context, i int) error {
	o := c.operators[i%len(c.operators)]
	_, err := c.call(ctx, http.MethodGet, o.instance, o.token, nil)
	return err
}

func (c *APITest) measureCreates(ctx context.Context, e *Env) ([]Result, error) {
	const minRate, maxMillis = 300, 50
	times, err := steady(ctx, createsPerSecond, e.Samples(createsPerSecond*steadySeconds), c.create)
	if err != nil {
		return nil, err
	}
	before, err := c.cpu()
	if err != nil {
		return nil, err
	}
	n := e.Samples(createCount)
	perSecond, err := rate(ctx, n, c.create)
	if err != nil {
		return nil, err
	}
	after, err := c.cpu()
	if err != nil {
		return nil, err
	}
	perRequest := func(k int) float64 { return 1000 * (after[k] - before[k]).Seconds() / float64(n) }
	latency := times.Into(Result{
		Name: "api.create.latency", What: fmt.Sprintf("POST of an instance, %d a second", createsPerSecond), Unit: "ms",
		Target: fmt.Sprintf("p99 ≤ %d", maxMillis), Reached: times.P99() <= maxMillis,
	})
	r := Result{
		Name: "api.create.rate", What: fmt.Sprintf("POST of instances on %d simulated nodes", apiNodes),
		Unit: "requests/s", Target: fmt.Sprintf("≥ %d", minRate), Reached: perSecond >= minRate,
		Parts: []Part{
			{Name: "requests", Value: float64(n)},
			{Name: "hub core-ms a request", Value: perRequest(0)},
			{Name: "PostgreSQL core-ms a request", Value: perRequest(1)},
			{Name: "simulated nodes core-ms a request", Value: perRequest(2)},
		},
		Note: fmt.Sprintf("%d orgs with %d nodes and %d service accounts each, %d requests under way; every instance is "+
			"placed, funded, compiled, signed and pushed to its node", apiTenants, apiNodes/apiTenants, operatorsInTenant,
			apiAtOnce),
	}
	return []Result{latency, r.single(perSecond)}, nil
}

func (c *APITest) measureGets(ctx context.Context, e *Env) (_ []Result, err error) {
	const minRatio, maxMillis = 0.5, 10
	bare, stop, err := c.startBare(ctx, e)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	times, err := steady(ctx, getsPerSecond, e.Samples(getsPerSecond*steadySeconds), c.get)
	if err != nil {
		return nil, err
	}
	var (
		hub, baseline Samples
		spent         [3]time.Duration
	)
	n := e.Samples(getBlock)
	for range getRounds {
		if err := pause(ctx, burstRefill); err != nil {
			return nil, err
		}
		before, err1 := c.cpu()
		got, err2 := rate(ctx, n, c.get)
		after, err3 := c.cpu()
		least, err4 := rate(ctx, n, bare)
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			return nil, err
		}
		for k := range spent {
			spent[k] += after[k] - before[k]
		}
		hub, baseline = append(hub, got), append(baseline, least)
	}
	latency := times.Into(Result{
		Name: "api.get.latency", What: fmt.Sprintf("GET of an instance, %d a second", getsPerSecond), Unit: "ms",
		Target: fmt.Sprintf("p99 ≤ %d", maxMillis), Reached: times.P99() <= maxMillis,
	})
	r := Result{
		Name: "api.get.rate", What: "GET of an instance", Unit: "requests/s",
		Target: fmt.Sprintf("≥ %v × baseline", minRatio),
		Parts: []Part{
			{Name: "the slowest block", Value: hub.P(0)},
			{Name: "hub core-ms a request", Value: 1000 * spent[0].Seconds() / float64(n*getRounds)},
			{Name: "PostgreSQL core-ms a request", Value: 1000 * spent[1].Seconds() / float64(n*getRounds)},
		},
		Note: fmt.Sprintf("blocks of %d requests, %d under way, in turn with the baseline's", getBlock, apiAtOnce),
	}
	r = hub.Into(r).against(baseline.P50())
	r.Reached = r.Ratio >= minRatio
	return []Result{latency, r}, nil
}

// startBare starts the baseline's program; bare reads one of the instances from it.
func (c *APITest) startBare(ctx context.Context, e *Env) (bare func(context.Context, int) error, stop func() error,
	err error,
) {
	program := filepath.Join(c.dir, "bare")
	if err := devcluster.Build(ctx, e.Source, "./e2e/bench/bare", program); err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, program, c.Hub.Config.DatabaseURL())
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	stop = func() error { return errors.Join(in.Close(), cmd.Wait()) }
	url, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, nil, errors.Join(err, stop())
	}
	return func(ctx context.Context, i int) error {
		o := c.operators[i%len(c.operators)]
		_, err := c.call(ctx, http.MethodGet, strings.TrimSpace(url)+strings.TrimPrefix(o.instance,
			strings.TrimSuffix(o.url, "/app-instances")), o.token, nil)
		return err
	}, stop, nil
}

// rate makes n requests, apiAtOnce of them at a time, and returns how many it made in a second.
func rate(ctx context.Context, n int, do func(ctx context.Context, i int) error) (perSecond float64, err error) {
	next := make(chan int)
	errs := make([]error, apiAtOnce)
	var wg sync.WaitGroup
	start := time.Now()
	for k := range apiAtOnce {
		wg.Go(func() {
			for i := range next {
				if errs[k] == nil {
					errs[k] = do(ctx, i)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return float64(n) / time.Since(start).Seconds(), cmp.Or(errs...)
}

// steady makes n requests at a steady rate. A sample begins when its request is due, so that one slow answer does not
// delay the requests that would show it.
func steady(ctx context.Context, perSecond, n int, do func(ctx context.Context, i int) error) (Samples, error) {
	return steadyEvery(ctx, time.Second/time.Duration(perSecond), n, do)
}

// steadyEvery makes a request every so often.
func steadyEvery(ctx context.Context, every time.Duration, n int, do func(ctx context.Context, i int) error,
) (Samples, error) {
	took, errs := make([]time.Duration, n), make([]error, n)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range n {
		due := start.Add(time.Duration(i) * every)
		if err := pause(ctx, time.Until(due)); err != nil {
			return nil, err
		}
		wg.Go(func() {
			errs[i] = do(ctx, i)
			took[i] = time.Since(due)
		})
	}
	wg.Wait()
	var times Samples
	for _, d := range took {
		times.Add(d)
	}
	return times, cmp.Or(errs...)
}
