package access_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// slowBytes are more than all buffers between an app and its reader hold; fastBytes pass beside them.
	slowBytes = 4 << 30
	fastBytes = 16 << 20
	// heldBytes is what the buffers may hold of one stream: those of sockets, a window and pieces.
	heldBytes = 64 << 20
)

// oneConnection is a client whose every request is a connection of its own, and so a stream of its own.
func oneConnection() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

func request(ctx context.Context, t *testing.T, method, url string, body []byte) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	require.NoError(t, err)
	res, err := oneConnection().Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { _ = res.Body.Close() })
	require.Equal(t, http.StatusOK, res.StatusCode)
	return res
}

// ends are the audit rows of the ended streams of an instance, newest first.
func ends(w *harness.Testbed, admin *harness.Shell, id string) []client.AuditRow {
	w.T.Helper()
	return harness.AsJSON[harness.Items[client.AuditRow]](admin, "audit", "list", "--resource", id, "--action",
		"apps.instance.disconnect").Items
}

func TestAPortIsForwardedForAsLongAsTheRightLasts(t *testing.T) {
	w := harness.NewPlatform(t)
	i := w.Launch("app")
	admin := w.AdminShell()
	user := w.UserShell(admin)
	url := user.Forward("app", "--project", "main", "http")

	// Bytes arrive both ways.
	up := make([]byte, fastBytes)
	_, _ = rand.Read(up)
	sum := sha256.Sum256(up)
	answer, err := io.ReadAll(request(w.Ctx, t, "POST", url+"/digest", up).Body)
	require.NoError(t, err)
	require.Equal(t, hex.EncodeToString(sum[:]), strings.TrimSpace(string(answer)))

	// A reader that has stopped reading holds up nobody, and little is held for it.
	awaitEnds := func(want int) {
		t.Helper()
		w.Eventually("every stream is over", func() error { return harness.Pending(nil, len(ends(w, admin, i.ID)) == want) })
	}
	awaitEnds(1)
	slow := request(w.Ctx, t, "GET", fmt.Sprint(url, "/send?bytes=", slowBytes), nil)
	for range 3 {
		n, err := io.Copy(io.Discard, request(w.Ctx, t, "GET", fmt.Sprint(url, "/send?bytes=", fastBytes), nil).Body)
		require.NoError(t, err)
		require.EqualValues(t, fastBytes, n)
	}
	require.NoError(t, slow.Body.Close())
	awaitEnds(1 + 4)
	for _, row := range ends(w, admin, i.ID) {
		after := row.After.(map[string]any)
		require.Equal(t, "http", after["port"])
		require.Less(t, after["bytes_from_app"], float64(heldBytes))
	}

	requireForwardRefused(w, admin, i)
	requireEndWithAgent(w, user, i, url)

	// The right ends while a stream is open.
	open := request(w.Ctx, t, "GET", fmt.Sprint(url, "/send?bytes=", slowBytes), nil)
	admin.MustRun("tokens", "revoke", "--all", "--user", harness.UserEmail)
	_, err = io.Copy(io.Discard, open.Body)
	require.Error(t, err, "the stream ends before its data")
	user.Fails(3, "", "port-forward", "app", "--project", "main", "http")
	w.Decommission(i)
}

// requireForwardRefused: another tenant learns nothing, and what is not there is said clearly.
func requireForwardRefused(w *harness.Testbed, admin *harness.Shell, i client.AppInstance) {
	w.T.Helper()
	admin.Fails(6, "it has http", "port-forward", i.ID, "--project", "main", "ssh")
	admin.Fails(2, "LOCAL", "port-forward", i.ID, "--project", "main", "x:http")
	first := *w
	w.NewTenant("globex")
	foreign := w.Operator
	*w = first
	_, err := foreign.ForwardPort(w.Ctx, w.Tenant.Project.ID, i.ID, client.AppInstancePortForward{Port: "http"})
	problem := &client.Problem{}
	require.ErrorAs(w.T, err, &problem)
	require.EqualValues(w.T, http.StatusNotFound, problem.Status)
}

// requireEndWithAgent: streams end with the agent, the app does not, and new streams lead to it.
func requireEndWithAgent(w *harness.Testbed, user *harness.Shell, i client.AppInstance, url string) {
	t := w.T
	t.Helper()
	pid := w.PidOf(i)
	open := request(w.Ctx, t, "GET", fmt.Sprint(url, "/send?bytes=", slowBytes), nil)
	require.NoError(t, w.Agent.Kill9())
	_, err := io.Copy(io.Discard, open.Body)
	require.Error(t, err, "the stream ends before its data")
	_, err = w.Operator.ForwardPort(w.Ctx, w.Tenant.Project.ID, i.ID, client.AppInstancePortForward{Port: "http"})
	require.ErrorContains(t, err, "node_unreachable")
	w.RestartAgent(w.Agent)
	require.Equal(t, pid, w.PidOf(i))
	w.Eventually("the port is reached again", func() error {
		s, err := w.Operator.ForwardPort(w.Ctx, w.Tenant.Project.ID, i.ID, client.AppInstancePortForward{Port: "http"})
		if err == nil {
			s.Abort()
		}
		return err
	})
}
