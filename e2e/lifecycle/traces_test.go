package lifecycle_test

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
)

// The span of a tenant's program.
const (
	callersTrace = "0af7651916cd43dd8448eb211c80319c"
	callersSpan  = "b7ad6b7169203331"
	traceparent  = "00-" + callersTrace + "-" + callersSpan + "-01"
)

// wantSpan is a span that a trace must have, after its parent, which is one of several by name.
type wantSpan struct{ service, name, parent string }

// childOf returns a span of this name whose parent is one of the given spans.
func childOf(spans []telemetrytest.Span, want wantSpan, parents []string) (ids []string) {
	for _, s := range spans {
		for _, parent := range parents {
			if s.Service == want.service && s.Name == want.name && s.Parent() == parent {
				ids = append(ids, s.ID())
			}
		}
	}
	return ids
}

func TestOneTraceFromTheRequestToTheRunningApp(t *testing.T) {
	collector := telemetrytest.NewCollector(t)
	w := harness.New(t)
	w.Env = harness.TracesTo(collector.URL)
	w.SetUpPlatform()
	i, err := client.Read[client.AppInstance](w.Operator.CreateAppInstance(telemetry.Continue(w.Ctx, traceparent),
		w.Tenant.Project.ID, client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: "traced",
			PlacementIntent: client.PlacementIntent{AllocationIds: []string{w.Allocation.ID}},
		}))
	require.NoError(t, err)
	i, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, i.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)

	const hub, agent, post = "gpuaas-hub", "gpuaas-agent", "POST /projects/{project_id}/app-instances"
	w.Eventually("the trace is whole", func() error {
		var spans []telemetrytest.Span
		for _, s := range collector.Spans() {
			if s.Trace() == callersTrace {
				spans = append(spans, s)
			}
		}
		found := map[string][]string{"": {callersSpan}}
		for _, want := range []wantSpan{
			{hub, post, ""},
			{hub, "transaction", post},
			{hub, "compile and sign state", post},
			{hub, "push state", post},
			{agent, "accept state", "push state"},
			{agent, "PullImage", post},
			{hub, "answer fetch", "PullImage"}, // the pull credential
			{agent, "SetupNetwork", post},
			{agent, "StartContainer", post + "|SetupNetwork"}, // whether the network or the image is there first
			{agent, "report ready", post},
			{hub, "accept running", "report ready"},
		} {
			var parents []string
			for name := range strings.SplitSeq(want.parent, "|") {
				parents = append(parents, found[name]...)
			}
			ids := childOf(spans, want, parents)
			if len(ids) == 0 {
				var names []string
				for _, s := range spans {
					names = append(names, fmt.Sprintf("%s/%s %s<%s", s.Service, s.Name, s.ID(), s.Parent()))
				}
				return fmt.Errorf("no %v among %s", want, strings.Join(names, ", "))
			}
			found[want.name] = ids
		}
		return nil
	})

	fields := map[string]any{
		"correlation_id": i.CorrelationID, "trace_id": callersTrace, "org_id": w.Tenant.Org.ID,
		"project_id": w.Tenant.Project.ID, "app_instance_id": i.ID, "operating_mode": string(i.OperatingMode),
		"control_plane_scope": string(i.ControlPlaneScope), "runtime_backend": string(i.RuntimeBackend),
	}
	requireLine(t, w.Hub.LogPath, fields, "msg", "request", "method", "POST")
	requireLine(t, w.Hub.LogPath, fields, "msg", "app instance", "to", "running")
	requireLine(t, w.Agent.LogPath, fields, "msg", "starting a container")

	events, err := w.Tenant.Events(w.Ctx, w.Operator, i.ID)
	require.NoError(t, err)
	for _, e := range events {
		require.Equal(t, callersTrace, e.Data.TraceID, e.Type)
	}
}

// requireLine finds a line of a log with these pairs, and requires that it has the fields. Every line is JSON.
func requireLine(t *testing.T, path string, fields map[string]any, pairs ...string) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	found := false
	for line := range strings.Lines(string(text)) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		got := map[string]any{}
		require.NoError(t, json.Unmarshal([]byte(line), &got), line)
		if got["app_instance_id"] != fields["app_instance_id"] {
			continue
		}
		matches := true
		for n := 0; n < len(pairs); n += 2 {
			matches = matches && got[pairs[n]] == pairs[n+1]
		}
		if !matches {
			continue
		}
		found = true
		for name, value := range fields {
			require.Equal(t, value, got[name], "%s in %s", name, line)
		}
	}
	require.True(t, found, "%v in %s", pairs, path)
}

// One collector accepts connections and answers nothing, the other is not there.
func TestCollectorsThatFailHoldNothingUp(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	w := harness.New(t)
	w.StartContainerd()
	w.Env = harness.TracesTo("http://" + silent.Addr().String())
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	w.Env = harness.TracesTo("http://" + harness.FreeAddress())
	w.Agent = w.StartAgent(w.AgentConfig("node"))
	w.ShipApp()
	w.Allocate(w.Agent)
	i := w.Launch("app")
	w.RequireAnswer(i)
	for _, p := range []interface{ Stop() error }{w.Agent, w.Hub} {
		require.NoError(t, p.Stop(), "it ends by itself")
	}
	w.RestartHub()
	w.RestartAgent(w.Agent)
	require.Equal(t, client.AppInstanceStatusDecommissioned, w.Decommission(i).Status)
}
