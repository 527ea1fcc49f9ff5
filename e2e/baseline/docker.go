package baseline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Docker launches an image by `docker run -p`.
type Docker struct {
	ref  string
	port int32
}

// StartDocker loads the image into this machine's Docker daemon. It returns nil where none answers.
func StartDocker(ctx context.Context, image v1.Image, port int32) (*Docker, error) {
	if _, err := dockerCommand(ctx, nil, "version", "--format", "{{.Server.Version}}"); err != nil {
		return nil, nil //nolint:nilerr,nilnil // a machine without Docker has no column of it
	}
	tag, err := name.NewTag("gpuaas-baseline:latest")
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	if err := tarball.Write(tag, image, &archive); err != nil {
		return nil, err
	}
	if _, err := dockerCommand(ctx, &archive, "load"); err != nil {
		return nil, err
	}
	return &Docker{ref: tag.Name(), port: port}, nil
}

// Measure returns how long `docker run` and `docker rm` of one container took.
func (d *Docker) Measure(ctx context.Context) (launch, removal time.Duration, err error) {
	var id string
	if err := timed(&launch, func() (err error) {
		id, err = dockerCommand(ctx, nil, "run", "--detach", "--publish", fmt.Sprintf("127.0.0.1::%d", d.port), d.ref)
		return err
	}); err != nil {
		return 0, 0, err
	}
	err = timed(&removal, func() error {
		_, err := dockerCommand(ctx, nil, "rm", "--force", "--volumes", id)
		return err
	})
	return launch, removal, err
}

// Close removes the image.
func (d *Docker) Close(ctx context.Context) error {
	_, err := dockerCommand(ctx, nil, "image", "rm", d.ref)
	return err
}

func dockerCommand(ctx context.Context, in io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "docker", args...)
	cmd.Stdin = in
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("docker %s: %w: %s", args[0], err, bytes.TrimSpace(exit.Stderr))
	}
	return strings.TrimSpace(string(out)), err
}
