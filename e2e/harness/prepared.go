package harness

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// preparedHub is a hub that was initialised and started once. A copy of it saves each test the seconds that
// passphrases, a new database cluster and all migrations take.
type preparedHub struct {
	dir         string
	fingerprint string
}

// fingerprintFile is in a kept hub's directory, beside data/ and keys/.
const fingerprintFile = "fingerprint"

// prepareHub returns the hub that other packages' tests have kept today, or makes and keeps one.
//
//nolint:gochecknoglobals // one for the tests of the process
var prepareHub = sync.OnceValues(func() (preparedHub, error) {
	root, err := sourceRoot()
	if err != nil {
		return preparedHub{}, err
	}
	name, err := keptHubName(root)
	if err != nil {
		return preparedHub{}, err
	}
	dir := filepath.Join(root, ".cache", "e2e-hub", name)
	if fingerprint, err := os.ReadFile(filepath.Join(dir, fingerprintFile)); err == nil {
		return preparedHub{dir: dir, fingerprint: string(fingerprint)}, nil
	}
	made, err := makeHub(root)
	if err != nil {
		return preparedHub{}, err
	}
	return made, made.keep(dir)
})

// keptHubName changes with the program and with the day, so that no test begins with what an older program wrote, or
// with certificates and rows that are older than a day.
func keptHubName(root string) (string, error) {
	program, err := os.Open(filepath.Join(binaries(root), "gpuaas-hub"))
	if err != nil {
		return "", err
	}
	defer func() { _ = program.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, program); err != nil {
		return "", err
	}
	return time.Now().UTC().Format("20060102-") + hex.EncodeToString(sum.Sum(nil))[:16], nil
}

// makeHub initialises a hub, starts it once and stops it.
func makeHub(root string) (preparedHub, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	defer cancel()
	c := devcluster.HubConfig{
		Bin: binaries(root), Dir: filepath.Join(preparedHubDir, "hub"), Listen: "127.0.0.1:0",
		SessionListen: "127.0.0.1:0",
	}
	h, err := devcluster.NewHub(ctx, c, TrustDomain)
	if err != nil {
		return preparedHub{}, err
	}
	return preparedHub{dir: c.Dir, fingerprint: h.RootFingerprint}, h.Stop()
}

// keptFor is how long a kept hub stays at least after it was made: longer than the tests of any package run, which may
// have begun with an older program or before midnight.
const keptFor = 2 * time.Hour

// keep copies the hub for the tests of other packages and removes what earlier programs left. The copy gets its name
// when it is whole; where another package was faster, its copy stays.
func (h preparedHub) keep(dir string) error {
	parent := filepath.Dir(dir)
	old, err := os.ReadDir(parent)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, entry := range old {
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if !strings.HasPrefix(entry.Name(), filepath.Base(dir)) && time.Since(info.ModTime()) > keptFor {
			if err := os.RemoveAll(filepath.Join(parent, entry.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return err
	}
	next := fmt.Sprintf("%s.%s", dir, rand.Text())
	defer func() { _ = os.RemoveAll(next) }()
	if out, err := exec.Command("cp", "-a", h.dir, next).CombinedOutput(); err != nil {
		return fmt.Errorf("keep the prepared hub: %w: %s", err, out)
	}
	if err := os.WriteFile(filepath.Join(next, fingerprintFile), []byte(h.fingerprint), 0o600); err != nil {
		return err
	}
	if err := os.Rename(next, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// initHub makes a hub's directories, as `gpuaas-hub init` and a first start leave them. Programs of another version
// initialise their own.
func (w *Testbed) initHub(c devcluster.HubConfig) (fingerprint string) {
	w.T.Helper()
	if c.Bin != Binaries(w.T) {
		fingerprint, err := devcluster.InitHub(w.Ctx, c, TrustDomain)
		require.NoError(w.T, err)
		return fingerprint
	}
	made, err := prepareHub()
	require.NoError(w.T, err)
	out, err := exec.CommandContext(w.Ctx, "cp", "-a", made.dir+"/data", made.dir+"/keys", c.Dir).CombinedOutput()
	require.NoError(w.T, err, "%s", out)
	return made.fingerprint
}
