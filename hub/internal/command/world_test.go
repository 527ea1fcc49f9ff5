package command_test

import (
	"log/slog"
	"testing"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
)

// world adds what only the tests of commands need.
type world struct {
	*commandtest.World
}

func newWorld(t *testing.T) *world { return &world{commandtest.New(t)} }

func (w *world) passes() periodic.Passes {
	return periodic.Passes{DB: w.DB, Log: slog.New(slog.DiscardHandler)}
}
