// Package loop runs a pass that reads the whole state: at once when woken, and periodically anyway, because a wake-up
// may be lost. It owns when a pass runs; its owner decides what a pass does.
package loop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/gpuaas/gpuaas/pkg/notify"
)

const (
	// defaultJitter spreads periodic passes of many processes that started together.
	defaultJitter = 0.2
	// The pause after a failed pass doubles from firstRetry up to the period; a wake-up does not cut it short, or a
	// dependency that is down would be asked without pause.
	firstRetry = 250 * time.Millisecond
	// maxCooldown bounds the pause after each pass, which is as long as the pass has taken; a wake-up does not cut it
	// short.
	maxCooldown = 20 * time.Millisecond
)

// Pass reads the whole state and does all work that is due.
type Pass func(ctx context.Context) error

// Loop runs one pass at a time.
type Loop struct {
	name  string
	every time.Duration
	pass  Pass
	log   *slog.Logger
	// random gives a number in [0,1).
	random func() float64
	wake   notify.Signal
	// leastCooldown is the shortest pause after a pass.
	leastCooldown time.Duration
}

// New makes a loop whose pass runs at the latest every so often (± 20 %). log may be nil.
func New(name string, every time.Duration, pass Pass, log *slog.Logger) *Loop {
	if every <= 0 {
		panic("loop " + name + ": the period must be positive")
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Loop{name: name, every: every, pass: pass, log: log, random: rand.Float64, wake: notify.NewSignal()}
}

// Gathering makes the loop pause for at least d after each pass, so that under frequent wake-ups one pass does the work
// of several. The first wake-up after a pause is answered at once. Call it before Run.
func (l *Loop) Gathering(d time.Duration) *Loop {
	l.leastCooldown = d
	return l
}

// Wake asks for a pass soon. It carries no data and never blocks: wake-ups that come while a pass runs become one pass
// after it, so that nothing that happened before a wake-up is missed. So do those that come during the cooldown.
func (l *Loop) Wake() { l.wake.Send() }

// Run passes until ctx ends, the first time at once, and returns nil then. A failing or panicking pass is logged and
// tried again; it never ends the loop.
func (l *Loop) Run(ctx context.Context) error {
	failures := 0
	for ctx.Err() == nil {
		began := time.Now()
		err := l.once(ctx)
		took := time.Since(began)
		switch {
		case err == nil:
			failures = 0
		case ctx.Err() != nil:
			return nil //nolint:nilerr // ended from outside, which is no failure of the pass
		default:
			failures++
			l.log.ErrorContext(ctx, "pass failed", slog.String("loop", l.name), slog.Any("error", err),
				slog.Int("failures", failures))
		}
		if !Pause(ctx, max(min(took, maxCooldown), l.leastCooldown)) || !l.wait(ctx, failures) {
			return nil
		}
	}
	return nil
}

// wait waits for the next pass and reports whether there is one.
func (l *Loop) wait(ctx context.Context, failures int) bool {
	wake := l.wake
	delay := l.spread(l.every)
	if failures > 0 {
		wake = nil
		delay = l.spread(min(l.every, firstRetry<<min(failures-1, 20)))
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-wake:
		return true
	case <-timer.C:
		return true
	}
}

// Pause waits for d. It returns false when ctx ends before.
func Pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func (l *Loop) spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (1 - defaultJitter + 2*defaultJitter*l.random()))
}

func (l *Loop) once(ctx context.Context) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = errors.Join(fmt.Errorf("panic: %v", r), fmt.Errorf("%s", debug.Stack()))
		}
	}()
	return l.pass(ctx)
}
