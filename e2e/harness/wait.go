package harness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// ErrPending is returned by a condition that does not hold yet.
var ErrPending = errors.New("not there yet")

// resync is the longest resync period in these tests: that of a hub without settings. The agents' is shorter.
const resync = 30 * time.Second

// ConvergenceBound is law 13's: two resync periods and a minute after a fault.
const ConvergenceBound = 2*resync + time.Minute

// pollInterval is the pause between two checks of a condition.
const pollInterval = 50 * time.Millisecond

// Await waits until the condition returns no error, and returns its last error where it does not within the bound.
func Await(ctx context.Context, bound time.Duration, condition func() error) error {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := condition()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %s: %w", bound, err)
		case <-tick.C:
		}
	}
}

// Pending turns a condition into an error that Eventually waits for to disappear.
func Pending(err error, there bool) error {
	if err != nil || there {
		return err
	}
	return ErrPending
}

// DifferenceError lists differences as an error; nil without any.
func DifferenceError(lines []string) error {
	if len(lines) == 0 {
		return nil
	}
	return fmt.Errorf("%d differences:\n  %s", len(lines), strings.Join(lines, "\n  "))
}

// HasKind reports whether a posting of the kind is among them.
func HasKind(postings []client.Posting, kind client.PostingKind) bool {
	return slices.ContainsFunc(postings, func(p client.Posting) bool { return p.Kind == kind })
}

// Step is a part of a long test.
type Step struct {
	Name string
	Take func()
}

// Take takes the steps one after the other, and logs when each was over.
func (w *Testbed) Take(steps ...Step) {
	w.T.Helper()
	began := time.Now()
	for _, s := range steps {
		s.Take()
		w.T.Logf("%s after %s", s.Name, time.Since(began).Round(100*time.Millisecond))
	}
}
