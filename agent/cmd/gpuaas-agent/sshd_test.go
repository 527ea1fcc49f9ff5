package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// A key that a tenant writes into its account's authorized_keys would let it in after the end of its allocation.
func TestNoAuthorizedKeysFileCountsForTenants(t *testing.T) {
	const sshd, separation = "/usr/sbin/sshd", "/run/sshd"
	if _, err := os.Stat(sshd); err != nil {
		skip.Lacking(t, "there is no sshd: install openssh-server")
	}
	if os.Mkdir(separation, 0o755) == nil {
		t.Cleanup(func() { require.NoError(t, os.Remove(separation)) })
	}
	shipped, err := os.ReadFile("../../../systemd/sshd_config.d/gpuaas.conf")
	require.NoError(t, err)
	dir := t.TempDir()
	key, config, included := filepath.Join(dir, "key"), filepath.Join(dir, "config"), filepath.Join(dir, "gpuaas.conf")
	run := func(argv ...string) string {
		out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	require.NoError(t, os.WriteFile(config, []byte("HostKey "+key+"\nInclude "+included+"\nPermitRootLogin no\n"), 0o600))
	// The group root stands in for that of tenants: no account of this machine is in the latter.
	for files, text := range map[string]string{
		"none":                 strings.ReplaceAll(string(shipped), "Group gpuaas-tenants", "Group root"),
		".ssh/authorized_keys": string(shipped),
	} {
		require.NoError(t, os.WriteFile(included, []byte(text), 0o600))
		effective := run(sshd, "-T", "-f", config, "-C", "user=root,host=host,addr=127.0.0.1")
		require.Contains(t, effective, "authorizedkeysfile "+files)
		require.Contains(t, effective, "authorizedkeyscommand /usr/local/bin/gpuaas-agent keys %u")
		require.Contains(t, effective, "permitrootlogin no", "what follows the file counts for every account")
	}
}
