package security_test

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
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// One byte of each file below the data directory is altered while the agent is stopped, as a careless attacker would.
// The store holds a running app and one that was stopped. No container is ever started, and the running one goes on.
// agent/internal/state alters the bytes of single values.
func TestAnAlteredDataDirectoryStartsNothing(t *testing.T) {
	w := harness.NewPlatform(t)
	runs, stopped := w.Launch("runs"), w.Launch("stopped")
	_, err := client.Read[client.AppInstance](w.Operator.StopAppInstance(w.Ctx, w.Tenant.Project.ID, stopped.ID))
	require.NoError(t, err)
	_, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, stopped.ID, client.AppInstanceStatusStopped, nil)
	require.NoError(t, err)
	pid := w.PidOf(runs)
	require.NoError(t, w.Agent.Stop())
	require.NoError(t, w.Hub.Kill9())
	data, whole := w.Agent.Config.DataDir(), filepath.Join(w.Dir, "whole", "data")
	w.CopyDisk(data, whole)
	tasks := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)

	var files, cameUp []string
	require.NoError(t, filepath.WalkDir(whole, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			files = append(files, path[len(whole):])
		}
		return err
	}))
	require.Contains(t, files, "/state/highest")
	for _, name := range files {
		w.CopyDisk(whole, data)
		if !alterMiddle(t, data+name) {
			continue // it holds nothing
		}
		if observesOrEnds(w) {
			cameUp = append(cameUp, name)
		}
		require.Equal(t, pid, w.PidOf(runs), "what runs goes on: %s", name)
		require.Zero(t, tasks.Starts(), "nothing starts: %s", name)
	}
	require.NotEmpty(t, cameUp, "an agent that never comes up shows little")
	t.Logf("the agent came up with %v of %v altered", cameUp, files)

	w.CopyDisk(whole, data)
	w.RestartHub()
	w.RestartAgent(w.Agent)
	w.RequireAnswer(runs)
	require.Equal(t, pid, w.PidOf(runs))
	_, err = client.Read[client.AppInstance](w.Operator.StartAppInstance(w.Ctx, w.Tenant.Project.ID, stopped.ID))
	require.NoError(t, err)
	_, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, stopped.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	w.Eventually("the start is seen", func() error { return harness.Pending(nil, tasks.Starts() > 0) })
	require.Equal(t, 1, tasks.Starts())
	for _, i := range []client.AppInstance{runs, stopped} {
		w.Decommission(i)
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

// observesOrEnds runs the agent until it has observed the machine and shows the result, or until it has ended by
// itself. It reports whether it came up.
func observesOrEnds(w *harness.Testbed) (cameUp bool) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.Ctx, devcluster.EndLimit)
	defer cancel()
	a, err := devcluster.StartAgent(ctx, w.Agent.Config)
	if err != nil {
		require.NoError(w.T, ctx.Err(), "it neither comes up nor ends: %v", err)
		return false
	}
	w.Eventually("the agent shows the container that runs", func() error {
		out, err := exec.Command(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), "workloads", "-o", "json",
			"--local-socket",
			a.Ready.LocalSocket).Output()
		var shown []any
		if err == nil {
			err = json.Unmarshal(out, &shown)
		}
		return harness.Pending(err, len(shown) > 0)
	})
	require.NoError(w.T, a.Stop())
	return true
}
