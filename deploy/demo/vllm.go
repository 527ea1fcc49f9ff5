package main

import (
	"context"
	"path/filepath"

	vllmopenai "github.com/gpuaas/gpuaas/deploy/apps/vllm-openai"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
)

// vllmApp builds the stand-in for vLLM's server, and its sidecar.
func vllmApp(ctx context.Context, c *config) (app, error) {
	images, err := vllmopenai.Images(filepath.Join(c.Dir, "app"), func(program, binary string) error {
		return devcluster.Build(ctx, c.Source, program, binary)
	})
	if err != nil {
		return app{}, err
	}
	return app{
		Release: scenario.Release{
			AppSlug: "vllm-openai", Version: "1.0.0", Images: images, Template: vllmopenai.Template(),
		},
		Description: "a stand-in for vLLM's server, which computes nothing, and a sidecar",
		Parameters:  map[string]any{"model": "demo/stand-in", "max_model_len": 2048},
		// Room for two: the second launch stands beside the first.
		AllocationCores: 2, AllocationMiB: 1024, ProbePath: "/v1/models",
	}, nil
}
