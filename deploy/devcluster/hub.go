package devcluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Hub is a hub with its private PostgreSQL.
type Hub struct {
	*Process
	Config HubConfig
	Ready  HubReady
	// RootFingerprint is what a node compares the trust bundle with.
	RootFingerprint string
}

// HubConfig says where a hub lives. Ports may be 0.
type HubConfig struct {
	Bin string
	// Dir holds data/, keys/ and logs/; a private PostgreSQL cannot work below /root.
	Dir              string
	Listen           string
	SessionListen    string
	AdvertiseAPI     string
	AdvertiseSession string
	NetNS            string
	ExtraArgs        []string
	Env              []string
}

// HubReady is the line that gpuaas-hub prints when it serves.
type HubReady struct {
	Ready       bool   `json:"ready"`
	APIURL      string `json:"api_url"`
	SessionAddr string `json:"session_addr"`
	CAFile      string `json:"ca_file"`
	TokenFile   string `json:"token_file"`
}

// DataDir is the hub's data directory.
func (c HubConfig) DataDir() string { return filepath.Join(c.Dir, "data") }

// KeyDir holds the offline keys.
func (c HubConfig) KeyDir() string { return filepath.Join(c.Dir, "keys") }

// PassphraseFile opens the offline keys.
func (c HubConfig) PassphraseFile() string { return filepath.Join(c.Dir, "keys", "passphrase") }

func (c HubConfig) binary() string { return filepath.Join(c.Bin, "gpuaas-hub") }

// InitHub runs `gpuaas-hub init`, writes the passphrase that init generates to PassphraseFile, and returns the root
// fingerprint.
func InitHub(ctx context.Context, c HubConfig, trustDomain string) (string, error) {
	// 0711: the private PostgreSQL runs as a user of its own, who passes through.
	if err := os.MkdirAll(c.Dir, 0o711); err != nil {
		return "", err
	}
	if err := os.MkdirAll(c.KeyDir(), 0o700); err != nil {
		return "", err
	}
	out, err := run(ctx, c.binary(), "init", "--data-dir", c.DataDir(), "--key-dir", c.KeyDir(),
		"--generate-passphrase", "--trust-domain", trustDomain, "-o", "json")
	if err != nil {
		return "", err
	}
	var printed struct {
		RootFingerprint string `json:"root_fingerprint"`
		Passphrase      string `json:"passphrase"`
	}
	if err := json.Unmarshal(out, &printed); err != nil {
		return "", fmt.Errorf("gpuaas-hub init printed %d bytes: %w", len(out), err)
	}
	return printed.RootFingerprint, os.WriteFile(c.PassphraseFile(), []byte(printed.Passphrase), 0o600)
}

// StartHub runs `gpuaas-hub serve` and waits until it serves.
func StartHub(ctx context.Context, c HubConfig) (*Hub, error) {
	args := []string{"serve", "--data-dir", c.DataDir(), "--listen", c.Listen, "--session-listen", c.SessionListen}
	if c.AdvertiseAPI != "" {
		args = append(args, "--advertise-api", c.AdvertiseAPI)
	}
	if c.AdvertiseSession != "" {
		args = append(args, "--advertise-session", c.AdvertiseSession)
	}
	h := &Hub{Config: c}
	var err error
	h.Process, err = start(ctx, command{
		name: "hub", path: c.binary(), args: append(args, c.ExtraArgs...), env: c.Env, netns: c.NetNS,
		logDir: filepath.Join(c.Dir, "logs"), ready: &h.Ready,
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// NewHub initialises a hub and starts it.
func NewHub(ctx context.Context, c HubConfig, trustDomain string) (*Hub, error) {
	fingerprint, err := InitHub(ctx, c, trustDomain)
	if err != nil {
		return nil, err
	}
	h, err := StartHub(ctx, c)
	if err != nil {
		return nil, err
	}
	h.RootFingerprint = fingerprint
	return h, nil
}

// Restart starts a hub that has ended, with its configuration and on the ports that it had.
func (h *Hub) Restart(ctx context.Context) error {
	if strings.HasSuffix(h.Config.Listen, ":0") {
		h.Config.Listen = strings.TrimPrefix(h.Ready.APIURL, "https://")
	}
	if strings.HasSuffix(h.Config.SessionListen, ":0") {
		h.Config.SessionListen = h.Ready.SessionAddr
	}
	again, err := StartHub(ctx, h.Config)
	if err == nil {
		h.Process, h.Ready = again.Process, again.Ready
	}
	return err
}

// DatabaseURL leads to the hub's private PostgreSQL, which lets root in through its socket.
func (c HubConfig) DatabaseURL() string {
	u := url.URL{
		Scheme: "postgres", User: url.User("gpuaas"), Path: "/gpuaas",
		RawQuery: url.Values{"host": {filepath.Join(c.DataDir(), "postgres", "run")}}.Encode(),
	}
	return u.String()
}

// Delegate lets the publisher whose public key is in the file sign for the org's repositories.
func Delegate(ctx context.Context, c HubConfig, publicKeyFile, orgSlug, prefix string) ([]byte, error) {
	return run(ctx, c.binary(), "trust", "delegate", "--key-dir", c.KeyDir(), "--passphrase-file", c.PassphraseFile(),
		"--publisher", publicKeyFile, "--org", orgSlug, "--prefix", prefix)
}

func run(ctx context.Context, path string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", filepath.Base(path), args[0], err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// Backup runs `gpuaas-hub backup`; the hub may run. The passphrase is that of the offline keys.
func Backup(ctx context.Context, c HubConfig, file string) error {
	_, err := run(ctx, c.binary(), "backup", file, "--data-dir", c.DataDir(), "--passphrase-file", c.PassphraseFile())
	return err
}

// Restore runs `gpuaas-hub restore` into the hub's data directory, which must be empty or absent.
func Restore(ctx context.Context, c HubConfig, file string, more ...string) error {
	_, err := run(ctx, c.binary(), append([]string{
		"restore", file, "--data-dir", c.DataDir(), "--key-dir", c.KeyDir(),
		"--passphrase-file", c.PassphraseFile(), "--root-passphrase-file", c.PassphraseFile(),
	}, more...)...)
	return err
}

// AdminToken runs `gpuaas-hub admin-token`.
func AdminToken(ctx context.Context, c HubConfig) error {
	_, err := run(ctx, c.binary(), "admin-token", "--data-dir", c.DataDir())
	return err
}

// ExportUsage runs `gpuaas-hub usage export` for a node and returns its lines.
func ExportUsage(ctx context.Context, c HubConfig, nodeID string) ([]byte, error) {
	return run(ctx, c.binary(), "usage", "export", "--data-dir", c.DataDir(), "--node", nodeID)
}

// Destroy removes all of a killed hub's data, as a lost disk would, once its database has ended.
func Destroy(ctx context.Context, c HubConfig) error {
	pid, err := os.ReadFile(filepath.Join(c.DataDir(), "postgres", "data", "postmaster.pid"))
	if err == nil {
		first, _, _ := strings.Cut(string(pid), "\n")
		if err := gone(ctx, filepath.Join("/proc", first)); err != nil {
			return err
		}
	}
	return os.RemoveAll(c.DataDir())
}

// gone waits until a path is no more.
func gone(ctx context.Context, path string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(path); os.IsNotExist(err) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is still there: %w", path, ctx.Err())
		case <-tick.C:
		}
	}
}
