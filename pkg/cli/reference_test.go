package cli

import (
	"testing"

	"github.com/gpuaas/gpuaas/docs/reference"
)

func TestReferenceOfCommandsAndFlags(t *testing.T) {
	a := &app{env: Env{Getenv: func(string) string { return "" }}}
	reference.Check(t, "cli.md", "gpuaas", reference.Commands(a.root()))
}
