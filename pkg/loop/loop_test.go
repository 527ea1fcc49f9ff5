package loop_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/loop"
)

// start runs a loop in the bubble and gives what ends it.
func start(t *testing.T, l *loop.Loop) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	return func() {
		cancel()
		require.NoError(t, <-done)
	}
}

func TestPassRunsAtOnceAndThenPeriodically(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		passes := 0
		stop := start(t, loop.New("x", time.Minute, func(context.Context) error { passes++; return nil }, nil))
		synctest.Wait()
		require.Equal(t, 1, passes)
		time.Sleep(47 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, passes, "not before 80 %% of the period")
		time.Sleep(26 * time.Second)
		synctest.Wait()
		require.Equal(t, 2, passes, "and not after 120 %%")
		stop()
	})
}

func TestWakeUpsDuringAPassBecomeOnePassAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		passes, gate := 0, make(chan struct{})
		l := loop.New("x", time.Hour, func(context.Context) error { passes++; <-gate; return nil }, nil)
		stop := start(t, l)
		synctest.Wait()
		for range 10 {
			l.Wake()
		}
		gate <- struct{}{}
		synctest.Wait()
		require.Equal(t, 2, passes)
		gate <- struct{}{}
		synctest.Wait()
		require.Equal(t, 2, passes, "ten wake-ups are one pass")
		stop()
	})
}

func TestFailingPassBacksOffWhateverWakesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		passes, broken := 0, true
		l := loop.New("x", 10*time.Second, func(context.Context) error {
			passes++
			if broken {
				return errors.New("down")
			}
			return nil
		}, slog.New(slog.NewTextHandler(&log, nil)))
		stop := start(t, l)
		for range 600 { // a minute of a wake-up every 100 ms
			l.Wake()
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		require.Less(t, passes, 20, "0.25 s, 0.5 s, … 10 s")
		require.Greater(t, passes, 8)
		require.Contains(t, log.String(), "down")

		broken = false
		time.Sleep(13 * time.Second)
		synctest.Wait()
		before := passes
		l.Wake()
		synctest.Wait()
		require.Equal(t, before+1, passes, "healed: awake at once again")
		stop()
	})
}

func TestPanickingPassDoesNotEndTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		passes := 0
		stop := start(t, loop.New("x", time.Second, func(context.Context) error {
			passes++
			if passes == 1 {
				panic("boom")
			}
			return nil
		}, slog.New(slog.NewTextHandler(&log, nil))))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Greater(t, passes, 2)
		require.Contains(t, log.String(), "boom")
		stop()
	})
}

func TestEndingDuringAPassIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		stop := start(t, loop.New("x", time.Second, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, slog.New(slog.NewTextHandler(&log, nil))))
		synctest.Wait()
		stop()
		require.Empty(t, log.String())
	})
}
