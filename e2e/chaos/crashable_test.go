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

// crashable is a program that was built with failpoints: it dies at the one that it is armed with, and is started again
// at once, as systemd would.
type crashable struct {
	// name is how its points begin.
	name string
	// arms is the file that arms it (package failpoint).
	arms    string
	process func() *devcluster.Process
	start   func() error
	// point is what it is armed with at the moment; empty once it has died of that.
	point string
	// crashedAt are the points that it has died at in these rounds; deaths counts all.
	crashedAt map[string]bool
	crashes   int
	// starting is how long its starts took in all, starts how many there were.
	starting time.Duration
	starts   int
	// crashed says that it has died at its point and was not started again yet.
	crashed bool
}

// env is for the program's configuration.
func (m *crashable) env() []string { return []string{"GPUAAS_FAILPOINT=" + m.arms} }

// arm makes the program die at a hit of the point that lies ahead.
func (m *crashable) arm(t testing.TB, point string, hit int) {
	t.Helper()
	require.Empty(t, m.point)
	m.point = point
	next := m.arms + ".next"
	require.NoError(t, os.WriteFile(next, fmt.Appendf(nil, "%s %d", point, hit), 0o600))
	require.NoError(t, os.Rename(next, m.arms))
}

// disarm takes the point back, if the program has not reached it.
func (m *crashable) disarm() error {
	if err := os.Remove(m.arms); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := m.recordCrash()
	m.point = ""
	return err
}

// recordCrash takes notice of a death at the point.
func (m *crashable) recordCrash() error {
	said, err := os.ReadFile(m.arms + ".reached")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if point, _, _ := strings.Cut(string(said), " "); point != m.point {
		return fmt.Errorf("%s died at %q, armed with %q", m.name, said, m.point)
	}
	m.crashedAt[m.point], m.crashed, m.point = true, true, ""
	m.crashes++
	return os.Remove(m.arms + ".reached")
}

// startUntilServing starts the program until it serves. Only a death at its point is no failure.
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

// restartIfCrashed starts the program again if it has ended.
func (m *crashable) restartIfCrashed() error {
	select {
	case <-m.process().Exited():
	default:
		return nil
	}
	if err := m.recordCrash(); err != nil || !m.crashed {
		return errors.Join(fmt.Errorf("%s ended by itself:\n%s", m.name, m.process().LogTail(20)), err)
	}
	return m.startUntilServing()
}
