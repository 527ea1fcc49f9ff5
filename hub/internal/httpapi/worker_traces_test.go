package httpapi

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/delivery"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

// delivered is what a webhook's URL got.
type delivered struct {
	header string
	event  Event
}

// webhooks has a webhook for events of instances, and sends its deliveries to the channel until the test ends.
func (s *workshop) webhooks(t *testing.T) <-chan delivered {
	t.Helper()
	got := make(chan delivered, 100)
	endpoint := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		d := delivered{header: r.Header.Get("traceparent")}
		_ = json.NewDecoder(r.Body).Decode(&d.event)
		got <- d
	}))
	t.Cleanup(endpoint.Close)
	s.commands.MayDial = netip.Addr.IsLoopback
	s.must(t, s.boss, "POST", "/orgs/"+s.world.Project.OrgID+"/webhooks", "webhook",
		`{"url":"`+endpoint.URL+`","types":["apps.instance"]}`, 201)
	kek, err := secret.NewKEK([]byte(houseKey))
	require.NoError(t, err)
	d := &delivery.Deliverer{
		DB: s.d, Queries: &query.Service{DB: s.d, Tail: s.tail}, Sealer: secret.NewSealer(kek), Client: endpoint.Client(),
		Now: s.clock, Log: slog.New(slog.DiscardHandler),
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return got
}

// operate has the SDK's worker take the instance to running, as one of the service accounts.
func (s *workshop) operate(t *testing.T, instance string) {
	t.Helper()
	server := httptest.NewTLSServer(s.Handler)
	t.Cleanup(server.Close)
	hub, err := client.Open(client.Config{
		URL:        server.URL,
		CAPEM:      pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		Credential: client.BearerToken(s.worker),
	})
	require.NoError(t, err)
	t.Cleanup(hub.Close)
	id := instance[strings.LastIndex(instance, "/")+1:]
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	w := &worker.Worker{
		Hub: hub, ProjectID: s.world.Project.ID, InstanceID: id,
		Handle: func(ctx context.Context, task worker.Task) error {
			for _, phase := range task.Phases {
				if err := task.Phase(ctx, phase); err != nil {
					return err
				}
			}
			return nil
		},
	}
	go func() { ended <- w.Run(ctx) }()
	_, err = hub.WaitInstance(t.Context(), s.world.Project.ID, id, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
}

// TestOneTraceFromTheRequestThroughTheWorkerToTheWebhook begins with a tenant's traced launch; the worker knows the
// trace from its task alone, and the receiver of the webhook from what was sent to it.
func TestOneTraceFromTheRequestThroughTheWorkerToTheWebhook(t *testing.T) {
	collector, stop := startTraces(t)
	s := newWorkshop(t)
	s.sequence(t)
	got := s.webhooks(t)
	s.world.EnrollNode()
	launched := s.try(t, refusal{
		token: s.boss, path: s.project + "/app-instances", header: http.Header{"Traceparent": {sampled}},
		body: `{"app_slug":"cluster","version":"1.0.0","display_name":"c","placement_intent":{"allocation_ids":["` +
			s.world.Allocation().ID + `"]}}`,
	})
	require.Equal(t, http.StatusCreated, launched.status, launched.raw)
	instance := s.project + "/app-instances/" + launched.text("id")
	tasks := items(s.must(t, s.worker, "GET", instance+"/tasks?state=pending", "", "", 200))
	require.Len(t, tasks, 1)
	traceparent, _ := tasks[0]["traceparent"].(string)
	require.Equal(t, traceID, telemetry.TraceID(traceparent))
	s.operate(t, instance)

	// By the type of the event, the span that it follows from.
	parents, headers := map[string]string{}, map[string]string{}
	for parents["apps.instance.task_completed"] == "" {
		d := <-got
		require.Equal(t, traceID, telemetry.TraceID(d.event.Traceparent), d.event.Type)
		require.Equal(t, traceID, d.event.Data.TraceID, d.event.Type)
		require.Equal(t, traceID, telemetry.TraceID(d.header), d.event.Type)
		parents[d.event.Type], headers[d.event.Type] = spanOf(d.event.Traceparent), spanOf(d.header)
	}
	stop()
	spans := map[string]telemetrytest.Span{}
	for _, span := range collector.Spans() {
		if span.Trace() == traceID {
			spans[span.Name] = span
			spans[span.ID()] = span
		}
	}
	const post, done = "POST /projects/{project_id}/app-instances",
		"POST /projects/{project_id}/app-instances/{app_instance_id}/tasks/{task_id}/complete"
	require.Equal(t, "b7ad6b7169203331", spans[post].Parent())
	require.Equal(t, spans[post].ID(), spanOf(traceparent), "the task has the span of the request")
	require.Equal(t, spans[post].ID(), spans["task deploy"].Parent())
	require.Equal(t, spans["task deploy"].ID(), spans[done].Parent())
	require.Equal(t, spans[post].ID(), parents["apps.instance.requested"])
	require.Equal(t, spans[done].ID(), parents["apps.instance.running"])
	require.Equal(t, spans[done].ID(), parents["apps.instance.task_completed"])
	for _, typ := range []string{"apps.instance.requested", "apps.instance.running"} {
		require.Equal(t, "deliver event", spans[headers[typ]].Name, typ)
		require.Equal(t, parents[typ], spans[headers[typ]].Parent(), typ)
	}
}

// spanOf is the id of the span that a traceparent names.
func spanOf(traceparent string) string {
	parts := strings.Split(traceparent, "-")
	if len(parts) != 4 {
		return ""
	}
	return parts[2]
}
