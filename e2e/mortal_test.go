package e2e_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// mortal is a program that was built with failpoints: it dies at the one that it is armed with, and is started again at
// once, as systemd would.
type mortal struct {
	// name is how its points begin.
	name string
	// arms is the file that arms it (package failpoint).
	arms    string
	process func() *devcluster.Process
	start   func() error
	// point is what it is armed with at the moment; empty once it has died of that.
	point string
	// reached are the points that it has died at in these rounds; deaths counts all.
	reached map[string]bool
	deaths  int
	// starting is how long its starts took in all, starts how many there were.
	starting time.Duration
	starts   int
	// dead says that it has died at its point and was not started again yet.
	dead bool
}

// failpointBinaries are what `make build-failpoint` made.
func failpointBinaries(t testing.TB) string {
	t.Helper()
	bin := filepath.Join(binaries(t), "failpoint")
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent"} {
		require.FileExists(t, filepath.Join(bin, b), "run make build-failpoint first")
	}
	return bin
}

// env is for the program's configuration.
func (m *mortal) env() []string { return []string{"GPUAAS_FAILPOINT=" + m.arms} }

// arm makes the program die at a hit of the point that lies ahead.
func (m *mortal) arm(t testing.TB, point string, hit int) {
	t.Helper()
	require.Empty(t, m.point)
	m.point = point
	next := m.arms + ".next"
	require.NoError(t, os.WriteFile(next, fmt.Appendf(nil, "%s %d", point, hit), 0o600))
	require.NoError(t, os.Rename(next, m.arms))
}

// disarm takes the point back, if the program has not reached it.
func (m *mortal) disarm() error {
	if err := os.Remove(m.arms); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := m.note()
	m.point = ""
	return err
}

// note takes notice of a death at the point.
func (m *mortal) note() error {
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
	m.reached[m.point], m.dead, m.point = true, true, ""
	m.deaths++
	return os.Remove(m.arms + ".reached")
}

// live starts the program until it serves. Only a death at its point is no failure.
func (m *mortal) live() error {
	for {
		m.dead = false
		began := time.Now()
		err := m.start()
		m.starting, m.starts = m.starting+time.Since(began), m.starts+1
		if err == nil {
			return nil
		}
		if e := m.note(); e != nil || !m.dead {
			return errors.Join(fmt.Errorf("%s does not start again: %w", m.name, err), e)
		}
	}
}

// tend starts the program again if it has ended.
func (m *mortal) tend() error {
	select {
	case <-m.process().Exited():
	default:
		return nil
	}
	if err := m.note(); err != nil || !m.dead {
		return errors.Join(fmt.Errorf("%s ended by itself:\n%s", m.name, m.process().LogTail(20)), err)
	}
	return m.live()
}
