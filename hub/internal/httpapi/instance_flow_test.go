package httpapi

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/duplex"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// theater is a house that also has a node, with the operations on capacity and instances.
type theater struct {
	*house
	node  string
	asked []*protocol.LogsRequest
	// pull is what the node says of its pull.
	pull atomic.Pointer[protocol.ImagePull]
	// source is what a node answers with where it is not nil.
	source        func() io.ReadCloser
	logCheckEvery time.Duration
	// ports are the apps that listen on the node; direct is the handler whose connections can be taken over.
	ports  map[string]func(ctx context.Context) (duplex.Stream, error)
	direct http.Handler
	// executed are the commands that were asked for.
	executed []*protocol.ExecRequest
	copied   []*protocol.CopyRequest
	removed  []*protocol.RemoveEnvironmentRequest
	// reports counts the reports on volumes.
	reports uint64
}

func (s *theater) Connect(ctx context.Context, nodeID, _ string, r *protocol.ConnectRequest) (duplex.Stream, error) {
	if dial := s.ports[r.GetPort()]; dial != nil && nodeID == s.node {
		return dial(ctx)
	}
	return nil, fault.New(fault.Unavailable, "node_unreachable", "The node is not connected.", nil)
}

func (s *theater) Exec(ctx context.Context, nodeID, orgID string, r *protocol.ExecRequest) (duplex.Stream, error) {
	s.executed = append(s.executed, r)
	return s.Connect(ctx, nodeID, orgID, &protocol.ConnectRequest{Port: "http"})
}

func (s *theater) Copy(ctx context.Context, nodeID, orgID string, r *protocol.CopyRequest) (duplex.Stream, error) {
	s.copied = append(s.copied, r)
	return s.Connect(ctx, nodeID, orgID, &protocol.ConnectRequest{Port: "http"})
}

func (s *theater) RemoveEnvironment(_ context.Context, _, _ string, r *protocol.RemoveEnvironmentRequest) error {
	s.removed = append(s.removed, r)
	return nil
}

func (s *theater) Logs(_ context.Context, nodeID, _ string, r *protocol.LogsRequest) (io.ReadCloser, error) {
	if nodeID != s.node {
		return nil, fault.New(fault.Unavailable, "node_unreachable", "The node is not connected.", nil)
	}
	if s.source != nil {
		return s.source(), nil
	}
	s.asked = append(s.asked, r)
	return io.NopCloser(strings.NewReader("one\ntwo\n")), nil
}

// open swaps the operations on people for those on instances; make tenants before.
func (s *theater) open(t *testing.T) {
	t.Helper()
	s.node = s.enroll(t)
	s.connect(t, s.node)
	api := serverOn(s.d, nil, nil)
	api.NodeStreams, api.logCheckEvery, api.rightCheckEvery = s, s.logCheckEvery, s.logCheckEvery
	api.Queries.ImagePull = func(nodeID, _ string) *protocol.ImagePull {
		if nodeID != s.node {
			return nil
		}
		return s.pull.Load()
	}
	var err error
	s.Handler, err = NewHandler(api, Config{
		Authenticator: TokenAuthenticator{DB: s.d}, Auditor: &command.Service{DB: s.d},
		Log: jsonLog(t, s.log), Now: s.clock, RequestsPerSecond: 1e6, Burst: 1e6,
	})
	require.NoError(t, err)
	s.direct = s.Handler
	s.Handler = conforms(t, s.Handler)
}

// enroll makes a node that was never in contact.
func (s *theater) enroll(t *testing.T) (nodeID string) {
	t.Helper()
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	secret, err := fleet.NewJoinSecret()
	require.NoError(t, err)
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		now := s.clock()
		if _, err := fleet.CreateToken(ctx, tx, fleet.NewToken{ID: db.NewID(), Secret: secret, CreatedBy: "admin"},
			now); err != nil {
			return err
		}
		n, _, err := fleet.Enroll(ctx, tx, fleet.Enrollment{
			NodeID: db.NewID(), Secret: secret, Hostname: "n1", PublicKey: pub,
			CertificateExpiresAt: now.Add(time.Hour),
		}, now)
		nodeID = n.ID
		return err
	})
	return nodeID
}

