package power_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/skip"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// machine is a machine of systemd-nspawn: systemd boots this machine's own /usr with the units of containerd and of the
// agent, a /run, a boot id and network namespaces of its own, and a root directory that a power cut leaves as it is.
type machine struct {
	w       *harness.Testbed
	root    string
	usr     string
	bridge  string
	address string
	nspawn  *exec.Cmd
	// pid is the machine's first process.
	pid int
}

// newMachine prepares the machine's root, and a bridge on which this machine has the address hub.
func newMachine(w *harness.Testbed) (m *machine, hub string) {
	w.T.Helper()
	for _, program := range []string{"systemd-nspawn", "/lib/systemd/systemd", "containerd", "runc", "ip", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			skip.Lacking(w.T, "there is no "+program)
		}
	}
	m = &machine{
		w: w, root: filepath.Join(w.Dir, "machine"), usr: filepath.Join(w.Dir, "usr"),
		bridge: strings.Replace(w.Bridge(0), "gpe", "gpx", 1), address: w.Subnet(9) + "2",
	}
	hub = w.Subnet(9) + "1"
	m.command("ip", "link", "add", m.bridge, "type", "bridge")
	w.T.Cleanup(func() { _ = exec.CommandContext(context.Background(), "ip", "link", "del", m.bridge).Run() })
	m.command("ip", "addr", "add", hub+"/24", "dev", m.bridge)
	m.command("ip", "link", "set", m.bridge, "up")
	m.command("cp", "-a", "/etc/alternatives", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", m.dir("etc"))
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		require.NoError(w.T, os.Symlink("usr/"+dir, filepath.Join(m.root, dir)))
	}
	for _, dir := range []string{"usr", "var/log", "run", "tmp", "proc", "sys", "dev", "root", "mnt/proc", "mnt/sys"} {
		m.dir(dir)
	}
	programs := filepath.Join(m.usr, "local", "bin")
	require.NoError(w.T, os.MkdirAll(programs, 0o755))
	m.command("cp", filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), programs)
	m.writeUnits(hub)
	w.T.Cleanup(m.powerOff)
	return m, hub
}

func (m *machine) writeUnits(gateway string) {
	m.w.T.Helper()
	m.write("etc/os-release", "ID=debian\nVERSION_ID=12\n")
	m.write("etc/machine-id", strings.Repeat("ab", 16)+"\n")
	m.write("etc/hostname", "node\n")
	units := "etc/systemd/system/"
	unit, err := os.ReadFile(filepath.Join(harness.Source(m.w.T), "systemd", "gpuaas-agent.service"))
	require.NoError(m.w.T, err)
	m.write(units+"gpuaas-agent.service", string(unit))
	m.write(units+"machine.target", `[Unit]
Requires=basic.target
Wants=containerd.service gpuaas-agent.service
After=basic.target
AllowIsolate=yes
`)
	// What a real machine has and nspawn withholds: writable cgroups, and a whole /proc and /sys, without which the
	// kernel refuses those of containers in user namespaces.
	m.write(units+"machine-setup.service", `[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -ec ' \
  for c in /sys/fs/cgroup /sys/fs/cgroup/*; do ! mountpoint -q $$c || mount -o remount,bind,rw $$c; done; \
  mount -t proc proc /mnt/proc; mount -t sysfs sysfs /mnt/sys; \
  ip link set lo up; ip addr add `+m.address+`/24 dev host0; ip link set host0 up; ip route add default via `+gateway+`'
`)
	for _, service := range []string{"containerd", "gpuaas-agent"} {
		m.write(units+service+".service.d/machine.conf", `[Unit]
Requires=machine-setup.service
After=machine-setup.service
[Service]
StandardError=append:/var/log/`+service+`.log
`)
	}
}

func (m *machine) dir(name string) string {
	m.w.T.Helper()
	path := filepath.Join(m.root, name)
	require.NoError(m.w.T, os.MkdirAll(path, 0o755))
	return path
}

func (m *machine) write(name, content string) {
	m.w.T.Helper()
	m.dir(filepath.Dir(name))
	require.NoError(m.w.T, os.WriteFile(filepath.Join(m.root, name), []byte(content), 0o644))
}

