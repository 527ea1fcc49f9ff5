package cli_test

import (
	"bytes"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/cli"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// What a hub, a node or an app's worker wrote never steers the terminal, in an error and in a stream of events either.
func TestTextsOfOthersDoNotSteerTheTerminal(t *testing.T) {
	const steering = "\x1b]0;title\x07\x1b[2Jred\u009b31m"
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/events" {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = w.Write([]byte(`data: {"type":"apps.instance.failed","data":{"reason":"\u001b[2Jred\u009b31m"}}` + "\n\n"))
			return
		}
		refuse(w, r, http.StatusConflict, "in_use", steering, client.ProblemField{Pointer: "/x", Reason: steering})
	}))
	t.Cleanup(server.Close)
	dir := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca.pem"), ca, 0o600))
	environment := map[string]string{
		"GPUAAS_URL": server.URL, "GPUAAS_CA_FILE": filepath.Join(dir, "ca.pem"), "GPUAAS_TOKEN": "t",
		"GPUAAS_PROJECT": projectID,
	}
	run := func(args ...string) (stdout, stderr string) {
		var out, errs bytes.Buffer
		cli.Main(t.Context(), cli.Env{
			Stdin: &bytes.Buffer{}, Stdout: &out, Stderr: &errs,
			Getenv: func(name string) string { return environment[name] },
		}, args)
		return out.String(), errs.String()
	}
	_, stderr := run("instances", "get", instanceID)
	require.Contains(t, stderr, "red")
	stdout, _ := run("events")
	require.Contains(t, stdout, "red")
	require.NotRegexp(t, `[^\P{Cc}\n]`, stderr+stdout)
}
