package main

import (
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// asked is a request that a running agent has received.
type asked struct {
	request string // method and URI
	body    string
}

// running is a running agent that gives these answers, by method and path.
type running struct {
	socket string

	mu       sync.Mutex
	answers  map[string]any
	requests []asked
}

func (r *running) answer(request string, answer any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answers[request] = answer
}

func (r *running) asked() []asked {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.requests)
}

func startAnswering(t *testing.T, answers map[string]any) *running {
	t.Helper()
	r := &running{socket: filepath.Join(t.TempDir(), "agent.sock"), answers: answers}
	l, err := net.Listen("unix", r.socket)
	require.NoError(t, err)
	server := &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	return r
}

// ServeHTTP answers; text is sent as it is.
func (r *running) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, _ := io.ReadAll(req.Body)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, asked{req.Method + " " + req.RequestURI, string(body)})
	switch answer := r.answers[req.Method+" "+req.URL.Path].(type) {
	case nil:
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(map[string]string{"code": "not_found", "detail": "There is no such thing."})
	case string:
		_, _ = io.WriteString(w, answer)
	default:
		_ = json.NewEncoder(w).Encode(answer)
	}
}

func (r *running) execute(t *testing.T, args ...string) (out string, err error) {
	t.Helper()
	return execute(t, append(args, "--local-socket", r.socket)...)
}

// cells are the lines of a table, with one space between the cells.
func cells(table string) (lines []string) {
	for line := range strings.Lines(table) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return lines
}

func TestStatusSaysWhatIsWrongWithTheNode(t *testing.T) {
	now := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	status := local.Status{
		NodeID: "n1", AgentVersion: "dev", TrustDomain: "mesh.test", BundleVersion: 3, Epoch: 2, Generation: 17, Time: now,
		Workloads: 4, Usage: state.SpoolState{LastSegment: 9, UnsentBytes: 512},
		Hub: agent.SessionStatus{
			Since: now.Add(-90 * time.Second), LastError: "no route", LastRefusal: "stale", Quarantined: "two machines",
		},
		Unverified: map[string]string{"lease/m1": "signature", "bundle": "expired"},
	}
	r := startAnswering(t, map[string]any{"GET /v1/status": status})
	out, err := r.execute(t, "status")
	require.NoError(t, err)
	require.Equal(t, []string{
		"Node n1", "Agent dev", "Hub no session since 1m30s ago", "Last error no route", "Quarantined two machines",
		"Last refusal stale", "State epoch 2, generation 17, 4 workloads", "Trust mesh.test, bundle 3",
		"Usage 9 segments sealed, 0 posted, 512 bytes unsent", "Unverified bundle: expired",
		"Unverified lease/m1: signature", "Conditions -",
	}, cells(out))
	status.Hub = agent.SessionStatus{Connected: true, HubAddr: "hub.test:443"}
	status.Unverified, status.Conditions = nil, []string{"NoSeccomp", "ClockUntrusted"}
	r.answer("GET /v1/status", status)
	out, err = r.execute(t, "status")
	require.NoError(t, err)
	require.Contains(t, cells(out), "Hub connected to hub.test:443")
	require.Contains(t, cells(out), "Conditions NoSeccomp, ClockUntrusted")
	require.NotContains(t, out, "Last error")
	out, err = r.execute(t, "status", "-o", "json")
	require.NoError(t, err)
	var read local.Status
	require.NoError(t, json.Unmarshal([]byte(out), &read))
	require.Equal(t, status, read)
}

func TestAnUnknownOutputChangesNothing(t *testing.T) {
	r := startAnswering(t, map[string]any{"POST /v1/images/pin": ""})
	for _, args := range [][]string{{"status"}, {"pin-image", "example.test/app"}, {"release-accelerator", "GPU-1"}} {
		_, err := r.execute(t, append(args, "-o", "yaml")...)
		require.ErrorContains(t, err, `--output" flag: must be table or json`)
	}
	require.Empty(t, r.asked())
}

