package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
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
	case "vllm":
		return vllmApp(ctx, c)
	}
	return app{}, fmt.Errorf("there is no app %q; demo, jupyter and vllm are there", name)
}

func demoApp(ctx context.Context, c *config) (app, error) {
	binary := filepath.Join(c.Dir, "app", "demo")
	if err := devcluster.Build(ctx, c.Source, devcluster.DemoApp, binary); err != nil {
		return app{}, err
	}
	image, err := devcluster.DemoImage(binary)
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
