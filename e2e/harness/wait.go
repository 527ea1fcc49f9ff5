package harness

import (
	"errors"
	"fmt"
	"slices"
	"strings"

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
