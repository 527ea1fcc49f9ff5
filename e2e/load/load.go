// Package load sends HTTP requests at a steady rate and counts those that fail. It judges nothing.
package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	// requestLimit bounds one request: one that takes longer has failed.
	requestLimit = 10 * time.Second
	// maxOpen bounds the requests under way; one more has failed.
	maxOpen = 1000
)

// Load sends requests until Stop.
type Load struct {
	url    string
	cancel context.CancelFunc
	done   sync.WaitGroup
	open   chan struct{}

	mu     sync.Mutex
	result Result
}

// Result is what came of the requests.
type Result struct {
	Requests int
	Failed   int
	// Errors are those of the first failures.
	Errors []error
	// Took are the durations of the requests.
	Took []time.Duration
}

// maxErrors bounds Result.Errors.
const maxErrors = 10

// Start gets the URL so many times a second. Every other request opens a connection of its own, the others use a few
// again and again.
func Start(ctx context.Context, url string, perSecond int) *Load {
	ctx, cancel := context.WithCancel(ctx)
	l := &Load{url: url, cancel: cancel, open: make(chan struct{}, maxOpen)}
	clients := []*http.Client{
		{Timeout: requestLimit, Transport: &http.Transport{DisableKeepAlives: true}},
		{Timeout: requestLimit, Transport: &http.Transport{MaxIdleConnsPerHost: maxOpen}},
	}
	l.done.Go(func() {
		defer clients[1].CloseIdleConnections()
		var requests sync.WaitGroup
		defer requests.Wait()
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			select {
			case l.open <- struct{}{}:
			default:
				l.count(0, errors.New("too many requests are under way"))
				continue
			}
			requests.Go(func() {
				defer func() { <-l.open }()
				began := time.Now()
				// Stop lets a request that is under way end.
				err := get(context.WithoutCancel(ctx), clients[n%len(clients)], l.url)
				l.count(time.Since(began), err)
			})
		}
	})
	return l
}

func get(ctx context.Context, c *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", res.StatusCode)
	}
	return nil
}

func (l *Load) count(took time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.result.Requests++
	l.result.Took = append(l.result.Took, took)
	if err == nil {
		return
	}
	if l.result.Failed++; len(l.result.Errors) < maxErrors {
		l.result.Errors = append(l.result.Errors, err)
	}
}

// Stop ends the load once no request is under way.
func (l *Load) Stop() Result {
	l.cancel()
	l.done.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.result
}
