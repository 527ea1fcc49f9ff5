// Command gpuaas-agent is a node of the mesh: `run` keeps it going, the other commands ask the running one through its
// socket. It wires the rooms together and decides nothing.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/daemon"
)

func main() { os.Exit(program().Main()) }

func program() daemon.Program {
	return daemon.Program{Root: newRoot(), EnvPrefix: "GPUAAS_AGENT_", Default: "run"}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{Use: "gpuaas-agent", Short: "A node of a GPUaaS mesh: it verifies, remembers, runs, measures " +
		"and reports"}
	root.AddCommand(newRun(), newEnroll(), newStatus(), newWorkloads(), newLogs(), newVerify(), newApply(), newUninstall())
	return root
}