func (m *machine) command(name string, args ...string) string {
	m.w.T.Helper()
	out, err := exec.CommandContext(m.w.Ctx, name, args...).CombinedOutput()
	require.NoError(m.w.T, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

// boot starts the machine and waits for its first process.
func (m *machine) boot() {
	m.w.T.Helper()
	console, err := os.OpenFile(m.root+"-console.log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(m.w.T, err)
	defer func() { _ = console.Close() }()
	m.nspawn = exec.Command("sh", "-ec", `for c in `+strings.Join(m.makeCgroups(), " ")+
		`; do echo $$ >$c/cgroup.procs; done; exec systemd-nspawn "$@"`, "sh", "--quiet", "--register=no", "--keep-unit",
		"--machine="+m.bridge,
		"--directory="+m.root, "--overlay-ro=/usr:"+m.usr+":/usr", "--network-bridge="+m.bridge, "--capability=all",
		"--link-journal=no", "--resolv-conf=off", "--timezone=off", "--console=pipe", "--boot",
		"systemd.unit=machine.target")
	// The agent makes namespaces and mounts, which nspawn's filter of system calls refuses.
	m.nspawn.Env = append(os.Environ(), "SYSTEMD_SECCOMP=0", "SYSTEMD_NSPAWN_API_VFS_WRITABLE=yes",
		"SYSTEMD_NSPAWN_LOCK=0")
	m.nspawn.Stdout, m.nspawn.Stderr = console, console
	m.nspawn.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(m.w.T, m.nspawn.Start())
	m.w.Eventually("systemd is the first process of the machine", func() error {
		m.pid = childNamed(m.nspawn.Process.Pid, "systemd")
		return harness.Pending(nil, m.pid != 0)
	})
}

// cgroups are those that nspawn makes the machine's below: in version 1 only its own hierarchies, in version 2 all.
func (m *machine) cgroups() (dirs []string) {
	for _, hierarchy := range []string{"/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(hierarchy); err == nil {
			dirs = append(dirs, filepath.Join(hierarchy, m.bridge))
		}
	}
	if len(dirs) == 0 {
		dirs = append(dirs, filepath.Join("/sys/fs/cgroup", m.bridge))
	}
	return dirs
}

func (m *machine) makeCgroups() []string {
	m.w.T.Helper()
	for _, dir := range m.cgroups() {
		require.NoError(m.w.T, os.Mkdir(dir, 0o755))
	}
	return m.cgroups()
}

// childNamed is the child of a process that runs the program, 0 if there is none.
func childNamed(parent int, program string) int {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	for _, list := range lists {
		children, _ := os.ReadFile(list)
		for word := range strings.FieldsSeq(string(children)) {
			name, err := os.ReadFile(filepath.Join("/proc", word, "comm"))
			if pid, e := strconv.Atoi(word); err == nil && e == nil && strings.TrimSpace(string(name)) == program {
				return pid
			}
		}
	}
	return 0
}

// powerOff ends every process of the machine at once; its namespaces go with them.
func (m *machine) powerOff() {
	if m.nspawn == nil {
		return
	}
	if m.pid != 0 {
		_ = unix.Kill(m.pid, unix.SIGKILL)
	}
	_ = m.nspawn.Process.Kill()
	_ = m.nspawn.Wait()
	m.nspawn, m.pid = nil, 0
	for _, dir := range m.cgroups() {
		m.w.Eventually("the cgroups of the machine are gone", func() error { return harness.EmptyCgroup(dir) })
	}
	// nspawn, which was killed, leaves its directory, and those above it where they are its own.
	const own = "/run/systemd/nspawn/propagate"
	for _, dir := range []string{filepath.Join(own, m.bridge), own, filepath.Dir(own), "/run/systemd"} {
		_ = os.Remove(dir)
	}
}

// in runs a command in the machine and returns its output.
func (m *machine) in(args ...string) (string, error) {
	out, err := exec.CommandContext(m.w.Ctx, "nsenter", append([]string{
		"--target", strconv.Itoa(m.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--",
	}, args...)...).Output()
	return string(out), err
}

// path is a file of the running machine.
func (m *machine) path(name string) string { return fmt.Sprintf("/proc/%d/root/%s", m.pid, name) }

func (m *machine) bootID() string {
	m.w.T.Helper()
	id, err := m.in("cat", "/proc/sys/kernel/random/boot_id")
	require.NoError(m.w.T, err)
	return strings.TrimSpace(id)
}

// awaitAnswer waits until the instance answers on the machine's loopback address.
func (m *machine) awaitAnswer(i api.AppInstance) {
	m.w.T.Helper()
	m.w.Eventually(i.DisplayName+" answers", func() error {
		_, err := m.in("curl", "--silent", "--fail", "--max-time", "5", i.Endpoints[0].URL+"/")
		return err
	})
}

// nodeID waits until the machine's agent is enrolled.
func (m *machine) nodeID() (id string) {
	m.w.T.Helper()
	m.w.Eventually("the agent is enrolled", func() error {
		out, err := m.in("gpuaas-agent", "status", "-o", "json")
		if err != nil {
			return err
		}
		var status struct {
			NodeID string `json:"node_id"`
		}
		err = json.Unmarshal([]byte(out), &status)
		id = status.NodeID
		return harness.Pending(err, id != "")
	})
	return id
}

// networks are the network namespaces in which processes are, by their numbers in the kernel.
func networks() map[string]bool {
	found := map[string]bool{}
	links, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, link := range links {
		if at, err := os.Readlink(link); err == nil {
			found[at] = true
		}
	}
	return found
}

// showLogs prints what the machine's programs wrote.
func (m *machine) showLogs() {
	for _, name := range []string{m.root + "-console.log", m.root + "/var/log/containerd.log", m.root +
		"/var/log/gpuaas-agent.log"} {
		const tail = 6 << 10
		text, _ := os.ReadFile(name)
		m.w.T.Logf("%s:\n%s", name, text[max(0, len(text)-tail):])
	}
}

// cutAndBoot cuts the power until none but the given network namespaces are left, and boots the machine.
func (m *machine) cutAndBoot(others map[string]bool) (o outage) {
	m.w.T.Helper()
	m.powerOff()
	m.w.Eventually("no network namespace of the machine is left", func() error {
		return harness.Pending(nil, maps.Equal(networks(), others))
	})
	o.off = time.Now()
	m.w.Eventually("the link of the machine is gone", func() error {
		err := exec.CommandContext(m.w.Ctx, "ip", "link", "show", "vb-"+m.bridge).Run()
		return harness.Pending(nil, err != nil)
	})
	o.on = time.Now()
	m.boot()
	return o
}
