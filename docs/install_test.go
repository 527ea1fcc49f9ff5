package docs_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

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

// Commands of ExecStartPost run once ExecStart has succeeded, those of ExecStopPost in any case (systemd.service).
func TestOldBackupsGoOnlyAfterANewOne(t *testing.T) {
	var deletes []string
	for line := range strings.Lines(installed(t, "../systemd/gpuaas-hub-backup.service")) {
		if setting, command, _ := strings.Cut(line, "="); strings.Contains(command, "-delete") {
			deletes = append(deletes, setting)
		}
	}
	require.Equal(t, []string{"ExecStartPost"}, deletes)
}