func (s *theater) connect(t *testing.T, nodeID string) {
	t.Helper()
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		_, err := fleettest.Connect(ctx, tx, fleet.Connection{NodeID: nodeID, ReplicaID: "r", Hello: &protocol.Hello{
			Features:    manifest.KnownFeatures(),
			Incarnation: "i", Facts: &protocol.NodeFacts{
				Hostname: "n1", CpuCores: 8, MemoryBytes: 16 << 30, VolumeBytes: 1 << 30,
			},
		}}, s.clock())
		return err
	})
}

func (s *theater) tx(t *testing.T, fn func(context.Context, db.Tx) error) {
	t.Helper()
	_, err := db.RunTx(t.Context(), s.d, func(tx db.Tx) (struct{}, error) { return struct{}{}, fn(t.Context(), tx) })
	require.NoError(t, err)
}

// instance puts a running one into the project, as the commands and a node would have.
func (s *theater) instance(t *testing.T, orgID, projectID, allocationID string) instance.Instance {
	t.Helper()
	id, member := db.NewID(), db.NewID()
	signed, err := proto.Marshal(&protocol.Envelope{
		Payload: []byte("a manifest"), Signatures: []*protocol.Signature{{KeyId: hex64}},
	})
	require.NoError(t, err)
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		now := s.clock()
		if err := ledger.OpenSubject(ctx, tx, ledger.Subject{
			ID: member, Kind: ledger.Member, OrgID: orgID, ProjectID: projectID, AppInstanceID: id, AppSlug: "demo",
			AllocationID: allocationID, NodeID: s.node, OpenedAt: now,
		}); err != nil {
			return err
		}
		if _, err := instance.Create(ctx, tx, instance.Instance{
			ID: id, OrgID: orgID, OrgSlug: "acme", ProjectID: projectID, AppSlug: "demo", DisplayName: "First",
			Modes: instance.Modes{
				OperatingMode: "tenant_dedicated", ControlPlaneScope: "project",
				RuntimeBackend: "launchable_oci", TenantBoundaryMode: "project_isolated",
			},
			RequestedBy: principal.Actor{Type: principal.User, ID: db.NewID()}, CorrelationID: "c",
			HintResults: []instance.HintResult{{
				Field: "operating_mode", Requested: "platform_managed",
				Effective: "tenant_dedicated", Reason: "not_supported_by_app",
			}},
			Members: []instance.Member{{ID: member, AllocationID: allocationID, NodeID: s.node}},
		}, instance.NewRevision{
			AppVersion: "1.0.0", ParametersJSON: `{"n":1}`, ConfigJSON: `{"a":"b"}`,
			ManifestEnvelope: signed,
			Services: map[string][]*protocol.Service{member: {{
				Name: "app", Image: "registry.example/org/acme/demo/app@sha256:" + hex64,
				Resources: &protocol.Resources{CpuMillis: 100, MemoryBytes: 16 << 20},
			}}},
		},
			db.NewID(), now); err != nil {
			return err
		}
		if err := event.Append(ctx, tx, event.Event{
			Type: "apps.instance.requested", Subject: id, ResourceVersion: 1,
			OrgID: orgID, ProjectID: projectID, CorrelationID: "c", At: now,
		}); err != nil {
			return err
		}
		err := nodes.ApplyReport(ctx, tx, nodes.Report{Report: instance.Report{
			NodeID: s.node, SessionNo: 1, Counter: 1,
			Statuses: []*protocol.WorkloadStatus{{
				MemberId: member, Revision: 1, Status: protocol.WorkloadStatus_READY, Endpoints: []*protocol.PublishedEndpoint{
					{Name: "http", Protocol: "http", Host: "127.0.0.1", Port: 20000},
				},
			}},
		}}, now)
		return err
	})
	var i instance.Instance
	s.tx(t, func(ctx context.Context, tx db.Tx) (err error) {
		i, err = instance.Get(ctx, tx, projectID, id)
		return err
	})
	return i
}

func items(a answer) []map[string]any {
	list, _ := a.body["items"].([]any)
	out := make([]map[string]any, 0, len(list))
	for _, item := range list {
		m, _ := item.(map[string]any)
		out = append(out, m)
	}
	return out
}

const sliceBody = `{"capacity_shape":"gpu_slice","accelerator_count":0,"cpu_cores":2,"memory_mib":1024}`

