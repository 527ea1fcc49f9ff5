package harness

import (
	"context"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/apps/jupyter"
)

// PrepareJupyter builds the image that JupyterImage returns, for RunTests.
func PrepareJupyter(ctx context.Context, root string) error {
	_, err := jupyter.Build(ctx, filepath.Join(root, ".cache"), os.Stderr)
	return err
}

// JupyterImage is the image of Jupyter. A package that uses it prepares it with PrepareJupyter.
func (w *Testbed) JupyterImage() v1.Image {
	w.T.Helper()
	image, err := jupyter.Build(w.Ctx, filepath.Join(Source(w.T), ".cache"), os.Stderr)
	require.NoError(w.T, err)
	return image
}
