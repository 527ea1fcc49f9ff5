package runtime

import (
	_ "embed" // the script that installs belongs to the agent
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/protocol"
)

// IndexFile is the name of the secret that configures pip for the package index of a project.
const IndexFile = "pip.conf"

// IndexCAFile is the name of the secret with the certificates that the index is trusted by.
const IndexCAFile = "index-ca.pem"

//go:embed install.py
var installScript string

// installCommand makes a virtual environment and installs the requirements in it. None of them is an option of pip: the
// manifest package has checked them.
func installCommand(e *protocol.Environment) []string {
	timeout := strconv.FormatUint(uint64(e.GetBuildTimeoutSeconds()), 10)
	return slices.Concat([]string{e.GetPython(), "-c", installScript, e.GetPath(), timeout}, e.GetRequirements())
}

// setEnvironmentVariables lets the programs of a container find the packages of its environment, or pip the directory
// that it may write to and its configuration.
func setEnvironmentVariables(env []string, spec Spec, set func(name, value string)) {
	e := spec.Service.GetEnvironment()
	switch {
	case e == nil:
	case e.GetBuilds():
		tmp := e.GetPath() + "/.install"
		set("HOME", tmp)
		set("TMPDIR", tmp)
		if spec.Secrets[IndexFile] != nil {
			set("PIP_CONFIG_FILE", secretsMount+"/"+IndexFile)
		}
		if spec.Secrets[IndexCAFile] != nil {
			set("PIP_CERT", secretsMount+"/"+IndexCAFile)
		}
	default:
		before := func(name, dir string) {
			for _, entry := range env {
				if old, is := strings.CutPrefix(entry, name+"="); is && old != "" {
					dir += ":" + old
				}
			}
			set(name, dir)
		}
		before("PATH", e.GetPath()+"/bin")
		before("PYTHONPATH", e.GetPath()+"/"+spec.Packages)
		set("VIRTUAL_ENV", e.GetPath())
	}
}