func TestAllocationsOverREST(t *testing.T) {
	s := &theater{house: newHouse(t)}
	_, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	path := "/projects/" + projectID + "/allocations"

	made := s.must(t, boss, "POST", path, "k1", sliceBody, 201)
	require.Equal(t, "active", made.text("status"))
	require.Equal(t, s.node, made.text("node_id"))
	require.Equal(t, "2", made.text("free_cpu_cores"))
	require.Equal(t, "flow-k1", made.text("correlation_id"))
	again := s.must(t, boss, "POST", path, "k1", sliceBody, 201)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.JSONEq(t, made.raw, again.raw)

	got := s.must(t, boss, "GET", path+"/"+made.text("id"), "", "", 200)
	require.JSONEq(t, made.raw, got.raw)
	second := s.must(t, boss, "POST", path, "k2", sliceBody, 201)
	page := s.must(t, boss, "GET", path+"?limit=1", "", "", 200)
	require.Equal(t, second.text("id"), items(page)[0]["id"])
	rest := s.must(t, boss, "GET", path+"?limit=1&cursor="+page.text("next_cursor"), "", "", 200)
	require.Equal(t, made.text("id"), items(rest)[0]["id"])
	require.Empty(t, rest.text("next_cursor"))

	released := s.must(t, boss, "POST", path+"/"+made.text("id")+"/release", "k3", "", 202)
	require.Equal(t, "released", released.text("status"))
	require.Equal(t, 409, s.ask(t, boss, "POST", path+"/"+made.text("id")+"/release", "k4", "").status)
	require.Len(t, items(s.must(t, boss, "GET", path+"?status=active", "", "", 200)), 1)
	require.Equal(t, 409, s.ask(t, boss, "POST", path, "k5",
		`{"capacity_shape":"gpu_slice","accelerator_count":1,"cpu_cores":1,"memory_mib":64}`).status)
}

func TestInstancesOverREST(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	path := "/projects/" + projectID + "/app-instances"

	got := s.must(t, boss, "GET", path+"/"+i.ID, "", "", 200)
	require.Equal(t, "running", got.text("status"))
	require.Equal(t, "healthy", got.text("health"))
	require.NotContains(t, got.body, "status_reason", "absent when all is well")
	require.Equal(t, "1.0.0", got.text("version"))
	require.Equal(t, map[string]any{"n": 1.0}, got.body["parameters"])
	require.Contains(t, got.raw, `"url":"http://127.0.0.1:20000"`)
	require.Contains(t, got.raw, `"port_forward":"gpuaas port-forward `+i.ID+` http --project `+projectID+`"`)
	require.Contains(t, got.raw, `"ssh_tunnel":"ssh -N -L 20000:127.0.0.1:20000 n1"`)
	require.Contains(t, got.raw, `"reason":"not_supported_by_app"`)
	long := s.ask(t, boss, "POST", path, "long", `{"app_slug":"demo","version":"1.0.0","display_name":"d",`+
		`"parameters":{"seeds":[1,9007199254740993]}}`)
	require.Equal(t, 400, long.status, long.raw)
	require.Contains(t, long.raw, `"pointer":"/parameters/seeds/1"`, "the app would get another number")
	require.Len(t, items(s.must(t, boss, "GET", path+"?status=running&app_slug=demo", "", "", 200)), 1)
	require.Empty(t, items(s.must(t, boss, "GET", path+"?status=failed", "", "", 200)))

	logs := httptest.NewRequest("GET", "/api/v1"+path+"/"+i.ID+"/logs?tail_lines=5&follow=true", nil)
	logs.Header.Set("Authorization", "Bearer "+boss)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, logs)
	require.Equal(t, "one\ntwo\n", w.Body.String())
	require.Equal(t, uint32(5), s.asked[0].GetTailLines())
	require.True(t, s.asked[0].GetFollow())
	require.Equal(t, 422, s.ask(t, boss, "GET", path+"/"+i.ID+"/logs?member_id="+db.NewID(), "", "").status)

	ended := s.must(t, boss, "POST", path+"/"+i.ID+"/decommission", "k2", "", 202)
	require.Equal(t, "decommissioning", ended.text("status"))
	require.Equal(t, 409, s.ask(t, boss, "POST", path+"/"+i.ID+"/decommission", "k3", "").status)
	events := s.must(t, boss, "GET", path+"/"+i.ID+"/events?limit=3", "", "", 200)
	more := s.must(t, boss, "GET", path+"/"+i.ID+"/events?cursor="+events.text("next_cursor"), "", "", 200)
	var types []string
	for _, e := range append(items(events), items(more)...) {
		types = append(types, fmt.Sprint(e["type"]))
	}
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running",
		"apps.instance.decommission_requested",
	}, types)
	require.Contains(t, more.raw, `"correlation_id":"flow-k2"`)
	require.Contains(t, more.raw, `"from":"running"`)
}

