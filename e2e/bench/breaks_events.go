package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// The rate of events goes from first to most a second.
	firstEvents, mostEvents = 2, 128
	// eventsOfTarget a second is what the row event-sse-latency makes.
	eventsOfTarget = 4
	// maxEventMillis is the 99th percentile of the time from the request until a follower has the event.
	maxEventMillis = 1000
	// eventMarks bounds the events of a run.
	eventMarks = 1 << 16
)

// followers receive events, and know when each was asked for.
type followers struct {
	audience
	// sentAt is when the request of each event began.
	sentAt [eventMarks]atomic.Int64
	// alive is how many streams are open.
	alive atomic.Int64

	mu    sync.Mutex
	times Samples
}

// measureEventsBreak drives up the rate of events that each of eventClients followers gets.
func measureEventsBreak(ctx context.Context, e *Env) (_ []Result, err error) {
	bin, err := e.HubWithSymbols(ctx)
	if err != nil {
		return nil, err
	}
	nodes, clients := or(e.Params.Nodes, eventNodes), or(e.Params.Rows, eventClients)
	l, err := startLoadTestOf(ctx, e, bin, "breaks-events", nodes)
	if err != nil {
		return nil, err
	}
	b := &breaking{LoadTest: l, e: e, each: or(e.Params.For, breakFor)}
	defer func() { err = errors.Join(err, b.end()) }()
	if _, err := l.connect(ctx, nodes); err != nil {
		return nil, err
	}
	if b.tokens, err = l.addCallers(ctx, or(e.Params.Callers, manyCallers)); err != nil {
		return nil, err
	}
	f := &followers{audience: audience{url: l.Hub.Ready.APIURL + "/api/v1"}}
	if f.http, err = oneConnectionEach(l.Hub.Ready.CAFile); err != nil {
		return nil, err
	}
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	if err := l.seatFollowers(ctx, f, clients); err != nil {
		return nil, err
	}
	made := 0
	s := Search{Start: firstEvents, Max: mostEvents, Resolution: fineResolution}
	k, err := s.find(func(perSecond float64) (Trial, error) {
		n := min(max(int(perSecond*b.each.Seconds()), 1), eventMarks-made)
		t, err := f.try(ctx, b, perSecond, made, n)
		made += n
		b.say("events a second", perSecond, t)
		return t, err
	})
	if err != nil {
		return nil, err
	}
	r := k.result(Result{
		Name: "breaks-events", What: fmt.Sprintf("events a second that each of %d followers gets", clients),
		Target: fmt.Sprintf("≥ %d", eventsOfTarget),
		Note: fmt.Sprintf("each load lasts %s; each follower has a connection of its own; beside %d nodes that report and "+
			"%d callers", b.each, nodes, len(b.tokens)),
	}, "events/s")
	r.Reached = r.P50 >= eventsOfTarget
	return []Result{r}, nil
}

// seatFollowers makes the users and opens their streams.
func (c *LoadTest) seatFollowers(ctx context.Context, f *followers, clients int) error {
	err := c.eachFollower(ctx, clients, func(n int, token string) error {
		for range min(clientsOfOne, clients-n) {
			f.open.Add(1)
			go func() { f.note(ctx, f.follow(ctx, token)) }()
		}
		// The hub bounds handshakes of clients that it does not know yet.
		f.open.Wait()
		return nil
	})
	return errors.Join(append(f.failed(), err)...)
}

// failed returns why streams have ended since the last call.
func (f *followers) failed() []error {
	f.audience.mu.Lock()
	defer f.audience.mu.Unlock()
	taken := f.errs
	f.errs = nil
	return taken
}

// follow takes the time of each event, until ctx ends.
func (f *followers) follow(ctx context.Context, token string) error {
	res, err := f.get(ctx, token, "/events?follow=true&type=capacity.sku.created")
	f.open.Done()
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	f.alive.Add(1)
	defer f.alive.Add(-1)
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		_, rest, found := bytes.Cut(lines.Bytes(), []byte(`"correlation_id":"bench-`))
		if !found {
			continue
		}
		number, _, _ := bytes.Cut(rest, []byte(`"`))
		i, err := strconv.Atoi(string(number))
		if err != nil || i < 0 || i >= eventMarks {
			return fmt.Errorf("an event has the number %q", number)
		}
		took := time.Since(time.Unix(0, f.sentAt[i].Load()))
		f.mu.Lock()
		f.times.Add(took)
		f.mu.Unlock()
	}
	return errors.Join(errors.New("a stream ended"), lines.Err())
}

// try makes n events at a steady rate, numbered from first, and waits for their arrival at all followers.
func (f *followers) try(ctx context.Context, b *breaking, perSecond float64, first, n int) (Trial, error) {
	f.take()
	open := int(f.alive.Load())
	return b.trial(ctx, func(ctx context.Context) ([]Objective, error) {
		makers, err := b.open(b.tokens)
		if err != nil {
			return nil, err
		}
		refused := atomic.Int64{}
		posts, err := steadyEvery(ctx, time.Duration(float64(time.Second)/perSecond), n,
			func(ctx context.Context, i int) error {
				k := first + i
				f.sentAt[k].Store(time.Now().UnixNano())
				_, err := client.Read[client.SKU](makers[i%len(makers)].CreateSKU(ctx, client.SKUCreate{
					Slug: fmt.Sprint("bench-", k), CapacityShape: "gpu_slice", CPUCores: int32(k%1000 + 1), MemoryMib: 64,
				}, client.WithRequestID(fmt.Sprint("bench-", k))))
				if err != nil && refused.Add(1) == 1 {
					b.e.Say("an event is not made: %v", err)
				}
				return nil
			})
		if err != nil {
			return nil, err
		}
		wait := stopwatch()
		for want := (n - int(refused.Load())) * open; f.count() < want && wait() < 2*maxEventMillis*time.Millisecond; {
			if err := pause(ctx, drainPoll); err != nil {
				return nil, err
			}
		}
		got := f.take()
		missing := (n-int(refused.Load()))*open - len(got)
		ended := f.failed()
		return []Objective{
			{Name: "requests that fail", Got: float64(refused.Load()), Unit: "requests"},
			{Name: "request, p99", Got: posts.P99(), Limit: maxPostMillis, Unit: "ms"},
			{Name: "event at a follower, p99", Got: got.P99(), Limit: maxEventMillis, Unit: "ms"},
			{Name: "events that have not arrived", Got: float64(missing), Unit: "events"},
			{Name: "streams that ended", Got: float64(len(ended)), Unit: "streams"},
		}, nil
	})
}

func (f *followers) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.times)
}

// take returns the times since the last call.
func (f *followers) take() Samples {
	f.mu.Lock()
	defer f.mu.Unlock()
	taken := f.times
	f.times = nil
	return taken
}
