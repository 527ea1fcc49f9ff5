package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/appkit"
)

// app is something that the demo ships.
type app struct {
	Release         scenario.Release
	Description     string
	Parameters      map[string]any
	AllocationCores int32
	AllocationMiB   int64
	// ProbePath answers 200 when the app is up.
	ProbePath string
}

func loadApp(ctx context.Context, c *config, name string) (app, error) {
	switch name {
	case "demo":
		return demoApp(ctx, c)
	case "jupyter":
		return jupyterApp(ctx, c)
	}
	return app{}, fmt.Errorf("there is no app %q; demo and jupyter are there", name)
}

func demoApp(ctx context.Context, c *config) (app, error) {
	binary := filepath.Join(c.Dir, "app", "demo")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binary, "./deploy/demo/app")
	build.Dir, build.Env = c.Source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return app{}, fmt.Errorf("build the app: %w: %s", err, out)
	}
	image, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Source: binary, Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	if err != nil {
		return app{}, err
	}
	template, err := os.ReadFile(filepath.Join(c.Source, "deploy/demo/app/manifest.yaml"))
	if err != nil {
		return app{}, err
	}
	return app{
		Release:     scenario.Release{AppSlug: "hello", Version: "1.0.0", Image: image, Template: template},
		Description: "one static program, 1 layer", AllocationCores: 1, AllocationMiB: 512,
		ProbePath: "/",
	}, nil
}
