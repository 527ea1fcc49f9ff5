package harness

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/client"
)

var ErrPending = errors.New("not there yet")

// Pending turns a condition into the error that eventually waits out.
func Pending(err error, there bool) error {
	if err != nil || there {
		return err
	}
	return ErrPending
}

func DifferenceError(lines []string) error {
	if len(lines) == 0 {
		return nil
	}
	return fmt.Errorf("%d differences:\n  %s", len(lines), strings.Join(lines, "\n  "))
}

func HasKind(postings []client.Posting, kind client.PostingKind) bool {
	return slices.ContainsFunc(postings, func(p client.Posting) bool { return p.Kind == kind })
}
