package e2e_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/apps/jupyter"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
)

// template is a hub that was initialised and started once: what most tests want to find. Copying it saves each of them
// the seconds that passphrases, a new database cluster and all migrations take.
type template struct {
	dir         string
	fingerprint string
}

// templateDir is outside every test's photograph: it is made before the first and goes after the last.
var templateDir string

// TestMain runs the tests in a sandbox: what others do on the machine does not disturb them, and nothing of theirs gets
// out.
func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	root, err := filepath.Abs("..")
	if err != nil {
		return 1, err
	}
	keep, err := goDirs()
	if err != nil {
		return 1, err
	}
	return sandbox.Run(sandbox.Config{
		Base: filepath.Join(root, ".cache"), Keep: append(keep, root),
		Prepare: func() error { return prepare(root) },
	},
		func() int {
			// The tests share a network namespace, in which the first agent turns forwarding on and the last one off, and
			// isolates the links that it finds. To a machine that forwards already agents change nothing, and tests do not feel
			// each other's.
			if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			code, err := withTemplateDir(m)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			return code
		})
}

// goDirs are the directories that the Go tool needs: some tests compile what they run.
func goDirs() ([]string, error) {
	out, err := exec.Command("go", "env", "GOROOT", "GOCACHE", "GOMODCACHE").Output()
	if err != nil {
		return nil, fmt.Errorf("ask for the Go tool's directories: %w", err)
	}
	return strings.Fields(string(out)), nil
}

// prepare fetches and builds what needs the network, which the sandbox does not have. What is there already is not made
// again.
func prepare(root string) error {
	ctx, cancel := context.WithTimeout(context.Background(), prepareLimit)
	defer cancel()
	if _, err := jupyter.Build(ctx, filepath.Join(root, ".cache"), os.Stderr); err != nil {
		return err
	}
	if err := buildRelease(root); err != nil {
		return err
	}
	return installBrowser(ctx, filepath.Join(root, "e2e", "browser"), filepath.Join(root, ".cache", "npm"))
}

// prepareLimit bounds the preparation: an image from Debian's packages, an earlier release and npm's packages.
const prepareLimit = 10 * time.Minute

// installBrowser installs the packages that drive the browser, unless the lock file's own are there.
func installBrowser(ctx context.Context, dir, cache string) error {
	locked, err := os.Stat(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		return err
	}
	installed, err := os.Stat(filepath.Join(dir, "node_modules", ".package-lock.json"))
	if err == nil && !installed.ModTime().Before(locked.ModTime()) {
		return nil
	}
	install := exec.CommandContext(ctx, "npm", "ci", "--no-audit", "--no-fund", "--silent", "--cache", cache)
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w: %s", err, out)
	}
	return nil
}

// withTemplateDir runs the tests and compares the whole sandbox with how it was before them.
func withTemplateDir(m *testing.M) (code int, err error) {
	if !sandbox.Inside() {
		return m.Run(), nil
	}
	// A containerd that is killed while it starts a shim leaves the socket that it made for it; a shim that is left is
	// found as a process.
	before, err := leakcheck.Take(leakcheck.Scope{IgnoreFiles: append(sandbox.Kept(), "/run/containerd/s/")})
	if err != nil {
		return 1, err
	}
	defer func() {
		removeIdlePortmap()
		if left := leakcheck.Left(before); len(left) > 0 {
			err = errors.Join(err, fmt.Errorf("the tests left %d things behind:\n  %s", len(left), strings.Join(left, "\n  ")))
		}
	}()
	templateDir = fmt.Sprintf("/tmp/gpuaas-e2e-%d-template", os.Getpid())
	if err := os.Mkdir(templateDir, 0o711); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(templateDir)) }()
	return m.Run(), nil
}

// removeIdlePortmap removes the chains of CNI's portmap plugin, which only the floor of the demos uses. Each floor
// removes the chains when no other is in them; two that end at once both leave them. A chain of another program, or one
// with a published port in it, stays and is noticed.
func removeIdlePortmap() {
	nat := func(args ...string) string {
		out, _ := exec.Command("iptables", append([]string{"-w", "-t", "nat"}, args...)...).Output()
		return string(out)
	}
	if strings.Count(nat("-S", "CNI-HOSTPORT-DNAT"), "\n") != 1 {
		return
	}
	nat("-D", "PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CNI-HOSTPORT-DNAT")
	nat("-D", "OUTPUT", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CNI-HOSTPORT-DNAT")
	nat("-D", "POSTROUTING", "-m", "comment", "--comment", "CNI portfwd requiring masquerade", "-j", "CNI-HOSTPORT-MASQ")
	for _, chain := range []string{"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"} {
		nat("-F", chain)
		nat("-X", chain)
	}
}

// hubTemplate makes the template when the first test asks for it.
var hubTemplate = sync.OnceValues(func() (template, error) {
	bin, err := filepath.Abs("../bin")
	if err != nil {
		return template{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	defer cancel()
	c := devcluster.HubConfig{
		Bin: bin, Dir: filepath.Join(templateDir, "hub"), Listen: "127.0.0.1:0",
		SessionListen: "127.0.0.1:0",
	}
	fingerprint, err := devcluster.InitHub(ctx, c, rand.Text(), trustDomain)
	if err != nil {
		return template{}, err
	}
	h, err := devcluster.StartHub(ctx, c)
	if err != nil {
		return template{}, err
	}
	return template{dir: c.Dir, fingerprint: fingerprint}, h.Stop()
})

// initHub gives a hub of today its directories, as `gpuaas-hub init` and a first start have left them.
func (w *world) initHub(c devcluster.HubConfig) (fingerprint string) {
	w.t.Helper()
	if c.Bin != binaries(w.t) {
		fingerprint, err := devcluster.InitHub(w.ctx, c, rand.Text(), trustDomain)
		require.NoError(w.t, err)
		return fingerprint
	}
	made, err := hubTemplate()
	require.NoError(w.t, err)
	out, err := exec.CommandContext(w.ctx, "cp", "-a", made.dir+"/data", made.dir+"/keys", c.Dir).CombinedOutput()
	require.NoError(w.t, err, "%s", out)
	return made.fingerprint
}