func TestWorkloadsAreListedWithTheirServices(t *testing.T) {
	r := startAnswering(t, map[string]any{"GET /v1/workloads": []local.Workload{
		{
			MemberID: "m1", AppSlug: "demo", AppVersion: "1.0.0", Status: "RUNNING", Restarts: 2,
			Endpoints: []local.Endpoint{{Name: "a", URL: "http://192.0.2.1:1"}, {Name: "b", URL: "http://192.0.2.1:2"}},
			Services: []local.Service{
				{Name: "web", Status: "RUNNING"}, {Name: "db", Status: "FAILED", Reason: "OOM", Restarts: 3},
			},
		},
		{MemberID: "m2", Status: "FAILED", Reason: "IMAGE_PULL_FAILED"},
	}})
	out, err := r.execute(t, "workloads")
	require.NoError(t, err)
	require.Equal(t, []string{
		"MEMBER APP STATUS REASON RESTARTS ENDPOINTS", "m1 demo 1.0.0 RUNNING - 2 http://192.0.2.1:1 http://192.0.2.1:2",
		"web RUNNING - 0", "db FAILED OOM 3", "m2 - FAILED IMAGE_PULL_FAILED 0 -",
	}, cells(out))
}

func TestVerifyFailsWhereOneCheckDoes(t *testing.T) {
	checks := []accept.Check{{Subject: "state", What: "signature", OK: true}}
	r := startAnswering(t, map[string]any{"GET /v1/verify": checks})
	out, err := r.execute(t, "verify")
	require.NoError(t, err)
	require.Equal(t, []string{"ok state signature"}, cells(out))
	r.answer("GET /v1/verify", append(checks, accept.Check{Subject: "m1", What: "digest", Detail: "wrong"}))
	out, err = r.execute(t, "verify")
	require.EqualValues(t, "verify_failed", fault.As(err).Code)
	require.ErrorContains(t, err, "1 of 2 checks failed.")
	require.Equal(t, []string{"ok state signature", "FAILED m1 digest wrong"}, cells(out))
	out, err = r.execute(t, "verify", "-o", "json")
	require.EqualValues(t, "verify_failed", fault.As(err).Code, "a program goes by the exit code")
	require.Contains(t, out, `"detail": "wrong"`)
}

func TestALogIsPassedOn(t *testing.T) {
	r := startAnswering(t, map[string]any{"GET /v1/logs/m1": "one\ntwo\n"})
	out, err := r.execute(t, "logs", "m1")
	require.NoError(t, err)
	require.Equal(t, "one\ntwo\n", out)
	_, err = r.execute(t, "logs", "m1", "--service", "web", "--tail", "5", "-f")
	require.NoError(t, err)
	require.Equal(t, []asked{
		{request: "GET /v1/logs/m1?follow=false&service=&tail=100"},
		{request: "GET /v1/logs/m1?follow=true&service=web&tail=5"},
	}, r.asked())
	_, err = r.execute(t, "logs", "m2")
	require.EqualValues(t, "not_found", fault.As(err).Code)
	require.Equal(t, fault.NotFound, fault.As(err).Kind)
}

