// Command gpuaas-starter runs a reference controller of deploy/starter as the external worker of one app instance,
// until the instance has ended or the program is asked to stop. It reads files and environment, and decides nothing.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/daemon"
)

const program = "gpuaas-starter"

func main() {
	os.Exit(daemon.Program{Root: newRoot(), EnvPrefix: "GPUAAS_STARTER_", Default: "run"}.Main())
}

func newRoot() *cobra.Command {
	root := &cobra.Command{Use: program, Short: "Reference controllers of apps that an external worker operates"}
	root.AddCommand(newRun())
	return root
}