// mayReadLogs asks for a bearer what an open stream asks.
func (s *theater) mayReadLogs(t *testing.T, bearer, projectID string) error {
	t.Helper()
	api := serverOn(s.d, nil, nil)
	return api.mayReadLogs(t.Context(), func(ctx context.Context) (iam.Principal, error) {
		return TokenAuthenticator{DB: s.d}.Authenticate(ctx, bearer, s.clock())
	}, projectID)
}

// A token that is revoked while its log is followed ends the log, whatever the app goes on to write.
func TestAFollowedLogEndsWhenItsTokenIsRevoked(t *testing.T) {
	followed := make(chan *io.PipeWriter, 1)
	s := &theater{house: newHouse(t), logCheckEvery: time.Millisecond, source: func() io.ReadCloser {
		source, app := io.Pipe()
		followed <- app
		return source
	}}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	ended := make(chan string, 1)
	go func() {
		w := httptest.NewRecorder()
		r := httptest.NewRequest("GET", "/api/v1/projects/"+projectID+"/app-instances/"+i.ID+"/logs?follow=true", http.NoBody)
		r.Header.Set("Authorization", "Bearer "+boss)
		s.ServeHTTP(w, r)
		ended <- w.Body.String()
	}()
	app := <-followed
	_, err := io.WriteString(app, "one\n")
	require.NoError(t, err)
	_, err = io.WriteString(app, "two\n")
	require.NoError(t, err, "checks that find nothing end nothing")
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx,
			`UPDATE user_tokens SET revoked_at = $1 WHERE user_id IN (SELECT id FROM users WHERE email LIKE 'boss@%')`,
			s.clock())
		return err
	})
	require.Equal(t, "one\ntwo\n", <-ended)
	_, err = io.WriteString(app, "three\n")
	require.ErrorIs(t, err, io.ErrClosedPipe)
}

func TestActionsOnAnInstanceOverREST(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	path := "/projects/" + projectID + "/app-instances/" + i.ID

	require.Equal(t, 400, s.ask(t, boss, "POST", path+"/upgrade", "k2", `{}`).status, "target_version is required")
	require.Equal(t, 400, s.ask(t, boss, "POST", path+"/stop", "", "").status, "the idempotency key is required")
	require.Equal(t, 422, s.ask(t, boss, "POST", path+"/upgrade", "k3", `{"target_version":"2.0.0"}`).status,
		"the app is not in this catalogue")
	require.Equal(t, 409, s.ask(t, boss, "POST", path+"/start", "k4", "").status)
	for n, body := range []string{"", "{}"} {
		refused := s.ask(t, boss, "POST", path+"/rollback", fmt.Sprint("k5", n), body)
		require.Equal(t, 409, refused.status, refused.raw)
		require.Equal(t, "no_previous_version", refused.text("code"))
	}
	renamed := s.must(t, boss, "PATCH", path, "", `{"display_name":"Second"}`, 200)
	require.Equal(t, "Second", renamed.text("display_name"))
	require.Equal(t, 400, s.ask(t, boss, "PATCH", path, "", `{}`).status)
	require.Equal(t, 400, s.ask(t, boss, "PATCH", path, "", `{"version":"2.0.0"}`).status)

	stopping := s.must(t, boss, "POST", path+"/stop", "k6", "", 202)
	require.Equal(t, "stopping", stopping.text("status"))
	again := s.must(t, boss, "POST", path+"/stop", "k6", "", 202)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Equal(t, "instance_stopping", s.ask(t, boss, "POST", path+"/stop", "k7", "").text("code"))
	events := s.must(t, boss, "GET", path+"/events", "", "", 200)
	require.Contains(t, events.raw, "apps.instance.changed")
	require.Contains(t, events.raw, "apps.instance.stop_requested")
}

