package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/powerloss"
)

// bootEnv names the file that tells an agent with failpoints the id of the machine's boot (package failpoint).
const bootEnv = "GPUAAS_FAILPOINT_CLOCK"

// Rebootable makes a node's agent read the id of the boot from a file that Reboot changes.
func (w *Testbed) Rebootable(c *devcluster.AgentConfig) {
	w.T.Helper()
	c.Bin = FailpointBinaries(w.T)
	c.Env = append(c.Env, bootEnv+"="+c.Dir+"-boot")
	writeBoot(w, *c)
}

func writeBoot(w *Testbed, c devcluster.AgentConfig) {
	w.T.Helper()
	require.NoError(w.T, os.WriteFile(c.Dir+"-boot", fmt.Appendf(nil, "0s boot-%d", time.Now().UnixNano()), 0o600))
}

// Reboot cuts the power of a node that has a containerd of its own, and boots it: of processes, links, mounts, cgroups,
// and files in memory nothing is left, of what is on disk everything. No container runs between the two times.
func (w *Testbed) Reboot(a *devcluster.Agent) (off, on time.Time) {
	w.T.Helper()
	off = w.PowerOff(a)
	return off, w.Boot(a)
}

// CutPower is PowerOff for a node whose agent and containerd work on a disk that loses what they did not flush.
func (w *Testbed) CutPower(a *devcluster.Agent, disk *powerloss.Disk, random *rand.Rand) (off time.Time) {
	w.T.Helper()
	w.Explain(Faults{
		Why:      "a power cut interrupts a start or a pull, and the agent's log loses the note of its own",
		Restarts: 1,
		Sessions: 1,
		Pulls:    true,
	})
	w.cutPower(a, time.Now(), func() {
		lost, err := disk.Cut(random, func() error {
			// A process that waits for the disk dies when the disk has given up: nobody waits for it here.
			pids := append(processesWith(w.Containerd.Address), a.PID, w.Containerd.PID())
			for _, dir := range cgroupsOf(a.Config.CgroupParent) {
				pids = append(pids, processesOf(dir)...)
			}
			for _, pid := range pids {
				if pid > 1 {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			}
			return nil
		})
		require.NoError(w.T, err)
		w.T.Logf("%d pages of the node's disk are lost", lost)
		off = w.powerOff(a)
	})
	return off
}

// PowerOff is the first half of Reboot. Nothing of the node runs when it returns.
func (w *Testbed) PowerOff(a *devcluster.Agent) (off time.Time) {
	w.T.Helper()
	w.cutPower(a, time.Now(), func() { off = w.powerOff(a) })
	return off
}

func (w *Testbed) powerOff(a *devcluster.Agent) (off time.Time) {
	w.T.Helper()
	require.NoError(w.T, a.Kill9())
	require.NoError(w.T, w.Containerd.Kill9())
	for _, pid := range processesWith(w.Containerd.Address) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	for _, dir := range cgroupsOf(a.Config.CgroupParent) {
		w.Eventually("the containers of "+dir+" are dead", func() error { return EmptyCgroup(dir) })
	}
	off = time.Now()
	w.unmountBelow(w.Containerd.Dir, a.Config.RunDir, a.Config.DataDir())
	w.removeLinks(a.Config.Bridge)
	return off
}

// Boot is the second half of Reboot.
func (w *Testbed) Boot(a *devcluster.Agent) (on time.Time) {
	w.T.Helper()
	for _, dir := range []string{
		filepath.Join(w.Containerd.Dir, "state"), a.Config.RunDir, "/dev/gpuaas-" + a.Config.ContainerdNamespace,
	} {
		require.NoError(w.T, os.RemoveAll(dir))
	}
	writeBoot(w, a.Config)
	on = time.Now()
	require.NoError(w.T, w.Containerd.Start(w.Ctx))
	w.RestartAgent(a)
	return on
}

// processesWith are the processes that have this argument.
func processesWith(argument string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !slices.Contains(strings.Split(string(text), "\x00"), argument) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// cgroupsOf are the directories of a cgroup: one in each hierarchy of version 1, one in version 2.
func cgroupsOf(path string) []string {
	one, _ := filepath.Glob("/sys/fs/cgroup" + path)
	all, _ := filepath.Glob("/sys/fs/cgroup/*" + path)
	return append(one, all...)
}

// processesOf are the processes of a cgroup and of those below it.
func processesOf(dir string) (pids []int) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // what is gone has no processes
		}
		procs, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for word := range strings.FieldsSeq(string(procs)) {
			if pid, err := strconv.Atoi(word); err == nil {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// EmptyCgroup kills what is in a cgroup and in those below it, and removes them once that is gone; until then it fails.
func EmptyCgroup(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	slices.Reverse(dirs)
	for _, path := range dirs {
		for _, pid := range processesOf(path) {
			if pid > 0 {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return nil
}

// unmountBelow unmounts everything in the directories, the last mount first.
func (w *Testbed) unmountBelow(dirs ...string) {
	w.T.Helper()
	f, err := os.Open("/proc/self/mountinfo")
	require.NoError(w.T, err)
	defer func() { _ = f.Close() }()
	var points []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		point := strings.Fields(lines.Text())[4]
		if slices.ContainsFunc(dirs, func(dir string) bool { return strings.HasPrefix(point, dir+"/") }) {
			points = append(points, point)
		}
	}
	slices.Reverse(points)
	for _, point := range points {
		require.NoError(w.T, unix.Unmount(point, unix.MNT_DETACH), point)
	}
}

// removeLinks removes a bridge with the links on it, and the firewall table of its agent.
func (w *Testbed) removeLinks(bridge string) {
	w.T.Helper()
	found, err := netlink.LinkByName(bridge)
	require.NoError(w.T, err)
	links, err := netnamespace.List(netlink.LinkList) // other nodes' links change meanwhile
	require.NoError(w.T, err)
	for _, l := range links {
		if l.Attrs().MasterIndex == found.Attrs().Index {
			// It may be gone by now: its other end was in a namespace without processes and mounts.
			_ = netlink.LinkDel(l)
		}
	}
	require.NoError(w.T, netlink.LinkDel(found))
	out, err := exec.CommandContext(w.Ctx, "nft", "delete", "table", "inet", "gpuaas_"+bridge).CombinedOutput()
	require.NoError(w.T, err, "%s", out)
}
