package runtime

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

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

func TestBothVersionsTellWhatAContainerUses(t *testing.T) {
	for name, c := range map[string]struct {
		v2    bool
		files map[string]string
	}{
		"version 1": {false, map[string]string{
			"cpuacct/p/a/a.1/cpuacct.usage":        "5999\n",
			"memory/p/a/a.1/memory.usage_in_bytes": "100\n",
			"memory/p/a/a.1/memory.stat":           "inactive_file 7\ntotal_cache 50\ntotal_inactive_file 30\n",
		}},
		"version 2": {true, map[string]string{
			"p/a/a.1/cpu.stat":       "usage_usec 5\nuser_usec 4\nsystem_usec 1\n",
			"p/a/a.1/memory.current": "100\n",
			"p/a/a.1/memory.stat":    "anon 50\nactive_file 20\ninactive_file 30\n",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			r := &Runtime{cfg: Config{CgroupParent: "/p"}, host: hostSupport{cgroupV2: c.v2, cgroupRoot: root}}
			for path, text := range c.files {
				require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755))
				require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(text), 0o600))
			}
			used, err := r.Stats("a.1")
			require.NoError(t, err)
			require.Equal(t, Stats{CPUUsageMicros: 5, MemoryBytes: 70}, used)
			for path, text := range c.files {
				for _, broken := range []string{"", "usage_usec\n", "none 1\n"} {
					require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(broken), 0o600))
					_, err = r.Stats("a.1")
					require.Error(t, err, "%s of %q", path, broken)
				}
				require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(text), 0o600))
			}
			_, err = r.Stats("a.2")
			require.ErrorIs(t, err, fs.ErrNotExist)
		})
	}
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
