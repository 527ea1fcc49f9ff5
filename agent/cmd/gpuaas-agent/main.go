// Command gpuaas-agent is a node of the mesh: `run` keeps it going, the other commands ask the running one through its
// socket. It wires the rooms together and decides nothing.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/agent/internal/containerfiles"
	"github.com/gpuaas/gpuaas/pkg/daemon"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == containerfiles.Name {
		os.Exit(containerfiles.Run(os.Args[2:])) // a process of a container's user: it must not read a configuration
	}
	os.Exit(program().Main())
}

func program() daemon.Program {
	return daemon.Program{Root: newRoot(), EnvPrefix: "GPUAAS_AGENT_", Default: "run"}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{Use: "gpuaas-agent", Short: "A node of a GPUaaS mesh: it verifies, remembers, runs, measures " +
		"and reports"}
	root.AddCommand(newRun(), newEnroll(), newStatus(), newWorkloads(), newLogs(), newVerify(), newKeys(), newApply(),
		newReleaseAccelerator(), newImages(), newPinImage(true), newPinImage(false), newUninstall())
	return root
}
