package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuaas/gpuaas/deploy/apps/jupyter"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
)

// jupyterApp builds a real Jupyter server. Its password is made here and kept in a file beside the demo's other
// secrets.
func jupyterApp(ctx context.Context, c *config) (app, error) {
	image, err := jupyter.Build(ctx, filepath.Join(c.Source, ".cache"), os.Stderr)
	if err != nil {
		return app{}, err
	}
	password, salt := rand.Text(), make([]byte, 8)
	if _, err := rand.Read(salt); err != nil {
		return app{}, err
	}
	file := filepath.Join(c.Dir, "jupyter-password")
	if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
		return app{}, err
	}
	return app{
		Release:     scenario.Release{AppSlug: "jupyter", Version: "1.0.0", Image: image, Template: jupyter.Template()},
		Description: fmt.Sprintf("Jupyter from Debian's packages; its password is in %s", file),
		Parameters:  map[string]any{"password_hash": jupyter.HashPassword(password, hex.EncodeToString(salt))},
		// Room for two: the second launch stands beside the first.
		AllocationCores: 2, AllocationMiB: 2048, ProbePath: "/api",
	}, nil
}
