package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// What an owner who wants to run something else tries first: one byte of each file below the data directory is altered
// while the agent is stopped. Beside an app that runs, one that was stopped is in the store, in its older values as a
// running one. No container is ever started, and the one that runs goes on. The bytes of single values are altered in
// agent/internal/state.
func TestAnAlteredDataDirectoryStartsNothing(t *testing.T) {
	w := platform(t)
	runs, stopped := w.launch("runs"), w.launch("stopped")
	_, err := client.Read[client.AppInstance](w.operator.StopAppInstance(w.ctx, w.tenant.Project.ID, stopped.ID))
	require.NoError(t, err)
	_, err = w.operator.WaitInstance(w.ctx, w.tenant.Project.ID, stopped.ID, client.AppInstanceStatusStopped, nil)
	require.NoError(t, err)
	pid := w.pidOf(runs)
	require.NoError(t, w.agent.Stop())
	require.NoError(t, w.hub.Kill9())
	data, whole := w.agent.Config.DataDir(), filepath.Join(w.dir, "whole", "data")
	w.copyDisk(data, whole)
	tasks := w.listen(w.agent.Config.ContainerdNamespace)

	var files, cameUp []string
	require.NoError(t, filepath.WalkDir(whole, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			files = append(files, path[len(whole):])
		}
		return err
	}))
	require.Contains(t, files, "/state/highest")
	for _, name := range files {
		w.copyDisk(whole, data)
		if !alterMiddle(t, data+name) {
			continue // it holds nothing
		}
		if w.untilItLooksOrEnds() {
			cameUp = append(cameUp, name)
		}
		require.Equal(t, pid, w.pidOf(runs), "what runs goes on: %s", name)
		tasks.mu.Lock()
		require.Empty(t, tasks.started, "nothing starts: %s", name)
		tasks.mu.Unlock()
	}
	require.NotEmpty(t, cameUp, "an agent that never comes up shows little")
	t.Logf("the agent came up with %v of %v altered", cameUp, files)

	w.copyDisk(whole, data)
	w.restartHub()
	w.restartAgent(w.agent)
	w.answers(runs)
	require.Equal(t, pid, w.pidOf(runs))
	_, err = client.Read[client.AppInstance](w.operator.StartAppInstance(w.ctx, w.tenant.Project.ID, stopped.ID))
	require.NoError(t, err)
	_, err = w.operator.WaitInstance(w.ctx, w.tenant.Project.ID, stopped.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	tasks.mu.Lock()
	require.Len(t, tasks.started, 1, "a start is seen")
	tasks.mu.Unlock()
	for _, i := range []client.AppInstance{runs, stopped} {
		w.decommission(i)
	}
}

// alterMiddle flips a bit in the middle of what the file holds: Badger's files end in zeros. It reports false for a
// file of zeros.
func alterMiddle(t *testing.T, path string) bool {
	t.Helper()
	held, err := os.ReadFile(path)
	require.NoError(t, err)
	used := len(bytes.TrimRight(held, "\x00"))
	if used == 0 {
		return false
	}
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = file.WriteAt([]byte{held[used/2] ^ 0x01}, int64(used/2))
	require.NoError(t, err)
	require.NoError(t, file.Close())
	return true
}

// untilItLooksOrEnds runs the agent until it has looked at the machine and shows what it has seen, or until it has
// ended by itself. It reports whether it came up.
func (w *world) untilItLooksOrEnds() (cameUp bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, devcluster.EndLimit)
	defer cancel()
	a, err := devcluster.StartAgent(ctx, w.agent.Config)
	if err != nil {
		require.NoError(w.t, ctx.Err(), "it neither comes up nor ends: %v", err)
		return false
	}
	w.eventually("the agent shows the container that runs", func() error {
		out, err := exec.Command(filepath.Join(binaries(w.t), "gpuaas-agent"), "workloads", "-o", "json", "--local-socket",
			a.Ready.LocalSocket).Output()
		var shown []any
		if err == nil {
			err = json.Unmarshal(out, &shown)
		}
		return orMissing(err, len(shown) > 0)
	})
	require.NoError(w.t, a.Stop())
	return true
}