func TestApplyHandsOverADocumentWithItsParts(t *testing.T) {
	r := startAnswering(t, map[string]any{
		"POST /v1/apply": local.Applied{Document: "desired state", Epoch: 1, Generation: 5},
	})
	dir := t.TempDir()
	file := filepath.Join(dir, "state.json")
	write := func(path, text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	write(file, `{"payload":"x"}`)
	require.NoError(t, os.Mkdir(file+".parts", 0o700))
	write(filepath.Join(file+".parts", hex.EncodeToString(make([]byte, 32))), "a part")
	write(filepath.Join(file+".parts", "README"), "no part")
	out, err := r.execute(t, "apply", file)
	require.NoError(t, err)
	require.Equal(t, []string{"accepted desired state epoch 1, generation 5"}, cells(out))
	require.Len(t, r.asked(), 1)
	var sent local.Document
	require.NoError(t, json.Unmarshal([]byte(r.asked()[0].body), &sent))
	require.JSONEq(t, `{"payload":"x"}`, string(sent.Envelope))
	require.Equal(t, [][]byte{[]byte("a part")}, sent.Parts)

	write(file, "payload: x")
	_, err = r.execute(t, "apply", file)
	require.ErrorContains(t, err, "is not JSON")
	write(file, `"`+strings.Repeat("x", maxApplyBytes)+`"`)
	_, err = r.execute(t, "apply", file)
	require.ErrorContains(t, err, "has over")
	write(file, "{}")
	write(filepath.Join(file+".parts", strings.Repeat("ab", 32)), strings.Repeat("x", protocol.MaxWorkloadBytes+2))
	_, err = r.execute(t, "apply", file)
	require.ErrorContains(t, err, "has over")
	_, err = r.execute(t, "apply", filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Len(t, r.asked(), 1, "the agent is asked for none of these")
}

func TestImagesKeysAndAcceleratorsAreAskedFor(t *testing.T) {
	r := startAnswering(t, map[string]any{
		"GET /v1/images": []runtime.Image{
			{Name: "a@sha256:1", SizeBytes: 5 << 20, InUse: true}, {Name: "b@sha256:2", SizeBytes: 1 << 20, Pinned: true},
		},
		"GET /v1/keys/alice":                  []string{"ssh-ed25519 AAAA alice"},
		"POST /v1/images/pin":                 local.Pin{},
		"POST /v1/accelerators/GPU-1/release": struct{}{},
	})
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"images"}, "IMAGE COMPRESSED IN USE PINNED|a@sha256:1 5 MiB yes no|b@sha256:2 1 MiB no yes"},
		{[]string{"keys", "alice"}, "ssh-ed25519 AAAA alice"},
		{[]string{"pin-image", "a@sha256:1"}, "a@sha256:1 is pinned"},
		{[]string{"unpin-image", "b@sha256:2"}, "b@sha256:2 is no longer pinned"},
		{[]string{"release-accelerator", "GPU-1"}, "GPU-1 is tested, and is given to containers again where it works"},
	} {
		out, err := r.execute(t, c.args...)
		require.NoError(t, err)
		require.Equal(t, c.says, strings.Join(cells(out), "|"))
	}
	require.JSONEq(t, `{"name":"a@sha256:1","pinned":true}`, r.asked()[2].body)
	require.JSONEq(t, `{"name":"b@sha256:2","pinned":false}`, r.asked()[3].body)
	_, err := r.execute(t, "release-accelerator", "GPU-2")
	require.EqualValues(t, "not_found", fault.As(err).Code)
	_, err = r.execute(t, "pin-image", "a", "b")
	require.Error(t, err, "one image at a time")
}

func TestUninstallEmptiesBothDirectoriesAndKeepsMountPoints(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	c := config{dataDir: filepath.Join(dir, "data"), runDir: filepath.Join(dir, "run")}
	for _, path := range []string{c.dataDir, c.runDir} {
		require.NoError(t, os.Mkdir(path, 0o700))
	}
	mountSmall(t, c.runDir)
	for _, path := range []string{c.dataDir, c.runDir} {
		require.NoError(t, os.MkdirAll(filepath.Join(path, "sub/dir"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(path, "sub/file"), nil, 0o600))
	}
	require.NoError(t, c.removeDirectories())
	require.NoDirExists(t, c.dataDir)
	left, err := os.ReadDir(c.runDir)
	require.NoError(t, err, "a file system of its own")
	require.Empty(t, left)
}

func TestConditionsThatWeakenIsolationAreChosen(t *testing.T) {
	require.Empty(t, weakIsolation(false, []string{"ClockUntrusted"}))
	require.Equal(t, []string{protocol.ConditionRuncVulnerable, protocol.ConditionNoSeccomp},
		weakIsolation(true, []string{"ClockUntrusted", protocol.ConditionNoSeccomp}))
}

func TestAJoinTokenIsReadWithoutWhiteSpace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(path, []byte("  a-token\n"), 0o600))
	token, err := readToken(path)
	require.NoError(t, err)
	require.Equal(t, "a-token", token)
	token, err = readToken("")
	require.NoError(t, err)
	require.Empty(t, token, "enrollment says what is missing")
	_, err = readToken(filepath.Dir(path))
	require.EqualValues(t, "join_token_unreadable", fault.As(err).Code)
}
