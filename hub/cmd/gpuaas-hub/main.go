// Command gpuaas-hub is the hub: `init` makes its keys, `serve` runs it, `trust` is for whoever holds the offline keys. It
// wires the rooms together and decides nothing.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// envPrefix: the flag --foo-bar can also be given as GPUAAS_HUB_FOO_BAR.
const envPrefix = "GPUAAS_HUB_"

const defaultDataDir = "/var/lib/gpuaas-hub"

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	root.SetArgs(withDefault(os.Args[1:]))
	if err := root.ExecuteContext(ctx); err != nil {
		complain(os.Stderr, err)
		return 1
	}
	return 0
}

// withDefault makes `gpuaas-hub --flag` mean `gpuaas-hub serve --flag`.
func withDefault(args []string) []string {
	if len(args) > 0 && (!strings.HasPrefix(args[0], "-") || args[0] == "-h" || args[0] == "--help" || args[0] == "--version") {
		return args
	}
	return append([]string{"serve"}, args...)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "gpuaas-hub",
		Short:         "The hub of a GPUaaS mesh: it decides, signs and bills",
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return fromEnvironment(cmd.Flags(), os.LookupEnv)
		},
	}
	root.AddCommand(newServe(), newInit(), newTrust(), newAdminToken())
	return root
}

// fromEnvironment sets the flags that were not given on the command line.
func fromEnvironment(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var failed error
	flags.VisitAll(func(f *pflag.Flag) {
		name := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		value, given := lookup(name)
		if !given || f.Changed || failed != nil {
			return
		}
		if err := flags.Set(f.Name, value); err != nil {
			failed = fault.New(fault.Malformed, "environment_invalid", fmt.Sprintf("The environment variable %s has an unusable value: see --%s in `gpuaas-hub serve --help`.", name, f.Name), err)
		}
	})
	return failed
}

// complain says what went wrong and what to do; the cause follows for whoever digs deeper.
func complain(w io.Writer, err error) {
	var f *fault.Error
	if !errors.As(err, &f) {
		_, _ = fmt.Fprintf(w, "gpuaas-hub: %v\n", err)
		return
	}
	_, _ = fmt.Fprintf(w, "gpuaas-hub: %s\n", f.Public)
	if f.Cause != nil {
		_, _ = fmt.Fprintf(w, "  cause: %v\n", f.Cause)
	}
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return "dev-" + s.Value[:12]
		}
	}
	return info.Main.Version
}
