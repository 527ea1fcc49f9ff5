package cluster_test

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/starter"
	"github.com/gpuaas/gpuaas/e2e/harness"
)

// machine has processes, a host name, an address on a bridge and a /srv of its own: a member's machine.
type machine struct{ starter.Machine }

// newMachines starts machines m1, m2 … on one bridge; they end with the test.
func newMachines(w *harness.Testbed, count int) (list []machine) {
	w.T.Helper()
	prefix := strings.Replace(w.Bridge(0), "gpe", "gpx", 1)
	bridge := prefix + "br"
	command(w.T, "ip", "link", "add", bridge, "type", "bridge")
	w.T.Cleanup(func() { _ = exec.CommandContext(context.Background(), "ip", "link", "del", bridge).Run() })
	command(w.T, "ip", "link", "set", bridge, "up")
	for n := 1; n <= count; n++ {
		list = append(list, newMachine(w, n, bridge, fmt.Sprintf("%sm%d", prefix, n)))
	}
	return list
}

func newMachine(w *harness.Testbed, n int, bridge, link string) machine {
	t := w.T
	t.Helper()
	// The first process waits for all others that end, as init does.
	cmd := exec.CommandContext(context.Background(), "sh", "-ec", fmt.Sprintf(`mount --make-rprivate /
		mount -t proc proc /proc
		mount -t tmpfs -o mode=755 machine /srv
		ip link set lo up
		hostname m%d
		sleep infinity & wait`, n))
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig:  syscall.SIGKILL,
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
	}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	pid := fmt.Sprint(cmd.Process.Pid)
	address := fmt.Sprintf("10.77.0.%d", n)
	m := machine{starter.Machine{
		Address: address,
		Shell:   []string{"nsenter", "--target", pid, "--mount", "--net", "--pid", "--uts"},
		CPUs:    1,
	}}
	w.Eventually("the machine has its name", func() error {
		out, err := exec.CommandContext(t.Context(), m.Shell[0], append(m.Shell[1:], "hostname")...).Output()
		return harness.Pending(err, string(out) == fmt.Sprintf("m%d\n", n))
	})
	command(t, "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid)
	// With its namespace it would go as well, but in the kernel's own time.
	t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "ip", "link", "del", link).Run() })
	command(t, "ip", "link", "set", link, "master", bridge, "up")
	m.run(t, "ip", "addr", "add", address+"/24", "dev", "eth0")
	m.run(t, "ip", "link", "set", "eth0", "up")
	return m
}

// run runs a command on the machine and returns its output.
func (m machine) run(t *testing.T, words ...string) string {
	t.Helper()
	return command(t, m.Shell[0], append(m.Shell[1:len(m.Shell):len(m.Shell)], words...)...)
}

// command returns what a program prints. What it says beside that depends on the moment: srun says when a job waits.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	require.NoError(t, err, "%s %s: %s%s", name, strings.Join(args, " "), out, said.String())
	return strings.TrimSpace(string(out))
}
