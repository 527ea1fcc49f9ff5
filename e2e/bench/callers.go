package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// manyCallers ask the API beside a load of nodes, each callerPause after its last answer, as a program that polls.
	manyCallers = 50
	callerPause = time.Second
	// enoughCalls is how many calls are awaited at least.
	enoughCalls = 300
)

// callAPI starts callers of the API that run until stop is called; samples waits for their end.
func (c *LoadTest) callAPI(ctx context.Context, callers []*client.Hub, between time.Duration,
) (samples func() (Samples, error), stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	stopping := make(chan struct{})
	var mu sync.Mutex
	var all Samples
	var errs []error
	var running sync.WaitGroup
	for k, caller := range callers {
		running.Go(func() {
			// Spread over the pause, so that they do not ask all at once.
			if pause(ctx, between*time.Duration(k)/time.Duration(len(callers))) != nil {
				return
			}
			for i := k; ; i++ {
				start := time.Now()
				err := c.call(ctx, caller, i)
				mu.Lock()
				all.Add(time.Since(start))
				if err != nil {
					errs = append(errs, err)
				}
				done := len(all) >= enoughCalls || len(errs) > 0
				mu.Unlock()
				select {
				case <-stopping:
					if done {
						return
					}
				default:
				}
				if pause(ctx, between) != nil {
					return
				}
			}
		})
	}
	samples = func() (Samples, error) {
		running.Wait()
		cancel()
		return all, errors.Join(errs...)
	}
	return samples, sync.OnceFunc(func() { close(stopping) })
}

// call makes the i-th call of a caller: three reads to one write.
func (c *LoadTest) call(ctx context.Context, as *client.Hub, i int) error {
	var err error
	switch i % 4 {
	case 0:
		_, err = client.Read[client.Node](as.GetNode(ctx, c.Nodes[i%len(c.Nodes)]))
	case 1:
		_, err = client.Read[client.AppInstanceList](as.ListAppInstances(ctx, c.Tenant.Project.ID,
			&client.ListAppInstancesParams{}))
	case 2:
		_, err = client.Read[client.PostingList](as.ListLedger(ctx, &client.ListLedgerParams{}))
	default:
		_, err = client.Read[client.JoinToken](as.CreateJoinToken(ctx, client.JoinTokenCreate{}))
	}
	return err
}

// addCallers makes n users who may call the API, and returns their tokens.
func (c *LoadTest) addCallers(ctx context.Context, n int) ([]string, error) {
	var tokens []string
	for k := range n {
		token, err := c.token(ctx, client.UserCreate{
			Email: fmt.Sprintf("caller%d@bench.example", k), DisplayName: "Caller", PlatformAdmin: true,
		})
		if err != nil {
			return nil, fmt.Errorf("caller %d: %w", k, err)
		}
		tokens = append(tokens, token)
	}
	return tokens, nil
}

// open opens the hub once for each caller, with connections of its own.
func (c *LoadTest) open(tokens []string) ([]*client.Hub, error) {
	var callers []*client.Hub
	for _, token := range tokens {
		caller, err := client.Open(client.Config{
			URL: c.Hub.Ready.APIURL, CAFile: c.Hub.Ready.CAFile, Credential: client.BearerToken(token),
		})
		if err != nil {
			return nil, err
		}
		callers = append(callers, caller)
	}
	return callers, nil
}
