// Package daemon is the command line that the programs share: flags that may come from the environment, a default
// command, signals, errors that say what to do, and what the build recorded about itself. It knows nothing of what a
// program does.
package daemon

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
	"github.com/gpuaas/gpuaas/pkg/flaghint"
)

// Program is one program.
type Program struct {
	// Root is the program's command; its name is the program's.
	Root *cobra.Command
	// EnvPrefix, as in GPUAAS_HUB_: the flag --foo-bar can also be given as GPUAAS_HUB_FOO_BAR.
	EnvPrefix string
	// Default is the command that flags without a command mean.
	Default string
}

// Main runs the program as a process: until it ends or is asked to (SIGINT, SIGTERM). It returns the exit status.
func (p Program) Main() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := p.Execute(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		p.complain(os.Stderr, err)
		return 1
	}
	return 0
}

// Execute runs the program with these arguments, until it ends or ctx does.
func (p Program) Execute(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	p.Root.SilenceUsage, p.Root.SilenceErrors, p.Root.Version = true, true, Version()
	p.Root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := p.checkEnvironment(os.Environ()); err != nil {
			return err
		}
		return p.fromEnvironment(cmd.Flags(), os.LookupEnv)
	}
	p.Root.SetFlagErrorFunc(flaghint.Error)
	p.Root.SetOut(stdout)
	p.Root.SetErr(stderr)
	p.Root.SetArgs(p.withDefault(args))
	return p.Root.ExecuteContext(ctx)
}

// withDefault makes `program --flag` mean `program command --flag`.
func (p Program) withDefault(args []string) []string {
	if len(args) > 0 && (!strings.HasPrefix(args[0], "-") || args[0] == "-h" || args[0] == "--help" || args[0] == "-v" ||
		args[0] == "--version") {
		return args
	}
	return append([]string{p.Default}, args...)
}

// variable is the environment variable of a flag.
func (p Program) variable(f *pflag.Flag) string {
	return p.EnvPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// checkEnvironment refuses a variable with the program's prefix that belongs to no flag: a misspelt one would leave its
// flag at the default. Commands share a file of variables, so that a flag of any command counts.
func (p Program) checkEnvironment(environ []string) error {
	known := map[string]bool{}
	var add func(*cobra.Command)
	add = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known[p.variable(f)] = true })
		for _, c := range cmd.Commands() {
			add(c)
		}
	}
	add(p.Root)
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, p.EnvPrefix) && !known[name] {
			return fault.New(fault.Malformed, codeEnvironmentInvalid, fmt.Sprintf("The environment variable %s belongs to no "+
				"flag of %s: correct its name (`%s %s --help` lists the flags), or remove it.", name, p.Root.Name(),
				p.Root.Name(), p.Default), nil)
		}
	}
	return nil
}

// fromEnvironment sets the flags that were not given on the command line.
func (p Program) fromEnvironment(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var failed error
	flags.VisitAll(func(f *pflag.Flag) {
		name := p.variable(f)
		value, given := lookup(name)
		if !given || f.Changed || failed != nil {
			return
		}
		if err := flags.Set(f.Name, value); err != nil {
			failed = fault.New(fault.Malformed, codeEnvironmentInvalid,
				fmt.Sprintf("The environment variable %s has an unusable value: see --%s in `%s %s --help`.", name, f.Name,
					p.Root.Name(), p.Default), err)
		}
	})
	return failed
}

// complain writes what went wrong and what to do, then the cause.
func (p Program) complain(w io.Writer, err error) {
	f, is := errors.AsType[*fault.Error](err)
	if !is {
		_, _ = fmt.Fprintf(w, "%s: %v\n", p.Root.Name(), err)
		return
	}
	_, _ = fmt.Fprintf(w, "%s: %s (%s)\n", p.Root.Name(), f.Public, f.Code)
	if f.Cause != nil {
		_, _ = fmt.Fprintf(w, "  cause: %v\n", f.Cause)
	}
}

// Version is the revision that the program was built from, or dev when the build did not record it.
func Version() string {
	if revision := buildSetting("vcs.revision"); len(revision) >= 12 {
		return "dev-" + revision[:12]
	}
	return "dev"
}

// BuiltAt is a time that has certainly passed, part of a node's time floor: zero when the build did not record it.
func BuiltAt() time.Time {
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
