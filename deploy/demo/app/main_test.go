package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func ask(t *testing.T, a *app, method, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	a.handler().ServeHTTP(w, httptest.NewRequest(method, path, nil))
	body, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	return w.Code, strings.TrimSpace(string(body))
}

func env(values map[string]string) func(string) string {
	return func(name string) string { return values[name] }
}

func TestAppAnswersAndSaysWhoItIs(t *testing.T) {
	a, err := newApp(env(map[string]string{"GREETING": "hi"}), time.Now())
	require.NoError(t, err)
	code, body := ask(t, a, "GET", "/")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "hi", body)
	_, body = ask(t, a, "GET", "/whoami")
	require.Contains(t, body, `"uid":`)
	code, _ = ask(t, a, "GET", "/nowhere")
	require.Equal(t, http.StatusNotFound, code)
}

func TestAppIsReadyWhenItWasTold(t *testing.T) {
	now := time.Now()
	late, err := newApp(env(map[string]string{"READY_AFTER_MILLIS": "3600000"}), now)
	require.NoError(t, err)
	code, _ := ask(t, late, "GET", "/healthz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	past, err := newApp(env(map[string]string{"READY_AFTER_MILLIS": "1000"}), now.Add(-time.Hour))
	require.NoError(t, err)
	code, _ = ask(t, past, "GET", "/healthz")
	require.Equal(t, http.StatusOK, code)
	_, err = newApp(env(map[string]string{"READY_AFTER_MILLIS": "x"}), now)
	require.Error(t, err)
}

func TestAppLeavesWithTheCodeThatWasAskedFor(t *testing.T) {
	a, err := newApp(env(nil), time.Now())
	require.NoError(t, err)
	for _, bad := range []string{"/exit", "/exit?code=x", "/exit?code=300"} {
		code, _ := ask(t, a, "POST", bad)
		require.Equal(t, http.StatusBadRequest, code)
	}
	code, _ := ask(t, a, "POST", "/exit?code=3")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, 3, <-a.exit)
	for _, bad := range []string{"/slow?for=x", "/slow?for=-1s"} {
		code, _ := ask(t, a, "GET", bad)
		require.Equal(t, http.StatusBadRequest, code)
	}
	code, body := ask(t, a, "POST", "/allocate?mib=2")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "2 MiB held", body)
	_, body = ask(t, a, "GET", "/send?bytes=100000")
	require.Len(t, body, 100000)
	code, _ = ask(t, a, "GET", "/send?bytes=-1")
	require.Equal(t, http.StatusBadRequest, code)
	_, body = ask(t, a, "POST", "/digest")
	require.Equal(t, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", body, "of nothing")
}

func TestAppWritesToItsLogAtARate(t *testing.T) {
	stdout := os.Stdout
	t.Cleanup(func() { os.Stdout = stdout })
	out, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	os.Stdout = out
	a, err := newApp(env(nil), time.Now())
	require.NoError(t, err)
	synctest.Test(t, func(t *testing.T) {
		code, body := ask(t, a, "POST", "/log?for=50ms&bytes_per_second=1000000")
		require.Equal(t, http.StatusOK, code)
		written, err := os.ReadFile(out.Name())
		require.NoError(t, err)
		require.InDelta(t, 50_000, len(written), 10_000)
		require.Equal(t, strconv.Itoa(len(written)), body)
	})
	for _, bad := range []string{"for=x&bytes_per_second=1", "for=1s", "for=1s&bytes_per_second=0"} {
		code, _ := ask(t, a, "POST", "/log?"+bad)
		require.Equal(t, http.StatusBadRequest, code, bad)
	}
}
