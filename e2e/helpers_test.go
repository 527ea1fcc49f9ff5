package e2e_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/client"
)

var errMissing = errors.New("not there yet")

// orMissing turns a condition into the error that eventually waits out.
func orMissing(err error, there bool) error {
	if err != nil || there {
		return err
	}
	return errMissing
}

func differs(lines []string) error {
	if len(lines) == 0 {
		return nil
	}
	return fmt.Errorf("%d differences:\n  %s", len(lines), strings.Join(lines, "\n  "))
}

func hasKind(postings []client.Posting, kind client.PostingKind) bool {
	return slices.ContainsFunc(postings, func(p client.Posting) bool { return p.Kind == kind })
}
