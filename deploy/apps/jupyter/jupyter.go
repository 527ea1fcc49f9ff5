// Package jupyter builds the image of a real Jupyter server from Debian's packages, and holds its manifest template. It
// ships nothing: its builder signs and pushes with pkg/appkit.
package jupyter

import (
	"context"
	"crypto/sha256"
	_ "embed" // script and template belong to the image
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/gpuaas/gpuaas/pkg/appkit"
)

// Port is the one that Jupyter listens on in its container.
const Port = 8888

//go:embed rootfs.sh
var script []byte

//go:embed manifest.yaml
var template []byte

// Template returns the manifest template; appkit.FillTemplate wants image and version.
func Template() []byte { return template }

// HashPassword returns the value of the parameter password_hash for a long random password. salt is at least 12 hex
// digits. For a password that a person could remember use notebook.auth.passwd(), which takes Argon2.
func HashPassword(password, salt string) string {
	sum := sha256.Sum256([]byte(password + salt))
	return "sha256:" + salt + ":" + hex.EncodeToString(sum[:])
}

// Build makes the image. It takes about a minute the first time and needs root and mmdebstrap; the layer is kept in
// cacheDir under the digest of the script, where the next build finds it.
func Build(ctx context.Context, cacheDir string, progress io.Writer) (v1.Image, error) {
	sum := sha256.Sum256(script)
	dir := filepath.Join(cacheDir, "jupyter-"+hex.EncodeToString(sum[:6]))
	layer := filepath.Join(dir, "layer.tar.gz")
	if _, err := os.Stat(layer); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("image cache: %w", err)
		}
		if err := makeLayer(ctx, dir, layer, progress); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, fmt.Errorf("image cache: %w", err)
	}
	return appkit.ImageFromLayer(layer, appkit.ImageConfig{
		Entrypoint: []string{"/usr/bin/jupyter-notebook"}, User: "1000:1000", WorkingDir: "/home/jupyter",
		Env:    []string{"HOME=/home/jupyter", "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"},
		Labels: map[string]string{"org.opencontainers.image.title": "Jupyter"},
	})
}

func makeLayer(ctx context.Context, dir, layer string, progress io.Writer) error {
	work, err := os.MkdirTemp(dir, ".build-*")
	if err != nil {
		return fmt.Errorf("image cache: %w", err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	rootfs := filepath.Join(work, "rootfs.tar")
	run := filepath.Join(work, "rootfs.sh")
	if err := os.WriteFile(run, script, 0o600); err != nil {
		return fmt.Errorf("image cache: %w", err)
	}
	build := exec.CommandContext(ctx, "bash", run, rootfs)
	build.Stdout, build.Stderr = progress, progress
	// mmdebstrap unpacks below TMPDIR; here it is removed with the rest when the build is interrupted.
	build.Env = append(os.Environ(), "TMPDIR="+work)
	if err := build.Run(); err != nil {
		return fmt.Errorf("build the root file system (needs root, mmdebstrap and a Debian mirror): %w", err)
	}
	return appkit.CompressLayer(rootfs, layer)
}
