package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The reference names every flag of the daemons, and none that does not exist.
func TestConfigurationReferenceNamesEveryFlag(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(source(t), "docs", "configuration.md"))
	require.NoError(t, err)
	for _, command := range []string{"gpuaas-hub init", "gpuaas-hub serve", "gpuaas-hub backup", "gpuaas-hub restore", "gpuaas-agent run"} {
		_, section, found := strings.Cut(string(data), "## "+command+"\n")
		require.True(t, found, command)
		section, _, _ = strings.Cut(section, "\n## ")
		words := strings.Fields(command)
		out, err := exec.Command(filepath.Join(binaries(t), words[0]), words[1], "--help").Output()
		require.NoError(t, err)
		has := flags(regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z-]+)`), string(out))
		delete(has, "help")
		require.Equal(t, has, flags(regexp.MustCompile("(?m)^\\| `--([a-z-]+)`"), section), command)
	}
}

func flags(pattern *regexp.Regexp, text string) map[string]bool {
	found := map[string]bool{}
	for _, m := range pattern.FindAllStringSubmatch(text, -1) {
		found[m[1]] = true
	}
	return found
}
