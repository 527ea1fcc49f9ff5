package harness

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// ErrPending is returned by a condition that does not hold yet.
var ErrPending = errors.New("not there yet")

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
