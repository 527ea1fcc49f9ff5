package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/docs/reference"
)

func TestReferenceOfCommandsAndFlags(t *testing.T) {
	p := program()
	configured := []string{"gpuaas-hub init", "gpuaas-hub serve", "gpuaas-hub backup", "gpuaas-hub restore"}
	reference.Check(t, "cli.md", "gpuaas-hub", reference.Commands(p.Root, configured...))
	for _, name := range configured {
		c, _, err := p.Root.Find(strings.Fields(name)[1:])
		require.NoError(t, err)
		reference.Check(t, "configuration.md", name, reference.Flags(c, p.EnvPrefix))
	}
}
