package docs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

func installed(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(raw)
}

// The guide says that cloud-init does all that it tells an operator to do on a node.
func TestCloudInitInstallsWhatTheGuideInstalls(t *testing.T) {
	var config struct {
		Packages []string `yaml:"packages"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(installed(t, "../bootstrap/cloud-init.yaml")), &config))
	_, section, found := strings.Cut(installed(t, "guide/operator.md"), "\n## Enroll a node\n")
	require.True(t, found)
	installs := regexp.MustCompile(`(?m)^apt-get install -y (.+)$`).FindStringSubmatch(section)
	require.Len(t, installs, 2)
	require.ElementsMatch(t, strings.Fields(installs[1]), config.Packages)
}

// With RuntimeDirectoryPreserve=restart, the end of the unit would take the namespaces and addresses of containers that
// go on running (systemd.exec); with another KillMode, their MPS daemons (systemd.kill).
func TestTheEndOfTheAgentsUnitLeavesContainersWhatTheyUse(t *testing.T) {
	unit := installed(t, "../systemd/gpuaas-agent.service")
	require.Contains(t, unit, "\nRuntimeDirectoryPreserve=yes\n")
	require.Contains(t, unit, "\nKillMode=process\n")
}

// With KillMode=control-group a stop would reach the backends of the private PostgreSQL, too, and cut the requests that
// the hub lets finish (systemd.kill).
func TestTheEndOfTheHubsUnitLeavesItsDatabaseToIt(t *testing.T) {
	require.Contains(t, installed(t, "../systemd/gpuaas-hub.service"), "\nKillMode=mixed\n")
}

// Commands of ExecStartPost run once ExecStart has succeeded, those of ExecStopPost in any case (systemd.service). What
// a backup has left that was killed goes, too.
func TestOldBackupsGoOnlyAfterANewOne(t *testing.T) {
	deletes := map[string]string{}
	for line := range strings.Lines(installed(t, "../systemd/gpuaas-hub-backup.service")) {
		if setting, command, _ := strings.Cut(line, "="); strings.Contains(command, "-delete") {
			deletes[setting] = command
		}
	}
	require.Len(t, deletes, 1)
	dir := t.TempDir()
	for name, age := range map[string]time.Duration{
		"new.age": 0, "kept.age": 13, "old.age": 16, "now.age.unfinished": 0, "killed.age.unfinished": 3, "other": 100,
	} {
		path, at := filepath.Join(dir, name), time.Now().Add(-age*24*time.Hour)
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		require.NoError(t, os.Chtimes(path, at, at))
	}
	// The shell and systemd read quotes alike.
	command := strings.Replace(deletes["ExecStartPost"], "/var/backups/gpuaas-hub", dir, 1)
	out, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput()
	require.NoError(t, err, "%s", out)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, e := range left {
		names = append(names, e.Name())
	}
	require.Equal(t, []string{"kept.age", "new.age", "now.age.unfinished", "other"}, names)
}
