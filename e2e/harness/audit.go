package harness

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Faults are what a test did that explains more than one start of a service, or usage in suspense.
type Faults struct {
	Restarts int
	Suspense bool
}

// Observed is what an audit compares: the runs that the hub billed since the oracle began, the processes that the
// kernel ran, and why usage is in suspense.
type Observed struct {
	Billed    []string
	Processes map[string]ContainerProcess
	Suspense  []string
}

// Findings lists phantom bills, needless restarts and suspense without a fault.
func (o Observed) Findings(f Faults) (lines []string) {
	for _, run := range o.Billed {
		if _, ran := o.Processes[run]; !ran {
			lines = append(lines, "phantom bill: no process of run "+run+" ever was")
		}
	}
	starts := map[string]int{}
	for run, l := range o.Processes {
		starts[MemberOf(run)+" "+l.Hostname]++
	}
	restarts := 0
	for _, n := range starts {
		restarts += n - 1
	}
	if restarts > f.Restarts {
		lines = append(lines, fmt.Sprintf("needless restarts: %d, the faults explain %d", restarts, f.Restarts))
	}
	if !f.Suspense {
		for _, reason := range o.Suspense {
			lines = append(lines, "suspense without a fault: "+reason)
		}
	}
	slices.Sort(lines)
	return lines
}

// Audit checks that nothing was billed that did not run, and that nothing was restarted or put into suspense without a
// fault, since the oracle began.
func (tr *ContainerdOracle) Audit(w *Testbed, f Faults) {
	w.T.Helper()
	db := w.Database()
	texts := func(query string, args ...any) []string {
		rows, err := db.Query(w.Ctx, query, args...)
		require.NoError(w.T, err)
		out, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(w.T, err)
		return out
	}
	o := Observed{
		Billed: texts(`SELECT DISTINCT run_id FROM usage_recent
			WHERE meter = 'session_seconds' AND started_at >= $1`, tr.began),
		Processes: tr.Kernel.Processes(), Suspense: texts(`SELECT reason FROM suspense_records`),
	}
	require.NotEmpty(w.T, o.Billed, "the audit sees the bills")
	require.NoError(w.T, DifferenceError(o.Findings(f)))
}

// RequireNoFilesOf checks that no file below the directories of the node bears the name of an ended member.
func (w *Testbed) RequireNoFilesOf(i api.AppInstance) {
	w.T.Helper()
	w.Eventually("no file of "+i.DisplayName+" is left", func() error {
		found, seen := []string(nil), 0
		for _, dir := range []string{w.Agent.Config.Dir, w.Agent.Config.RunDir} {
			err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
				seen++
				for _, m := range i.Members {
					if err == nil && strings.Contains(filepath.Base(path), m.ID) {
						found = append(found, path)
					}
				}
				return nil // what disappears meanwhile is not left
			})
			require.NoError(w.T, err)
		}
		require.Greater(w.T, seen, len(found)+2, "the node has directories")
		return DifferenceError(found)
	})
}
