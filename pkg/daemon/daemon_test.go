package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

type given struct {
	dir   string
	every time.Duration
	names []string
}

func program(g *given) Program {
	root, serve := &cobra.Command{Use: "thing"}, &cobra.Command{Use: "serve", RunE: func(*cobra.Command, []string) error {
		return nil
	}}
	serve.Flags().StringVar(&g.dir, "data-dir", "/default", "")
	serve.Flags().DurationVar(&g.every, "resync", time.Minute, "")
	serve.Flags().StringSliceVar(&g.names, "tls-name", nil, "")
	root.AddCommand(serve)
	return Program{Root: root, EnvPrefix: "THING_", Default: "serve"}
}

func TestEveryFlagCanComeFromTheEnvironmentAndTheCommandLineWins(t *testing.T) {
	t.Setenv("THING_DATA_DIR", "/from/env")
	t.Setenv("THING_RESYNC", "5s")
	t.Setenv("THING_TLS_NAME", "a.example,b.example")
	var g given
	var out strings.Builder
	require.NoError(t, program(&g).Execute(t.Context(), []string{"--data-dir", "/from/flag"}, &out, &out))
	require.Equal(t, given{dir: "/from/flag", every: 5 * time.Second, names: []string{"a.example", "b.example"}}, g)

	t.Setenv("THING_RESYNC", "soon")
	err := program(&g).Execute(t.Context(), nil, &out, &out)
	require.Contains(t, fault.As(err).Public, "THING_RESYNC")
	require.NotContains(t, fault.As(err).Public, "soon")
}

func TestAVariableOfNoFlagIsRefused(t *testing.T) {
	p := program(&given{})
	p.Root.AddCommand(&cobra.Command{Use: "backup", RunE: func(*cobra.Command, []string) error { return nil }})
	t.Setenv("THING_TLS_NAME", "a.example") // of serve alone
	var out strings.Builder
	require.NoError(t, p.Execute(t.Context(), []string{"backup"}, &out, &out))

	t.Setenv("THING_DATA_DRI", "/srv/secret")
	for _, args := range [][]string{nil, {"backup"}} {
		err := p.Execute(t.Context(), args, &out, &out)
		require.Contains(t, fault.As(err).Public, "THING_DATA_DRI")
		require.NotContains(t, fault.As(err).Public, "secret")
	}
}

func TestFlagsWithoutACommandMeanTheDefault(t *testing.T) {
	p := program(&given{})
	require.Equal(t, []string{"serve"}, p.withDefault(nil))
	require.Equal(t, []string{"serve", "--data-dir", "x"}, p.withDefault([]string{"--data-dir", "x"}))
	require.Equal(t, []string{"--help"}, p.withDefault([]string{"--help"}))
	require.Equal(t, []string{"init"}, p.withDefault([]string{"init"}))
}

func TestAComplaintSaysWhatToDo(t *testing.T) {
	var out strings.Builder
	program(&given{}).complain(&out, fault.New(fault.Unavailable, "port_taken", "Port 1 is taken: choose another.", nil))
	require.Equal(t, "thing: Port 1 is taken: choose another. (port_taken)\n", out.String())
}

func TestAnUnknownFlagIsAnsweredWithThoseThatBeginLikeIt(t *testing.T) {
	for args, want := range map[string]string{
		"--data x":   "unknown flag: --data; did you mean --data-dir?",
		"--listen x": "unknown flag: --listen; use: thing serve [flags]",
		"-d x":       "unknown shorthand flag: 'd' in -d; use: thing serve [flags]",
	} {
		var out strings.Builder
		require.EqualError(t, program(&given{}).Execute(t.Context(), strings.Fields(args), &out, &out), want)
	}
}
