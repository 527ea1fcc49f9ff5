// Package containerdtest runs a real containerd for one test and removes it at the test's end, also after the test
// killed things at work. It knows nothing of what runs inside.
package containerdtest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

// namePrefix is followed by the id of the owning process, so that a later run can clean up after one that was killed.
const namePrefix = "ctrd-"

// Daemon is one containerd.
type Daemon struct {
	*devcluster.Containerd
}

// Start runs a containerd for this test and cleans up at its end.
func Start(t testing.TB) *Daemon {
	t.Helper()
	skip.Root(t, "containers")
	sweep(t)
	//nolint:usetesting // short, and swept by later runs
	dir, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", namePrefix, os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	c, err := devcluster.NewContainerd(dir)
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{c}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("containerd's log:\n%s", d.LogTail())
		}
		if err := d.Destroy(); err != nil {
			t.Errorf("clean up containerd in %s: %v", dir, err)
		}
	})
	if err := d.Start(t.Context()); err != nil {
		t.Fatalf("start containerd: %v\n%s", err, d.LogTail())
	}
	return d
}

// sweep cleans up after test processes that were killed before they could.
func sweep(t testing.TB) {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), namePrefix+"*-*"))
	for _, dir := range dirs {
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(dir), namePrefix+"%d-", &pid); err != nil || pid == os.Getpid() ||
			unix.Kill(pid, 0) == nil {
			continue
		}
		if err := (&devcluster.Containerd{Dir: dir, Address: filepath.Join(dir, "s.sock")}).Destroy(); err != nil {
			t.Logf("clean up %s of an earlier run: %v", dir, err)
		}
	}
}

// DamageBlob replaces the one blob of the content store for which is holds.
func (d *Daemon) DamageBlob(t testing.TB, is func(blob []byte) bool, by func(blob []byte) []byte) {
	t.Helper()
	blobs, err := filepath.Glob(filepath.Join(d.Dir, "*", "*", "blobs", "sha256", "*"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, path := range blobs {
		blob, err := os.ReadFile(path)
		if err == nil && is(blob) {
			found++
			err = os.WriteFile(path, by(blob), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if found != 1 {
		t.Fatalf("%d blobs are what is to be damaged", found)
	}
}

// Client connects to the daemon; the connection ends with the test.
func (d *Daemon) Client(t testing.TB) *client.Client {
	t.Helper()
	c, err := client.New(d.Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
