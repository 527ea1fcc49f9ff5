package guide_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// TestConfigurationReferenceNamesEveryFlag holds the page to the built programs: it names their flags and no others.
func TestConfigurationReferenceNamesEveryFlag(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(harness.Source(t), "docs", "reference", "configuration.md"))
	require.NoError(t, err)
	for _, command := range []string{
		"gpuaas-hub init", "gpuaas-hub serve", "gpuaas-hub backup", "gpuaas-hub restore",
		"gpuaas-agent run",
	} {
		_, section, found := strings.Cut(string(data), "## "+command+"\n")
		require.True(t, found, command)
		section, _, _ = strings.Cut(section, "\n## ")
		words := strings.Fields(command)
		out, err := exec.Command(filepath.Join(harness.Binaries(t), words[0]), words[1], "--help").Output()
		require.NoError(t, err)
		has := flags(regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z-]+)`), string(out))
		delete(has, "help")
		require.Equal(t, has, flags(regexp.MustCompile("(?m)^\\| (?:`-\\w`, )?`--([a-z-]+)`"), section), command)
	}
}

// The bootstrap files set flags that the agent has, name files that are there, and commands that exist.
func TestTheBootstrapFilesFitThePrograms(t *testing.T) {
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(harness.Source(t), filepath.FromSlash(name)))
		require.NoError(t, err)
		return string(data)
	}
	help := func(command string) string {
		words := strings.Fields(command + " --help")
		out, err := exec.Command(filepath.Join(harness.Binaries(t), words[0]), words[1:]...).Output()
		require.NoError(t, err)
		return string(out)
	}
	var cloud struct {
		WriteFiles []struct{ Path, Permissions, Content string } `yaml:"write_files"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read("bootstrap/cloud-init.yaml")), &cloud))
	files := map[string]string{}
	for _, f := range cloud.WriteFiles {
		require.Equal(t, "0600", f.Permissions, f.Path)
		files[f.Path] = f.Content
	}

	unit := read("systemd/gpuaas-agent.service")
	require.Contains(t, unit, "\nExecStart=/usr/local/bin/gpuaas-agent run\n")
	require.Contains(t, unit, "\nEnvironmentFile=/etc/gpuaas/agent.env\n")
	require.NotRegexp(t, `(?m)^(ProtectHome|ProtectSystem|ProtectKernel\w+|ProtectControlGroups|ProtectHostname|`+
		`Private\w+|\w+Paths|TemporaryFileSystem|MountFlags|RootDirectory|RootImage|DynamicUser)=`, unit,
		"containerd would not see the agent's mounts (systemd.exec, PrivateMounts=)")
	has := flags(regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z-]+)`), help("gpuaas-agent run"))
	set := map[string]string{}
	for line := range strings.Lines(files["/etc/gpuaas/agent.env"]) {
		name, value, isSet := strings.Cut(strings.TrimSpace(line), "=")
		if strings.HasPrefix(name, "#") {
			continue
		}
		require.True(t, isSet, line)
		flag := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, "GPUAAS_AGENT_"), "_", "-"))
		require.Contains(t, has, flag, name)
		set[flag] = value
	}
	for _, needed := range []string{"api-url", "root-fingerprint", "join-token-file"} {
		require.Contains(t, set, needed)
	}
	require.Contains(t, files, set["join-token-file"])

	text := read("bootstrap/README.md")
	for _, name := range regexp.MustCompile("`GPUAAS_AGENT_([A-Z_]+)`").FindAllStringSubmatch(text, -1) {
		require.Contains(t, set, strings.ToLower(strings.ReplaceAll(name[1], "_", "-")))
	}
	commands := regexp.MustCompile("`(gpuaas(?:-hub|-agent)? [a-z -]+)`").FindAllStringSubmatch(text, -1)
	require.GreaterOrEqual(t, len(commands), 4)
	for _, c := range commands {
		require.Contains(t, help(c[1]), "\n  "+c[1]+" [flags]\n")
	}
}

func flags(pattern *regexp.Regexp, text string) map[string]bool {
	found := map[string]bool{}
	for _, m := range pattern.FindAllStringSubmatch(text, -1) {
		found[m[1]] = true
	}
	return found
}
