package host_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/host"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// machine writes files of a made-up machine.
func machine(t *testing.T, files map[string]string) host.Config {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return host.Config{Root: root}
}

func TestFactsOfThisMachine(t *testing.T) {
	f, err := host.Facts(t.Context(), host.Config{})
	require.NoError(t, err)
	require.NotEmpty(t, f.GetHostname())
	require.NotEmpty(t, f.GetOs())
	require.NotEmpty(t, f.GetKernel())
	require.NotEmpty(t, f.GetArchitecture())
	require.Positive(t, f.GetCpuCores())
	require.Greater(t, f.GetMemoryBytes(), uint64(64<<20))
	require.True(t, f.GetBootTime().AsTime().Before(time.Now()))
}

func TestFactsAreReadFromTheirSources(t *testing.T) {
	f, err := host.Facts(t.Context(), machine(t, map[string]string{
		"etc/os-release":                   "NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n",
		"proc/meminfo":                     "MemTotal:       16384 kB\nMemFree: 1 kB\n",
		"proc/stat":                        "cpu 1 2\nbtime 1700000000\n",
		"sys/fs/cgroup/cgroup.controllers": "cpu memory pids",
	}))
	require.NoError(t, err)
	require.Equal(t, "Debian GNU/Linux 12 (bookworm)", f.GetOs())
	require.Equal(t, uint64(16<<20), f.GetMemoryBytes())
	require.Equal(t, int64(1700000000), f.GetBootTime().AsTime().Unix())
	require.Empty(t, f.GetConditions())
	f, err = host.Facts(t.Context(), machine(t, nil))
	require.ErrorContains(t, err, "memory")
	require.NotEmpty(t, f.GetKernel(), "what can be read is there all the same")
	require.Equal(t, []string{protocol.ConditionCgroupV1}, f.GetConditions())
}

// A large machine counts very many interrupts, in one line.
func TestALongLineHidesNoFact(t *testing.T) {
	f, err := host.Facts(t.Context(), machine(t, map[string]string{
		"etc/os-release": "PRETTY_NAME=x\n",
		"proc/meminfo":   "MemTotal: 1 kB\n",
		"proc/stat":      "cpu 1 2\nintr 1" + strings.Repeat(" 0", 100<<10) + "\nctxt 1\nbtime 1700000000\n",
	}))
	require.NoError(t, err)
	require.Equal(t, int64(1700000000), f.GetBootTime().AsTime().Unix())
}

// A hello with a text that is not UTF-8 could not be encoded, and the node would never get a session.
func TestAFactIsATextWhateverItsFileHolds(t *testing.T) {
	f, err := host.Facts(t.Context(), machine(t, map[string]string{
		"etc/os-release": "PRETTY_NAME=\"Linux f\xfcr Rechner\"\n",
		"proc/meminfo":   "MemTotal: 1 kB\n",
		"proc/stat":      "btime 1\n",
	}))
	require.NoError(t, err)
	require.Equal(t, "Linux f?r Rechner", f.GetOs())
	_, err = proto.Marshal(f)
	require.NoError(t, err)
}

func TestOldRuncIsReported(t *testing.T) {
	for version, old := range map[string]bool{
		"1.1.5+ds1": true, "1.1.15": true, "1.2.7": true, "1.2.8": false, "1.3.0": true, "1.3.3": false, "1.4.0-rc.3": false,
		"1.4.0-rc.1": true, "v1.4.0-rc.2+ds1": true, "1.4.0": false, "1.4.1": false,
		"2.0.0": false, "": true, "x": true,
	} {
		require.Equal(t, old, len(host.RuncConditions(version)) == 1, version)
	}
}

// requirements of a machine that has everything.
func TestEnrolledNodeStartsOnAFullDisk(t *testing.T) {
	r := requirements(t)
	r.MinFreeBytes = 1 << 60
	require.ErrorContains(t, host.Check(t.Context(), r), "free space")
	r.Enrolled = true
	require.NoError(t, host.Check(t.Context(), r))
}

// Containers, logs and the store's own files need inodes, too.
func TestANewNodeNeedsFreeInodes(t *testing.T) {
	skip.Root(t, "mounts")
	r := requirements(t)
	r.DataDir = t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", r.DataDir, "tmpfs", 0, fmt.Sprintf("nr_inodes=%d", host.MinFreeFiles)))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(r.DataDir, 0)) })
	r.MinFreeBytes = 1
	err := host.Check(t.Context(), r)
	require.EqualValues(t, "disk_full", fault.As(err).Code)
	require.ErrorContains(t, err, "inodes")
	require.NoError(t, unix.Mount("", r.DataDir, "", unix.MS_REMOUNT, fmt.Sprintf("nr_inodes=%d", 2*host.MinFreeFiles)))
	require.NoError(t, host.Check(t.Context(), r))
}

func requirements(t *testing.T) host.Requirements {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return host.Requirements{DataDir: dir, RunDir: dir, ContainerdAddress: socket}
}

func TestEverythingThatIsMissingIsNamedWithWhatToDo(t *testing.T) {
	skip.Root(t, "a node's prerequisites")
	require.NoError(t, host.Check(t.Context(), requirements(t)))
	for code, c := range map[string]struct {
		change func(*host.Requirements)
		advice string
	}{
		"containerd_unavailable": {func(r *host.Requirements) { r.ContainerdAddress += "x" }, "apt-get install containerd"},
		"disk_full":              {func(r *host.Requirements) { r.MinFreeBytes = 1 << 60 }, "free space"},
		"directory_unusable":     {func(r *host.Requirements) { r.RunDir += "/none" }, "cannot be read"},
	} {
		t.Run(code, func(t *testing.T) {
			r := requirements(t)
			c.change(&r)
			err := host.Check(t.Context(), r)
			require.EqualValues(t, code, fault.As(err).Code)
			require.Contains(t, fault.As(err).Public, c.advice)
		})
	}
	all := requirements(t)
	all.ContainerdAddress, all.MinFreeBytes = "/none", 1<<60
	require.Len(t, strings.Split(fault.As(host.Check(t.Context(), all)).Public, "\n"), 3, "containerd and two directories")
	t.Setenv("PATH", t.TempDir())
	if _, err := os.Stat("/usr/sbin/containerd-shim-runc-v2"); err != nil {
		err := host.Check(t.Context(), requirements(t))
		require.EqualValues(t, "binary_missing", fault.As(err).Code)
		require.Contains(t, fault.As(err).Public, "apt-get install containerd")
	}
}

func TestSocketThatNobodyAnswersIsNoContainerd(t *testing.T) {
	r := requirements(t)
	r.ContainerdAddress = filepath.Join(r.DataDir, "dead")
	require.NoError(t, os.WriteFile(r.ContainerdAddress, nil, 0o600))
	require.ErrorContains(t, host.Check(t.Context(), r), "does not answer")
}

func TestClockBehindWhatHasPassedIsToldNotFatal(t *testing.T) {
	passed := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	require.NoError(t, host.CheckClock(passed, passed))
	require.NoError(t, host.CheckClock(passed.Add(-30*time.Second), passed))
	err := host.CheckClock(time.Unix(0, 0), passed)
	require.EqualValues(t, "clock_wrong", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "timedatectl set-ntp true")
}
