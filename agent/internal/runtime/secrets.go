package runtime

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	// secretsMount is where a container reads its secret parameters.
	secretsMount = "/run/gpuaas-parameters" //nolint:gosec // a path
	// secretsBytes bounds the memory that the secrets of one container may take.
	secretsBytes = 4 << 20
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
	for name, secret := range secrets {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return badSpec("A secret parameter has a name that cannot be a file's.")
		}
		if err := writeFile(filepath.Join(dir, name), secret, 0o444); err != nil {
			return err
		}
	}
	return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY|secretsFlags, "")
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
