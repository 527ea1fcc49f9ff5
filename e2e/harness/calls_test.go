package harness

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// writeLog writes a log of a program below dir.
func writeLog(t *testing.T, dir, program, text string) {
	t.Helper()
	dir = filepath.Join(dir, "logs")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, program+".log"), []byte(text), 0o600))
}

func TestTheCallsOfANodeAreReadFromTheLogs(t *testing.T) {
	started := `{"msg":"` + devcluster.StartMessage + `"}` + "\n"
	hub := devcluster.HubConfig{Dir: t.TempDir()}
	writeLog(t, hub.Dir, "hub", started+started)
	node := devcluster.AgentConfig{Dir: filepath.Join(t.TempDir(), "node")}
	writeLog(t, node.Dir, "agent", started+`{"msg":"enrolled"}
{"time":"2026-01-01T00:00:00Z","msg":"no session"}
{"time":"2026-01-01T00:00:01Z","msg":"no session"}
{"msg":"session open"}
{"time":"2026-01-01T00:01:00Z","msg":"certificate renewed","expires_at":"2026-01-01T00:02:00Z"}
no line of JSON
{"time":"2026-01-01T00:01:10Z","msg":"no session"}
`+started+`{"msg":"session open"}
`)
	calls, err := callsOf(node, hub)
	require.NoError(t, err)
	at := func(seconds int) time.Time { return time.Date(2026, 1, 1, 0, 0, seconds, 0, time.UTC) }
	require.Equal(t, NodeCalls{
		Name: "node", Starts: 3, Sessions: 2, Enrolled: 1, RetryMax: hubsession.DefaultDialRetryMax,
		Dials:   [][]time.Time{nil, {at(0), at(1)}, {at(70)}, nil, nil},
		Renewed: [][]renewal{{{at(60), at(120)}}, nil},
	}, calls)
	require.Empty(t, calls.findings())
	node.ExtraArgs = []string{"--dial-retry-max", "2s"}
	calls, err = callsOf(node, hub)
	require.NoError(t, err)
	require.Equal(t, 2*time.Second, calls.RetryMax)
}

func TestACertificateIsRenewedOnceInHalfOfItsLife(t *testing.T) {
	began := time.Unix(1_000_000, 0)
	at := func(seconds int) renewal {
		after := began.Add(time.Duration(seconds) * time.Second)
		return renewal{after, after.Add(20 * time.Second)}
	}
	require.Empty(t, NodeCalls{Renewed: [][]renewal{{at(0), at(9), at(18)}, {at(19)}}}.findings())
	require.Equal(t, []string{"node n renews a certificate for 20s after 8s"},
		NodeCalls{Name: "n", Renewed: [][]renewal{{at(0), at(9), at(17)}}}.findings())
}

func TestWhatTheRegistrySendsIsComparedWithWhatItHas(t *testing.T) {
	hub := devcluster.HubConfig{Dir: t.TempDir()}
	writeLog(t, hub.Dir, "hub", `{"msg":"request","method":"GET","route":"/v2/","response_bytes":2000000}
{"msg":"request","method":"GET","route":"/v2/","response_bytes":1000000}
{"msg":"request","method":"PUT","route":"/v2/","response_bytes":2000000}
{"msg":"request","method":"GET","route":"/backup","response_bytes":2000000}
`)
	dir := filepath.Join(hub.DataDir(), "registry", "blobs")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for name, size := range map[string]int{"large": 1_500_000, "small": 1000} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), make([]byte, size), 0o600))
	}
	p, err := pullsOf(hub)
	require.NoError(t, err)
	require.Equal(t, Pulls{SentBytes: 2_000_000, StoredBytes: 1_500_000}, p)
	o := Observed{Pulls: p, Nodes: make([]NodeCalls, 1)}
	require.Equal(t, []string{"needless pulls: 1 nodes have pulled 2000000 bytes of 1500000"}, o.Findings(Faults{}))
	require.Empty(t, o.Findings(Faults{Pulls: true}))
	o.Nodes = make([]NodeCalls, 2)
	require.Empty(t, o.Findings(Faults{}))
}
