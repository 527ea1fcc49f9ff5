package runtime

import (
	"os"
	"path/filepath"
	"testing"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/stretchr/testify/require"
)

// TestBothCgroupVersionsAreRead uses made-up hierarchies, because a machine has only one of the two.
func TestBothCgroupVersionsAreRead(t *testing.T) {
	for name, c := range map[string]struct {
		v2    bool
		files map[string]string
		dirs  []string
	}{
		"version 1": {false, map[string]string{"memory/p/a/a.1/memory.oom_control": "oom_kill_disable 0\nunder_oom " +
			"0\noom_kill 2\n", "pids/p/a/a.1/cgroup.procs": ""}, []string{"memory/p/a/a.1", "pids/p/a/a.1"}},
		"version 2": {true, map[string]string{"p/a/a.1/memory.events": "low 0\noom 1\noom_kill 1\n"}, []string{"p/a/a.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			r := &Runtime{cfg: Config{CgroupParent: "/p"}, host: hostSupport{cgroupV2: c.v2, cgroupRoot: root}}
			require.False(t, r.oomKilled("a.1"))
			for path, text := range c.files {
				require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755))
				require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(text), 0o600))
			}
			require.True(t, r.oomKilled("a.1"))
			require.False(t, r.oomKilled("a.2"))
			var want []string
			for _, dir := range c.dirs {
				want = append(want, filepath.Join(root, dir))
			}
			require.ElementsMatch(t, want, r.cgroupDirs("/p/a/a.1"))
			require.Empty(t, r.cgroupDirs("/p/a/a.2"))
		})
	}
}

func TestBothVersionsMetricsAreDecoded(t *testing.T) {
	want := Stats{CPUUsageMicros: 5, MemoryBytes: 70, Pids: 3}
	got, err := statsOf(&cgroup1.Metrics{
		CPU: &cgroup1.CPUStat{Usage: &cgroup1.CPUUsage{Total: 5999}}, Memory: &cgroup1.MemoryStat{
			TotalInactiveFile: 30,
			Usage:             &cgroup1.MemoryEntry{Usage: 100},
		},
		Pids: &cgroup1.PidsStat{Current: 3},
	})
	require.NoError(t, err)
	require.Equal(t, want, got)
	got, err = statsOf(&cgroup2.Metrics{CPU: &cgroup2.CPUStat{UsageUsec: 5}, Memory: &cgroup2.MemoryStat{
		Usage:        100,
		InactiveFile: 30,
	}, Pids: &cgroup2.PidsStat{Current: 3}})
	require.NoError(t, err)
	require.Equal(t, want, got)
	got, err = statsOf(&cgroup2.Metrics{})
	require.NoError(t, err)
	require.Equal(t, Stats{}, got, "what a kernel does not count is zero")
	_, err = statsOf("something else")
	require.Error(t, err)
}

func TestCgroupsOfMembersGoFromEachHierarchy(t *testing.T) {
	root := t.TempDir()
	r := &Runtime{cfg: Config{CgroupParent: "/p"}, host: hostSupport{cgroupRoot: root}}
	for _, hierarchy := range []string{"cpu", "memory"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, hierarchy, "p", "member"), 0o755))
	}
	require.NoError(t, r.removeMemberCgroups())
	for _, hierarchy := range []string{"cpu", "memory"} {
		require.NoDirExists(t, filepath.Join(root, hierarchy, "p"))
	}
}
