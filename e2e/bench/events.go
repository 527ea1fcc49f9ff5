package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// eventClients follow all events, each over a connection of its own; as many watchers wait for a change of a node.
	eventClients = 1000
	// clientsOfOne is how many of them one user has; the hub permits 50, and 500 of one org.
	clientsOfOne = 40
	// openedAtOnce streams and as many watches begin together.
	openedAtOnce = 10
	// sampledEvents are made one each eventPause.
	sampledEvents = 200
	eventPause    = 250 * time.Millisecond
	eventNodes    = 200
)

func eventRows() []Row { return []Row{{Name: "event-sse-latency", Measure: measureEvents}} }

// audience receives events.
type audience struct {
	http   *http.Client
	url    string
	events int
	// all is released once each client has had every event.
	open, all sync.WaitGroup

	mu    sync.Mutex
	times Samples
	errs  []error
}

// measureEvents makes events that every client may see, while nodes report and watchers wait.
func measureEvents(ctx context.Context, e *Env) (results []Result, err error) {
	c, err := startLoadTest(ctx, e, "event-sse-latency", eventNodes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	if _, err := c.connect(ctx, eventNodes); err != nil {
		return nil, err
	}
	n := e.Samples(sampledEvents)
	a := &audience{url: c.Hub.Ready.APIURL + "/api/v1", events: n}
	if a.http, err = oneConnectionEach(c.Hub.Ready.CAFile); err != nil {
		return nil, err
	}
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	if err := c.seat(ctx, a); err != nil {
		return nil, err
	}
	before, err := c.cpu()
	if err != nil {
		return nil, err
	}
	var requests Samples
	for i := range n {
		began := time.Now()
		if _, err := client.Read[client.SKU](c.Tenant.Admin.CreateSKU(ctx, client.SKUCreate{
			Slug: fmt.Sprint("bench-", i), CapacityShape: "gpu_slice", CPUCores: int32(i + 1), MemoryMib: 64,
		})); err != nil {
			return nil, err
		}
		requests.Add(time.Since(began))
		if err := pause(ctx, eventPause); err != nil {
			return nil, err
		}
	}
	a.all.Wait()
	after, err := c.cpu()
	if err := errors.Join(append(a.errs, err)...); err != nil {
		return nil, err
	}
	r := a.times.Into(Result{
		Name:   "event-sse-latency",
		What:   fmt.Sprintf("an event's own time, which is before its commit, until each of %d clients has it", eventClients),
		Unit:   "ms",
		Target: "p50 ≤ 20, p99 ≤ 100",
		Parts: []Part{
			{Name: "the request itself", Value: requests.P50()},
			{Name: "hub CPU for each event, ms", Value: (after[0] - before[0]).Seconds() * 1000 / float64(n)},
		},
		Note: fmt.Sprintf("every client gets every event; beside %d watchers and %d nodes that report", eventClients,
			eventNodes),
	})
	r.Reached = r.N >= minForP99 && r.P50 <= 20 && r.P99 <= 100
	return []Result{r}, nil
}

// oneConnectionEach is a client whose streams have a connection each, as those of different programs have.
func oneConnectionEach(caFile string) (*http.Client, error) {
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSNextProto:    map[string]func(string, *tls.Conn) http.RoundTripper{},
	}}, nil
}

// seat makes the users and opens their streams and watches.
func (c *LoadTest) seat(ctx context.Context, a *audience) error {
	err := c.eachFollower(ctx, eventClients, func(n int, follower string) error {
		watcher, err := c.token(ctx, client.UserCreate{
			Email: fmt.Sprintf("w%d@bench.example", n), DisplayName: "W", PlatformAdmin: true,
		})
		if err != nil {
			return err
		}
		for k := range clientsOfOne {
			a.open.Add(1)
			a.all.Go(func() { a.note(ctx, a.follow(ctx, follower)) })
			go a.watch(ctx, watcher, c.Nodes[(n+k)%len(c.Nodes)])
			// The hub bounds the requests under way of clients that it does not know yet.
			if k%openedAtOnce == openedAtOnce-1 {
				a.open.Wait()
			}
		}
		return nil
	})
	return errors.Join(append(a.errs, err)...)
}

// eachFollower makes a user for every clientsOfOne clients, an org for every ten users, and calls seat with the number
// of the user's first client and the user's token.
func (c *LoadTest) eachFollower(ctx context.Context, clients int, seat func(n int, token string) error) error {
	var orgID string
	for n := 0; n < clients; n += clientsOfOne {
		if n%(10*clientsOfOne) == 0 {
			org, err := client.Read[client.Org](c.Tenant.Admin.CreateOrg(ctx, client.OrgCreate{
				Slug: fmt.Sprint("org-", n), DisplayName: "Org",
			}))
			if err != nil {
				return err
			}
			orgID = org.ID
		}
		token, err := c.token(ctx, client.UserCreate{
			OrgID: orgID, Email: fmt.Sprintf("follower%d@bench.example", n), DisplayName: "F",
			Roles: []client.UserRole{"org_member"},
		})
		if err != nil {
			return err
		}
		if err := seat(n, token); err != nil {
			return err
		}
	}
	return nil
}

// token makes a user with a token.
func (c *LoadTest) token(ctx context.Context, u client.UserCreate) (string, error) {
	made, err := client.Read[client.User](c.Tenant.Admin.CreateUser(ctx, u))
	if err != nil {
		return "", err
	}
	t, err := client.Read[client.UserToken](c.Tenant.Admin.CreateUserToken(ctx, made.ID, client.UserTokenCreate{}))
	return t.Token, err
}

func (a *audience) note(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.errs = append(a.errs, err)
	}
}

func (a *audience) get(ctx context.Context, token, path string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, a.url+path, nil)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	res, err := a.http.Do(r)
	if err == nil && res.StatusCode != http.StatusOK {
		_ = res.Body.Close()
		err = fmt.Errorf("GET %s: status %d", path, res.StatusCode)
	}
	return res, err
}

// follow reads a stream until it has had all events.
func (a *audience) follow(ctx context.Context, token string) error {
	res, err := a.get(ctx, token, "/events?follow=true&type=capacity.sku.created")
	a.open.Done()
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	var times Samples
	lines := bufio.NewScanner(res.Body)
	for len(times) < a.events && lines.Scan() {
		received := time.Now()
		_, rest, found := bytes.Cut(lines.Bytes(), []byte(`"time":"`))
		if !found {
			continue
		}
		text, _, _ := bytes.Cut(rest, []byte(`"`))
		at, err := time.Parse(time.RFC3339Nano, string(text))
		if err != nil {
			return err
		}
		times.Add(received.Sub(at))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times = append(a.times, times...)
	if len(times) < a.events {
		return errors.Join(fmt.Errorf("a stream ended after %d of %d events", len(times), a.events), lines.Err())
	}
	return nil
}

// watch waits for changes of a node, again and again.
func (a *audience) watch(ctx context.Context, token, nodeID string) {
	var node client.Node
	for ctx.Err() == nil {
		res, err := a.get(ctx, token, fmt.Sprintf("/admin/nodes/%s?after=%d&wait=30s", nodeID, max(node.ResourceVersion, 1)))
		if err == nil {
			err = errors.Join(json.NewDecoder(res.Body).Decode(&node), res.Body.Close())
		}
		if err != nil {
			a.note(ctx, err)
			return
		}
	}
}
