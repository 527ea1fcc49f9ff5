package loop_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
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
		var passes atomic.Int64
		stop := start(t, loop.New("x", time.Minute, func(context.Context) error { passes.Add(1); return nil }, nil))
		synctest.Wait()
		require.EqualValues(t, 1, passes.Load())
		time.Sleep(47 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 1, passes.Load(), "not before 80 %% of the period")
		time.Sleep(26 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 2, passes.Load(), "and not after 120 %%")
		stop()
	})
}

func TestWakeUpsDuringAPassBecomeOnePassAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var passes atomic.Int64
		gate := make(chan struct{})
		l := loop.New("x", time.Hour, func(context.Context) error { passes.Add(1); <-gate; return nil }, nil)
		stop := start(t, l)
		synctest.Wait()
		for range 10 {
			l.Wake()
		}
		gate <- struct{}{}
		synctest.Wait()
		require.EqualValues(t, 2, passes.Load())
		gate <- struct{}{}
		synctest.Wait()
		require.EqualValues(t, 2, passes.Load(), "ten wake-ups are one pass")
		stop()
	})
}

func TestLoopRestsAsLongAsItsPassHasTaken(t *testing.T) {
	for took, rest := range map[time.Duration]time.Duration{
		10 * time.Millisecond: 10 * time.Millisecond,
		time.Second:           20 * time.Millisecond,
	} {
		synctest.Test(t, func(t *testing.T) {
			var passes atomic.Int64
			l := loop.New("x", time.Hour, func(context.Context) error { passes.Add(1); time.Sleep(took); return nil }, nil)
			stop := start(t, l)
			time.Sleep(took + rest/2) // the first pass is over
			l.Wake()
			l.Wake()
			synctest.Wait()
			require.EqualValues(t, 1, passes.Load())
			time.Sleep(rest / 2)
			synctest.Wait()
			require.EqualValues(t, 2, passes.Load(), "one for both, and not later")
			time.Sleep(took + 2*rest)
			l.Wake()
			synctest.Wait()
			require.EqualValues(t, 3, passes.Load(), "at once when it has rested")
			stop()
		})
	}
}

func TestAGatheringLoopDoesOnePassForTheWakeUpsOfItsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const took, pause = time.Millisecond, 30 * time.Millisecond
		var passes atomic.Int64
		l := loop.New("x", time.Hour, func(context.Context) error { passes.Add(1); time.Sleep(took); return nil }, nil)
		stop := start(t, l.Gathering(pause))
		time.Sleep(took)
		for range 9 {
			l.Wake()
			time.Sleep(pause / 10)
			require.EqualValues(t, 1, passes.Load())
		}
		time.Sleep(pause / 10)
		synctest.Wait()
		require.EqualValues(t, 2, passes.Load(), "one for all, and not later")
		time.Sleep(took + 2*pause)
		l.Wake()
		synctest.Wait()
		require.EqualValues(t, 3, passes.Load(), "at once after the pause")
		stop()
	})
}

func TestFailingPassBacksOffWhateverWakesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		var passes atomic.Int64
		var healed atomic.Bool
		l := loop.New("x", 10*time.Second, func(context.Context) error {
			passes.Add(1)
			if !healed.Load() {
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
		require.Less(t, passes.Load(), int64(20), "0.25 s, 0.5 s, … 10 s")
		require.Greater(t, passes.Load(), int64(8))
		require.Contains(t, log.String(), "down")

		healed.Store(true)
		time.Sleep(13 * time.Second)
		synctest.Wait()
		before := passes.Load()
		l.Wake()
		synctest.Wait()
		require.Equal(t, before+1, passes.Load(), "healed: awake at once again")
		stop()
	})
}

// A dependency may be down for a day: the pause stops doubling at the period, and stays there.
func TestAPassThatFailsForLongKeepsItsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const periods = 200 // a shift by as many bits would leave no pause
		var passes atomic.Int64
		stop := start(t, loop.New("x", time.Second, func(context.Context) error {
			passes.Add(1)
			time.Sleep(time.Millisecond)
			return errors.New("down")
		}, nil))
		time.Sleep(periods * time.Second)
		stop()
		require.Less(t, passes.Load(), int64(periods*13/10), "80 % of the period at least")
		require.Greater(t, passes.Load(), int64(periods*7/10))
	})
}

func TestPanickingPassDoesNotEndTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		var passes atomic.Int64
		stop := start(t, loop.New("x", time.Second, func(context.Context) error {
			passes.Add(1)
			if passes.Load() == 1 {
				panic("boom")
			}
			return nil
		}, slog.New(slog.NewTextHandler(&log, nil))))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Greater(t, passes.Load(), int64(2))
		require.Contains(t, log.String(), "boom")
		stop()
	})
}

func TestEndingDuringAPassIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		stop := start(t, loop.New("x", time.Second, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			slog.New(slog.NewTextHandler(&log, nil))))
		synctest.Wait()
		stop()
		require.Empty(t, log.String())
	})
}
