package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// hubProcess is a gpuaas-hub in a process of its own.
type hubProcess struct {
	cmd   *exec.Cmd
	url   string
	roots *x509.CertPool
	log   string
	// printed is its standard output, which is read to the end.
	printed chan struct{}
}

// startHubProcess builds gpuaas-hub and starts it on a database that a house has made; it ends with the test.
func startHubProcess(t *testing.T, databaseURL string) *hubProcess {
	t.Helper()
	dir := t.TempDir()
	program, data := filepath.Join(dir, "gpuaas-hub"), filepath.Join(dir, "data")
	run := func(where, name string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = where
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	run(filepath.Join("..", "..", ".."), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program,
		"./hub/cmd/gpuaas-hub")
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	run(dir, program, "init", "--data-dir", data, "--key-dir", filepath.Join(dir, "keys"),
		"--generate-passphrase", "--trust-domain", "gpuaas.test")
	write("data/kek.key", base64.StdEncoding.EncodeToString([]byte(houseKey))+"\n")

	h := &hubProcess{log: filepath.Join(dir, "log"), printed: make(chan struct{}), roots: x509.NewCertPool()}
	log, err := os.Create(h.log)
	require.NoError(t, err)
	h.cmd = exec.CommandContext(context.WithoutCancel(t.Context()), program, "serve", "--data-dir", data,
		"--database-url-file", write("url", databaseURL), "--listen", "127.0.0.1:0", "--session-listen", "127.0.0.1:0")
	h.cmd.Stderr = log
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := h.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, h.cmd.Start())
	require.NoError(t, log.Close())
	t.Cleanup(func() { _ = h.cmd.Process.Kill(); _ = h.cmd.Wait() })
	lines := bufio.NewReader(out)
	line, err := lines.ReadBytes('\n')
	require.NoError(t, err, "%s", h.logged(t))
	var ready struct {
		URL    string `json:"api_url"`
		CAFile string `json:"ca_file"`
	}
	require.NoError(t, json.Unmarshal(line, &ready), "%s", line)
	go func() {
		defer close(h.printed)
		_, _ = io.Copy(io.Discard, lines)
	}()
	ca, err := os.ReadFile(ready.CAFile)
	require.NoError(t, err)
	require.True(t, h.roots.AppendCertsFromPEM(ca))
	h.url = ready.URL
	return h
}

// client calls the hub from an address of its own, as each customer has one.
func (h *hubProcess) client(n int) *http.Client {
	from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, byte(n+1), 1)}}
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext:     from.DialContext,
		TLSClientConfig: &tls.Config{RootCAs: h.roots, MinVersion: tls.VersionTLS13},
	}}
}

func (h *hubProcess) get(t *testing.T, token, path string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, h.url+basePath+path, http.NoBody)
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	client := h.client(0)
	defer client.CloseIdleConnections()
	res, err := client.Do(r)
	require.NoError(t, err)
	text, err := shown(res)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, res.StatusCode, "%s", text)
	return text
}

var resident = regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB$`)

// residentKiB is the memory that the process has at present.
func (h *hubProcess) residentKiB(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.cmd.Process.Pid))
	require.NoError(t, err)
	found := resident.FindSubmatch(status)
	require.NotNil(t, found, "the hub has ended: %s", h.logged(t))
	kib, err := strconv.Atoi(string(found[1]))
	require.NoError(t, err)
	return kib
}

// end stops the hub, as an operator does.
func (h *hubProcess) end(t *testing.T) {
	t.Helper()
	require.NoError(t, h.cmd.Process.Signal(syscall.SIGTERM))
	<-h.printed
	err := h.cmd.Wait()
	var exit *exec.ExitError
	require.NotErrorAs(t, err, &exit, "%s", h.logged(t))
}

// logged is the end of the hub's log.
func (h *hubProcess) logged(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(h.log)
	require.NoError(t, err)
	return text[max(0, len(text)-4<<10):]
}

// panics are the lines of the log that tell of one, of a handler's or of the program's.
func (h *hubProcess) panics(t *testing.T) []string {
	t.Helper()
	log, err := os.ReadFile(h.log)
	require.NoError(t, err)
	var found []string
	for line := range bytes.Lines(log) {
		for _, sign := range []string{`"msg":"panic"`, "panic: ", "fatal error: ", "goroutine "} {
			if bytes.Contains(line, []byte(sign)) {
				found = append(found, string(line))
			}
		}
	}
	require.NotEmpty(t, log)
	return found
}
