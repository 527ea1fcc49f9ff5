// Command gpuaas-agent is a node of the mesh: `run` keeps it going, the other commands ask the running one through its
// socket. It wires the rooms together and decides nothing.
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
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// envPrefix: the flag --foo-bar can also be given as GPUAAS_AGENT_FOO_BAR.
const envPrefix = "GPUAAS_AGENT_"

// version is set by the linker.
var version = ""

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

// withDefault makes `gpuaas-agent --flag` mean `gpuaas-agent run --flag`.
func withDefault(args []string) []string {
	if len(args) > 0 && (!strings.HasPrefix(args[0], "-") || args[0] == "-h" || args[0] == "--help" || args[0] == "--version") {
		return args
	}
	return append([]string{"run"}, args...)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "gpuaas-agent",
		Short:         "A node of a GPUaaS mesh: it verifies, remembers, runs, measures and reports",
		Version:       agentVersion(),
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return fromEnvironment(cmd.Flags(), os.LookupEnv)
		},
	}
	root.AddCommand(newRun(), newEnroll(), newStatus(), newWorkloads(), newLogs(), newVerify(), newApply(), newUninstall())
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
			failed = fault.New(fault.Malformed, "environment_invalid",
				fmt.Sprintf("The environment variable %s has an unusable value: see --%s in `gpuaas-agent run --help`.", name, f.Name), err)
		}
	})
	return failed
}

// complain says what went wrong and what to do; the cause follows for whoever digs deeper.
func complain(w io.Writer, err error) {
	f, is := errors.AsType[*fault.Error](err)
	if !is {
		_, _ = fmt.Fprintf(w, "gpuaas-agent: %v\n", err)
		return
	}
	_, _ = fmt.Fprintf(w, "gpuaas-agent: %s (%s)\n", f.Public, f.Code)
	if f.Cause != nil {
		_, _ = fmt.Fprintf(w, "  cause: %v\n", f.Cause)
	}
}

func agentVersion() string {
	if version != "" {
		return version
	}
	if revision := buildSetting("vcs.revision"); len(revision) >= 12 {
		return "dev-" + revision[:12]
	}
	return "dev"
}

// builtAt is part of the time floor: a clock before it is wrong. It is zero when the build did not record it.
func builtAt() time.Time {
	t, err := time.Parse(time.RFC3339, buildSetting("vcs.time"))
	if err != nil {
		return time.Time{}
	}
	return t
}

func buildSetting(key string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
