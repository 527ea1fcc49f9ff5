package reconcile_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	firstProject  = "0199c0de-0000-7000-8000-000000000001"
	secondProject = "0199c0de-0000-7000-8000-000000000002"
)

func (f *fixture) withEnvironment(project string, requirements ...string) *protocol.Workload {
	f.t.Helper()
	f.hub.requirements = requirements
	defer func() { f.hub.requirements = nil }()
	w := f.hub.workload(`{}`)
	w.ProjectId = project
	return w
}

// serving is the member's container that runs.
func (f *fixture) serving(memberID string) runtime.Container {
	f.t.Helper()
	for _, c := range f.containersOf(memberID) {
		if c.Service == "main" && c.PID != 0 {
			return c
		}
	}
	f.t.Fatalf("member %s does not serve", memberID)
	return runtime.Container{}
}

func (f *fixture) installed() []string {
	f.t.Helper()
	found, err := filepath.Glob(f.dir + "/environments/[^.]*")
	require.NoError(f.t, err)
	return found
}

func (f *fixture) unfinished() []string {
	f.t.Helper()
	found, err := filepath.Glob(f.dir + "/environments/.*")
	require.NoError(f.t, err)
	return found
}

func (f *fixture) builds(memberID string) int {
	f.t.Helper()
	count := 0
	for _, c := range f.containersOf(memberID) {
		if c.Environment != "" {
			count++
		}
	}
	return count
}

func TestAnEnvironmentIsInstalledOnceForAProject(t *testing.T) {
	f := newFixture(t)
	first, second := f.withEnvironment(firstProject, "b", "a"), f.withEnvironment(firstProject, "a", "B")
	other := f.withEnvironment(secondProject, "a", "b")
	f.push(first)
	f.untilStatus(first.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, 1, f.builds(first.GetId()))
	require.Len(t, f.installed(), 1)
	require.Empty(t, f.unfinished())
	var image unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(f.installed()[0], "data.img"), &image))
	require.Less(t, image.Blocks*512, int64(16<<20), "what it does not need is given back")
	pid := f.serving(first.GetId()).PID
	packages := fmt.Sprintf("/proc/%d/root/opt/environment/lib/python3.11/site-packages", pid)
	require.FileExists(t, packages+"/a")
	require.ErrorIs(t, os.WriteFile(packages+"/more", nil, 0o600), unix.EROFS)
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	require.NoError(t, err)
	require.Contains(t, string(environ), "\x00PYTHONPATH=/opt/environment/lib/python3.11/site-packages\x00")
	require.Contains(t, string(environ), "PATH=/opt/environment/bin:/usr/local/sbin:")

	f.push(first, second, other)
	f.untilStatus(second.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
	require.Zero(t, f.builds(second.GetId()), "it is found again")
	require.Equal(t, 1, f.builds(other.GetId()), "another project has its own")
	require.Len(t, f.installed(), 2)

	f.restart()
	f.untilStatus(first.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, pid, f.serving(first.GetId()).PID)
	require.NoError(t, unix.Kill(int(pid), unix.SIGKILL))
	f.until(first.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRestarts() == 1 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	f.push()
	f.untilStatus(first.GetId(), protocol.WorkloadStatus_REMOVED)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_REMOVED)
	require.Len(t, f.installed(), 2, "they stay for the next instance")
}

// Two members that start together install one environment between them.
func TestOneMemberInstallsForAll(t *testing.T) {
	f := newFixture(t)
	first, second := f.withEnvironment(firstProject, "a"), f.withEnvironment(firstProject, "a")
	f.push(first, second)
	f.untilStatus(first.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(second.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, 1, f.builds(first.GetId())+f.builds(second.GetId()))
}

func TestAFailedInstallationIsAClearStatusWithoutCredentials(t *testing.T) {
	f := newFixture(t)
	key := f.withSealingKey()

	w, healthy := f.withEnvironment(firstProject, "missing"), f.hub.workload(`{}`)
	sealed, err := protocol.Seal(key, w.GetId(), protocol.PackageIndexParameter,
		[]byte("https://reader:s3cr%21t@packages.example/simple"))
	require.NoError(t, err)
	params, err := json.Marshal(map[string]any{protocol.PackageIndexParameter: protocol.SealedValue(sealed)})
	require.NoError(t, err)
	w.ParametersJson = string(params)
	f.push(w, healthy)
	failed := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_ENVIRONMENT_FAILED, failed.GetReason())
	require.Contains(t, failed.GetDetail(), "no matching distribution found for missing")
	require.Contains(t, failed.GetDetail(), "index-url = https://****@packages.example/simple")
	require.NotContains(t, failed.GetDetail(), "s3cr")
	require.True(t, utf8.ValidString(failed.GetDetail()), "else no report could be encoded")
	f.untilStatus(healthy.GetId(), protocol.WorkloadStatus_READY)
	require.Eventually(t, func() bool { return len(f.unfinished()) == 0 }, 10*time.Second, 10*time.Millisecond)
	require.Empty(t, f.installed())
}

