package volume_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/volume"
)

// TestKilledAtAnyMomentAFallbackStillFindsItsContent kills a process that upgrades and falls back, over and over.
func TestKilledAtAnyMomentAFallbackStillFindsItsContent(t *testing.T) {
	if dir := os.Getenv(childEnv); dir != "" {
		upgradeForever(t, dir)
	}
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	for round := range 15 {
		f.runUntilKilled(childEnv, time.Duration(20+17*round)*time.Millisecond)
		f.v = f.open()
		require.NoError(t, f.v.Detach(t.Context(), "m1"))
		f.requireContent(f.prepare(use(1)), "first")
		require.NoError(t, f.v.Detach(t.Context(), "m1"))
	}
}

// runUntilKilled runs the test in another process, which finds the directory in this variable, and kills it.
func (f *fixture) runUntilKilled(env string, after time.Duration) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), after)
	defer cancel()
	// The sandbox may hide the program's own file.
	child := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^"+f.t.Name()+"$")
	child.Env = append(os.Environ(), env+"="+filepath.Dir(f.cfg.Dir))
	require.ErrorContains(f.t, child.Run(), "signal: killed")
}

func upgradeForever(t *testing.T, dir string) {
	f := &fixture{t: t, cfg: volume.Config{
		Dir: filepath.Join(dir, "volumes"), MountDir: filepath.Join(dir, "mounts"), ReserveBytes: 64 * mib,
	}}
	f.v = f.open()
	for {
		next := f.prepare(upgrade(2))
		f.write(next, "second")
		if err := errors.Join(f.v.Detach(t.Context(), "m1")); err != nil {
			t.Fatal(err)
		}
		f.requireContent(f.prepare(use(1)), "first")
	}
}
