// Command gpuaas-hub is the hub: `init` makes its keys, `serve` runs it, `trust` works with the offline keys.
// It wires the rooms together and decides nothing.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/daemon"
)

const defaultDataDir = "/var/lib/gpuaas-hub"

func main() { os.Exit(program().Main()) }

func program() daemon.Program {
	return daemon.Program{Root: newRoot(), EnvPrefix: "GPUAAS_HUB_", Default: "serve"}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{Use: "gpuaas-hub", Short: "The hub of a GPUaaS mesh: it decides, signs and bills"}
	root.AddCommand(newServe(), newInit(), newTrust(), newAdminToken(), newAdminPassword(), newBackup(), newRestore(),
		newUsage())
	return root
}
