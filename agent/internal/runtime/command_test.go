package runtime_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// command runs the app as a command in the container, with no input.
func (f *fixture) command(id string, args ...string) (out string, code int, err error) {
	f.t.Helper()
	var stdout bytes.Buffer
	code, err = f.rt.RunCommand(f.t.Context(), id, execstream.Command{
		Argv: append([]string{"/app"}, args...), Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: io.Discard,
	})
	return stdout.String(), code, err
}

// cgroupPids are the processes in the container's cgroup.
func (f *fixture) cgroupPids(id string) []string {
	for _, root := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		path := filepath.Join(root, runtime.CgroupOf(f.cfg.CgroupParent, id), "cgroup.procs")
		if data, err := os.ReadFile(path); err == nil {
			return strings.Fields(string(data))
		}
	}
	return nil
}

func TestACommandHasTheRightsOfItsContainerAndNoMore(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	rights := func(id string) (who []any, status string) {
		out, code, err := f.command(id, "inspect")
		require.NoError(t, err)
		require.Zero(t, code, out)
		var in map[string]any
		require.NoError(t, json.Unmarshal([]byte(out), &in))
		require.Contains(t, in["uid_map"], "100000      65536")
		require.Contains(t, in["status"], "NoNewPrivs:\t1")
		require.Contains(t, in["status"], "Seccomp:\t2")
		require.NotEqualValues(t, 1, in["pid"], "the container's processes are around it")
		for _, refused := range []string{"write_sys", "write_proc", "mount", "mknod", "unshare"} {
			require.NotEqual(t, "ok", in[refused], refused)
		}
		return []any{in["uid"], in["gid"]}, in["status"].(string)
	}
	who, status := rights(f.startWaiting(image))
	require.Equal(t, []any{0., 0.}, who)
	require.Contains(t, status, "CapBnd:\t00000000000004eb")
	require.Contains(t, status, "CapEff:\t00000000000004eb")

	spec := f.spec(image, "wait")
	spec.Service.User = "1234:5678"
	f.start(spec)
	who, status = rights(spec.ID)
	require.Equal(t, []any{1234., 5678.}, who)
	require.Contains(t, status, "CapBnd:\t0000000000000000")
	require.Contains(t, status, "CapEff:\t0000000000000000")
}

func TestACommandEndsByItselfByItsTerminalOrWithItsCaller(t *testing.T) {
	f := newFixture(t)
	id := f.startWaiting(f.image())
	_, code, err := f.command(id, "exit", "7")
	require.NoError(t, err)
	require.Equal(t, 7, code)
	_, err = f.rt.RunCommand(t.Context(), id, execstream.Command{
		Argv: []string{"/no/such/program"}, Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard,
	})
	require.EqualValues(t, "bad_command", fault.As(err).Code)

	// The key of the terminal that interrupts does so.
	input, keys := io.Pipe()
	output, screen := io.Pipe()
	go func() {
		line, _ := bufio.NewReader(output).ReadString('\n')
		if strings.TrimSpace(line) == "ready" {
			_, _ = keys.Write([]byte{3})
		}
		_, _ = io.Copy(io.Discard, output)
	}()
	code, err = f.rt.RunCommand(t.Context(), id, execstream.Command{
		Argv: []string{"/app", "spin"}, Terminal: true, Stdin: input, Stdout: screen, Stderr: io.Discard,
	})
	require.NoError(t, err)
	require.Equal(t, 130, code)

	// Its caller goes while nobody reads what it writes; it was in the container's cgroup.
	ctx, leave := context.WithCancel(t.Context())
	unread, full := io.Pipe()
	go func() {
		_, _ = unread.Read(make([]byte, 1))
		for len(f.cgroupPids(id)) != 2 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		leave()
		_ = unread.Close()
	}()
	_, err = f.rt.RunCommand(ctx, id, execstream.Command{
		Argv: []string{"/app", "shout"}, Stdin: strings.NewReader(""), Stdout: full, Stderr: io.Discard,
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, "1", f.cgroupProcesses(id), "the app's own process goes on")
}

// Only a command that is missing in the container is the app's fault, and permanent.
func TestWhatIsMissingOnTheNodeIsNotTheCommand(t *testing.T) {
	for text, code := range map[string]fault.Code{
		`OCI runtime create failed: runc create failed: unable to start container process: exec: "app": executable file ` +
			`not found in $PATH: unknown`: "bad_command",
		`OCI runtime exec failed: exec failed: unable to start container process: error during container init: ` +
			`exec: "/app": stat /app: no such file or directory`: "bad_command",
		`unable to retrieve OCI runtime error (open /run/x/log.json: no such file or directory): exec: "runc": ` +
			`executable file not found in $PATH`: "start_failed",
		`fork/exec /usr/bin/runc: no such file or directory`: "start_failed",
		`OCI runtime create failed: runc create failed: unable to start container process: error during container ` +
			`init: error mounting "/srv/exec" to rootfs at "/data": no such file or directory`: "start_failed",
	} {
		require.Equal(t, code, fault.As(runtime.StartFault(errors.New(text))).Code, text)
	}
}
