package chaos_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// crashable is a program with failpoints: it crashes at the one that it is armed with, and is restarted at once.
type crashable struct {
	// name is the prefix of its points.
	name string
	// arms is the file that arms it (package failpoint).
	arms    string
	process func() *devcluster.Process
	start   func() error
	// point is the armed point; empty once it was reached.
	point string
	// crashedAt are the points of these rounds at which it has crashed; crashes counts all crashes.
	crashedAt map[string]bool
	crashes   int
	// starting is the total time of its starts, starts their number.
	starting time.Duration
	starts   int
	// crashed reports whether it has crashed at its point and is not restarted yet.
	crashed bool
}

// env is the program's environment.
func (m *crashable) env() []string { return []string{"GPUAAS_FAILPOINT=" + m.arms} }

// arm makes the program crash at the given hit of the point.
func (m *crashable) arm(t testing.TB, point string, hit int) {
	t.Helper()
	require.Empty(t, m.point)
	m.point = point
	next := m.arms + ".next"
	require.NoError(t, os.WriteFile(next, fmt.Appendf(nil, "%s %d", point, hit), 0o600))
	require.NoError(t, os.Rename(next, m.arms))
}

// disarm removes the point, if the program has not reached it.
func (m *crashable) disarm() error {
	if err := os.Remove(m.arms); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := m.recordCrash()
	m.point = ""
	return err
}

// recordCrash records a crash at the point.
func (m *crashable) recordCrash() error {
	said, err := os.ReadFile(m.arms + ".reached")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if point, _, _ := strings.Cut(string(said), " "); point != m.point {
		return fmt.Errorf("%s crashed at %q, armed with %q", m.name, said, m.point)
	}
	m.crashedAt[m.point], m.crashed, m.point = true, true, ""
	m.crashes++
	return os.Remove(m.arms + ".reached")
}

// startUntilServing starts the program until it serves; only a crash at its point is no failure.
func (m *crashable) startUntilServing() error {
	for {
		m.crashed = false
		began := time.Now()
		err := m.start()
		m.starting, m.starts = m.starting+time.Since(began), m.starts+1
		if err == nil {
			return nil
		}
		if e := m.recordCrash(); e != nil || !m.crashed {
			return errors.Join(fmt.Errorf("%s does not start again: %w", m.name, err), e)
		}
	}
}

// restartIfCrashed restarts the program if it has ended.
func (m *crashable) restartIfCrashed() error {
	select {
	case <-m.process().Exited():
	default:
		return nil
	}
	if err := m.recordCrash(); err != nil || !m.crashed {
		return errors.Join(fmt.Errorf("%s ended without a crash point:\n%s", m.name, m.process().LogTail(20)), err)
	}
	return m.startUntilServing()
}
