package access_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// sshd is OpenSSH's server on loopback, which asks the node's agent for keys.
type sshd struct {
	addr string
	log  bytes.Buffer
}

// startSSHD runs sshd. It refuses an AuthorizedKeysCommand below a directory that others write to, as the testbed's
// is, so that the agent's program is copied.
func startSSHD(w *harness.Testbed) *sshd {
	w.T.Helper()
	const separation = "/run/sshd"
	if os.Mkdir(separation, 0o755) == nil {
		w.T.Cleanup(func() { require.NoError(w.T, os.Remove(separation)) })
	}
	dir, err := os.MkdirTemp("/var/lib", "gpuaas-e2e-sshd-")
	require.NoError(w.T, err)
	w.T.Cleanup(func() { require.NoError(w.T, os.RemoveAll(dir)) })
	require.NoError(w.T, os.Chmod(dir, 0o755))
	program, err := os.ReadFile(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"))
	require.NoError(w.T, err)
	agent := filepath.Join(dir, "gpuaas-agent")
	require.NoError(w.T, os.WriteFile(agent, program, 0o755))
	hostKey := filepath.Join(dir, "host_key")
	out, err := exec.CommandContext(w.Ctx, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", hostKey).CombinedOutput()
	require.NoError(w.T, err, string(out))

	s := &sshd{addr: harness.FreeAddress()}
	_, port, err := net.SplitHostPort(s.addr)
	require.NoError(w.T, err)
	config := filepath.Join(dir, "sshd_config")
	require.NoError(w.T, os.WriteFile(config, []byte(fmt.Sprintf(`ListenAddress 127.0.0.1
Port %s
HostKey %s
PidFile none
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile none
AuthorizedKeysCommand %s keys --local-socket %s %%u
AuthorizedKeysCommandUser root
`, port, hostKey, agent, w.Agent.Config.LocalSocket())), 0o600))
	cmd := exec.Command("/usr/sbin/sshd", "-D", "-e", "-f", config)
	cmd.Stderr = &s.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(w.T, cmd.Start())
	w.T.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if w.T.Failed() {
			w.T.Log(s.log.String())
		}
	})
	w.Eventually("sshd listens", func() error {
		conn, err := net.Dial("tcp", s.addr)
		if err == nil {
			err = conn.Close()
		}
		return harness.Pending(nil, err == nil)
	})
	return s
}

// login runs a command as an account with a key; it reports whether sshd let it in.
func (s *sshd) login(t *testing.T, user string, key ssh.Signer) bool {
	t.Helper()
	c, err := ssh.Dial("tcp", s.addr, &ssh.ClientConfig{
		User: user, Auth: []ssh.AuthMethod{ssh.PublicKeys(key)},
		HostKeyCallback: ssh.InsecureIgnoreHostKey(),
	})
	if err != nil {
		require.ErrorContains(t, err, "unable to authenticate")
		return false
	}
	defer func() { _ = c.Close() }()
	session, err := c.NewSession()
	require.NoError(t, err)
	out, err := session.Output("id -un")
	require.NoError(t, err)
	require.Equal(t, user+"\n", string(out))
	return true
}

// TestSSHKeysLetInWhoHoldsThem: the operators' keys and the app's are sets of their own, a real sshd asks the agent for
// them, the owner has the last word, and the hub may be away.
func TestSSHKeysLetInWhoHoldsThem(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	node := w.AgentConfig("node")
	policy := filepath.Join(w.Dir, "policy.yaml")
	owner := func(text string) {
		require.NoError(t, os.WriteFile(policy+".next", []byte(text), 0o600))
		require.NoError(t, os.Rename(policy+".next", policy))
	}
	owner("ssh_users: [root]\n")
	node.ExtraArgs = append(node.ExtraArgs, "--policy", policy)
	w.Agent = w.StartAgent(node)
	w.Allocate(w.Agent)
	s := w.AdminShell()
	server := startSSHD(w)

	operator, operatorFile := newSSHKey(w, "operator")
	app, appFile := newSSHKey(w, "app")
	set := func(args ...string) {
		t.Helper()
		s.MustRun(append([]string{"allocations", "ssh-keys", "set", w.Allocation.ID, "--project", "main"}, args...)...)
	}
	eventually := func(what string, key ssh.Signer, in bool) {
		t.Helper()
		w.Eventually(what, func() error { return harness.Pending(nil, server.login(t, "root", key) == in) })
	}
	require.False(t, server.login(t, "root", operator), "before it has a key")
	set("root=" + operatorFile)
	eventually("the operator logs in", operator, true)
	require.False(t, server.login(t, "root", app))
	set("--app", "root="+appFile)
	eventually("so does the app", app, true)
	require.True(t, server.login(t, "root", operator), "its set is another one")
	set("nobody=" + operatorFile)
	eventually("the operators' key is one of another account now", operator, false)
	require.False(t, server.login(t, "nobody", operator), "which the owner does not allow")
	set("root=" + operatorFile)
	eventually("the operator logs in again", operator, true)

	require.NoError(t, w.Hub.Kill9())
	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	require.True(t, server.login(t, "root", operator), "without the hub, after a restart")
	require.True(t, server.login(t, "root", app))
	owner("ssh_users: []\n")
	eventually("the owner allows nobody any more", operator, false)
	require.False(t, server.login(t, "root", app))
	owner("ssh_users: [root]\n")
	eventually("and allows it again", app, true)
	w.RestartHub()
	set()
	eventually("an empty set lets nobody in", operator, false)
	require.True(t, server.login(t, "root", app), "and leaves the other set as it is")
	require.NoError(t, w.Agent.Stop())
	require.False(t, server.login(t, "root", app), "an agent that does not answer lets nobody in")
	w.RestartAgent(w.Agent)
	_, err := client.Read[client.Allocation](w.Tenant.Admin.ReleaseAllocation(w.Ctx, w.Tenant.Project.ID,
		w.Allocation.ID))
	require.NoError(t, err)
	eventually("keys end with the allocation", app, false)
}

// newSSHKey makes a key, and a file with its public half as ssh-keygen writes it.
func newSSHKey(w *harness.Testbed, name string) (ssh.Signer, string) {
	w.T.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	signer, err := ssh.NewSignerFromKey(private)
	require.NoError(w.T, err)
	file := filepath.Join(w.Dir, name+".pub")
	line := bytes.TrimSpace(ssh.MarshalAuthorizedKey(signer.PublicKey()))
	require.NoError(w.T, os.WriteFile(file, append(line, []byte(" "+name+"@laptop\n")...), 0o600))
	return signer, file
}