func TestLaw11NoFormOfAnIndexsCredentialsIsQuoted(t *testing.T) {
	for index, forms := range map[string][]string{
		"https://reader:s3cr%21t@packages.example/simple": {"s3cr!t", "s3cr%21t", "reader:s3cr%21t"},
		"https://t%2Fken@packages.example/simple":         {"t/ken", "t%2Fken"},
		"https://t%2Fken:@packages.example/simple":        {"t/ken", "t%2Fken", "t%2Fken:"},
	} {
		for _, form := range forms {
			text, err := reconcile.Redacted(index, "401 for "+form)
			require.NoError(t, err)
			require.Equal(t, "401 for ****", text)
		}
	}
}

// An upgrade installs its environment while the container before it serves. A failed installation changes nothing.
func TestAnUpgradeServesWhileItsEnvironmentIsInstalled(t *testing.T) {
	f := newFixture(t)
	w := f.withEnvironment(firstProject, "a")
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	pid := f.serving(w.GetId()).PID
	f.push(next(w, f.withEnvironment(firstProject, "a", "slow")))
	require.Eventually(t, func() bool { return len(f.unfinished()) == 1 }, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, pid, f.serving(w.GetId()).PID, "it serves meanwhile")

	missing := next(w, f.withEnvironment(firstProject, "missing"))
	missing.Revision++
	f.push(missing)
	back := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetFallbackFromRevision() == missing.GetRevision() && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.Equal(t, protocol.WorkloadStatus_ENVIRONMENT_FAILED, back.GetReason())
	require.Equal(t, pid, f.serving(w.GetId()).PID, "a failed installation stops nothing")

	upgraded := next(w, f.withEnvironment(firstProject, "a", "b"))
	upgraded.Revision = missing.GetRevision() + 1
	f.push(upgraded)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == upgraded.GetRevision() && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.NotEqual(t, pid, f.serving(w.GetId()).PID)
	require.Len(t, f.installed(), 2)
}

// A killed shim takes pip along, and nobody knows its exit code: what it had installed by then is no environment.
func TestAnInstallationThatNobodySawEndIsNone(t *testing.T) {
	f := newFixture(t)
	w := f.withEnvironment(firstProject, "a", "slow")
	f.push(w)
	begun := func(but string) (packages string) {
		found, err := filepath.Glob(f.dir + "/mounted/.build-*/content/lib/*/site-packages/a")
		require.NoError(t, err)
		for _, one := range found {
			if one != but {
				packages = one
			}
		}
		return packages
	}
	require.Eventually(t, func() bool { return begun("") != "" }, 30*time.Second, 10*time.Millisecond)
	first := begun("")
	shims := f.daemon.Shims()
	require.Len(t, shims, 1)
	require.NoError(t, unix.Kill(shims[0], unix.SIGKILL))
	require.Eventually(t, func() bool { return begun(first) != "" || len(f.installed()) > 0 }, 30*time.Second,
		10*time.Millisecond)
	require.Empty(t, f.installed())
	require.NoFileExists(t, first)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	require.Empty(t, f.unfinished())
}

// An agent that is stopped in the middle of an installation, and a member that leaves, leave no half environment.
func TestAnInterruptedInstallationCountsForNothing(t *testing.T) {
	f := newFixture(t)
	w := f.withEnvironment(firstProject, "a", "slow")
	f.push(w)
	building := func() bool {
		return f.builds(w.GetId()) == 1 && len(f.unfinished()) == 1 && len(f.installed()) == 0
	}
	require.Eventually(t, building, 30*time.Second, 10*time.Millisecond)
	f.restart()
	require.Eventually(t, building, 30*time.Second, 10*time.Millisecond)
	f.push()
	removed := f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	require.Contains(t, removed.GetRemoval().GetAbsent(), protocol.AbsentVolume)
	require.Empty(t, f.unfinished())
	require.Empty(t, f.installed())
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.Zero(t, strings.Count(string(mounts), f.dir+"/mounted/"))
}
