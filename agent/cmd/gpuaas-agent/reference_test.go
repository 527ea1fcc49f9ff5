package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/docs/reference"
)

func TestReferenceOfCommandsAndFlags(t *testing.T) {
	p := program()
	reference.Check(t, "cli.md", "gpuaas-agent", reference.Commands(p.Root, "gpuaas-agent run"))
	run, _, err := p.Root.Find([]string{"run"})
	require.NoError(t, err)
	reference.Check(t, "configuration.md", "gpuaas-agent run", reference.Flags(run, p.EnvPrefix))
}