// A page of events holds as many as were asked for, up to the contract's limit.
func TestAPageOfEventsIsFull(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		for n := range maxPage {
			if err := event.Append(ctx, tx, event.Event{
				Type: "apps.instance.changed", Subject: i.ID, OrgID: orgID, ResourceVersion: int64(100 + n), At: s.clock(),
			}); err != nil {
				return err
			}
		}
		return nil
	})
	path := fmt.Sprintf("/projects/%s/app-instances/%s/events?limit=%d", projectID, i.ID, maxPage)
	first := s.must(t, boss, "GET", path, "", "", 200)
	require.Len(t, items(first), maxPage)
	rest := s.must(t, boss, "GET", path+"&cursor="+first.text("next_cursor"), "", "", 200)
	require.NotEmpty(t, items(rest))
	require.Empty(t, rest.text("next_cursor"))
}

func TestTheFirstMemberIsOneThatIsThere(t *testing.T) {
	i := instance.Instance{Members: []instance.Member{{ID: "a"}, {ID: "b"}, {ID: "c"}}}
	i.Members[0].Gone = true
	m, err := memberOf(i, "", "/member_id")
	require.NoError(t, err)
	require.Equal(t, "b", m.ID)
	_, err = memberOf(i, "a", "/member_id")
	require.True(t, fault.Is(err, fault.Conflict), "%v", err)
	_, err = memberOf(i, "d", "/member_id")
	require.True(t, fault.Is(err, fault.Unprocessable), "%v", err)
	i.Members = i.Members[:1]
	_, err = memberOf(i, "", "/member_id")
	require.True(t, fault.Is(err, fault.Conflict), "%v", err)
}

// TestLaw10AnotherOrgsInstanceAnswersLikeAnAbsentOne: on every operation, byte for byte, whichever project is named.
func TestLaw10AnotherOrgsInstanceAnswersLikeAnAbsentOne(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	_, own, stranger := s.tenant(t, "other")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)

	operations := []struct{ method, path, id, key string }{
		{"GET", "/app-instances/%s", i.ID, ""},
		{"GET", "/app-instances/%s/events", i.ID, ""},
		{"GET", "/app-instances/%s/logs", i.ID, ""},
		{"POST", "/app-instances/%s/decommission", i.ID, "k2"},
		{"POST", "/app-instances/%s/rollback", i.ID, "k6"},
		{"POST", "/app-instances/%s/stop", i.ID, "k7"},
		{"POST", "/app-instances/%s/start", i.ID, "k8"},
		{"GET", "/allocations/%s", allocation, ""},
		{"POST", "/allocations/%s/release", allocation, "k3"},
	}
	for _, project := range []string{projectID, own} {
		for _, o := range operations {
			foreign := s.ask(t, stranger, o.method, "/projects/"+project+fmt.Sprintf(o.path, o.id), o.key, "")
			nothing := s.ask(t, stranger, o.method, "/projects/"+project+fmt.Sprintf(o.path, db.NewID()), o.key, "")
			require.Equal(t, 404, foreign.status, foreign.raw)
			require.JSONEq(t, nothing.raw, foreign.raw)
		}
	}
	for _, list := range []string{"/app-instances", "/allocations"} {
		require.Equal(t, 404, s.ask(t, stranger, "GET", "/projects/"+projectID+list, "", "").status)
		require.Empty(t, items(s.must(t, stranger, "GET", "/projects/"+own+list, "", "", 200)))
	}
	require.Equal(t, 404, s.ask(t, stranger, "POST", "/projects/"+projectID+"/allocations", "k4", sliceBody).status)
	foreign := s.ask(t, stranger, "POST", "/projects/"+own+"/app-instances", "k5",
		`{"app_slug":"demo","version":"1.0.0","display_name":"x","placement_intent":{"allocation_ids":["`+allocation+`"]}}`)
	require.Equal(t, 422, foreign.status, "the app is looked up first, and says the same whatever the allocation")
	require.Equal(t, "running", s.must(t, boss, "GET", "/projects/"+projectID+"/app-instances/"+i.ID, "", "",
		200).text("status"))
}
