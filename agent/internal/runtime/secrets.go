package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// secretsMount is where a container reads its secret parameters.
	secretsMount = "/run/gpuaas-parameters" //nolint:gosec // a path
	// secretsBytes bounds the memory that the secrets of one container may take.
	secretsBytes = 4 << 20
	// newSuffix cannot end the name of a secret parameter.
	newSuffix    = "~"
	secretsFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
)

// writeSecrets makes a read-only file system in memory with a file for each secret. Removal of the container unmounts
// it.
func writeSecrets(dir string, secrets map[string][]byte) error {
	if len(secrets) == 0 {
		return nil
	}
	if err := makeDir(dir, 0o755); err != nil {
		return err
	}
	if err := mountSecrets(dir); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	return replaceSecrets(dir, secrets)
}

// replaceSecrets replaces each file by a rename, so that the app reads the old content or the new one, whole.
func replaceSecrets(dir string, secrets map[string][]byte) error {
	for name, secret := range secrets {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return badSpec("A secret parameter has a name that cannot be a file's.")
		}
		path := filepath.Join(dir, name)
		if err := writeFile(path+newSuffix, secret, 0o444); err != nil {
			return err
		}
		failpoint.Hit("agent/secrets/staged")
		if err := os.Rename(path+newSuffix, path); err != nil {
			return directoryFault(path, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return directoryFault(dir, err)
	}
	for _, e := range entries {
		if _, kept := secrets[e.Name()]; !kept {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return directoryFault(dir, err)
			}
		}
	}
	return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY|secretsFlags, "")
}

// DeliverSecrets replaces the secret parameters of a running container, and sends the signal that tells of it.
func (r *Runtime) DeliverSecrets(ctx context.Context, id string, secrets map[string][]byte, change *protocol.Secrets,
) error {
	dir := r.files(id).secretsDir
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|secretsFlags, ""); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	if err := replaceSecrets(dir, secrets); err != nil {
		return err
	}
	failpoint.Hit("agent/secrets/replaced")
	return r.tell(ctx, id, change.GetOnChange(), change.GetSignal())
}

// mountSecrets keeps the secrets off the swap where the kernel can do that (Linux 6.4).
func mountSecrets(dir string) error {
	options := fmt.Sprintf("mode=755,size=%d", secretsBytes)
	err := unix.Mount("tmpfs", dir, "tmpfs", secretsFlags, options+",noswap")
	if errors.Is(err, unix.EINVAL) {
		err = unix.Mount("tmpfs", dir, "tmpfs", secretsFlags, options)
	}
	return err
}
