package cli_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpuaas/gpuaas/pkg/cli"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	orgID      = "0192f0c0-0000-7000-8000-00000000000a"
	projectID  = "0192f0c0-0000-7000-8000-00000000000b"
	instanceID = "0192f0c0-0000-7000-8000-00000000000c"
	allocation = "0192f0c0-0000-7000-8000-00000000000d"
	accountID  = "0192f0c0-0000-7000-8000-00000000000e"
	nodeID     = "0192f0c0-0000-7000-8000-00000000000f"
	userID     = "0192f0c0-0000-7000-8000-000000000010"
	tokenID    = "0192f0c0-0000-7000-8000-000000000011"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gpuaas": func() {
		os.Exit(cli.Main(context.Background(), cli.Env{
			Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "test",
		}, os.Args[1:]))
	}})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			hub := &fakeHub{instances: map[string]*client.AppInstance{}}
			server := httptest.NewTLSServer(hub)
			env.Defer(server.Close)
			env.Setenv("HUB", server.URL)
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("PROJECT_ID", projectID)
			env.Setenv("INSTANCE_ID", instanceID)
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
			if err := os.WriteFile(filepath.Join(env.WorkDir, "ca.pem"), ca, 0o600); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(env.WorkDir, "token"), []byte("good-token\n"), 0o600)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// exits CODE gpuaas ARGS…: the command must end with this exit code.
			"exits": func(ts *testscript.TestScript, _ bool, args []string) {
				err := ts.Exec(args[1], args[2:]...)
				code := "0"
				if err != nil {
					code = strings.TrimPrefix(err.Error(), "exit status ")
				}
				if code != args[0] {
					ts.Fatalf("exit code %s instead of %s", code, args[0])
				}
			},
			// mode FILE OCTAL
			"mode": func(ts *testscript.TestScript, _ bool, args []string) {
				info, err := os.Stat(ts.MkAbs(args[0]))
				ts.Check(err)
				if got := info.Mode().Perm().String(); got != args[1] {
					ts.Fatalf("%s has mode %s", args[0], got)
				}
			},
		},
	})
}

// fakeHub answers as the contract says, for as much as the scripts need.
type fakeHub struct {
	mu        sync.Mutex
	instances map[string]*client.AppInstance
	looks     int
	keys      []string
	disabled  bool
}

func (h *fakeHub) user() client.User {
	u := client.User{
		ID: userID, OrgID: orgID, Email: "ada@acme.example", DisplayName: "Ada",
		Roles: []client.UserRole{"org_member"}, Status: "active",
	}
	if h.disabled {
		u.Status = "disabled"
	}
	return u
}

func (h *fakeHub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	path := strings.TrimPrefix(r.URL.Path, "/api/v1")
	w.Header().Set("X-Request-ID", r.Header.Get("X-Request-ID"))
	if path != "/auth/service-account/token" {
		switch strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ") {
		case "good-token", "minted":
		default:
			refuse(w, r, http.StatusUnauthorized, "credential_invalid", "Log in again.")
			return
		}
	}
	project := "/projects/" + projectID
	switch route := r.Method + " " + path; route {
	case "GET /auth/whoami":
		who := client.Whoami{Type: "user", ID: orgID, DisplayName: "Ada", OrgID: orgID, Permissions: []string{}}
		if r.Header.Get("Authorization") == "Bearer minted" {
			who = client.Whoami{
				Type: "service_account", ID: accountID, OrgID: orgID, ProjectID: projectID,
				Permissions: []string{},
			}
		}
		answer(w, 200, who)
	case "POST /auth/service-account/token":
		answer(w, 200, client.Token{AccessToken: "minted", TokenType: "Bearer", ExpiresIn: 900})
	case "GET /projects":
		answer(w, 200, client.ProjectList{Items: []client.Project{{
			ID: projectID, OrgID: orgID, Slug: "dev",
			DisplayName: "Dev\x1b[2J",
		}}})
	case "POST " + project + "/service-accounts":
		answer(w, 201, h.account())
	case "GET /apps/catalog":
		// Two pages, so that paging is walked.
		if r.URL.Query().Get("cursor") == "" {
			answer(w, 200, client.AppList{Items: []client.App{{Slug: "jupyter", LatestVersion: "2"}}, NextCursor: "next"})
			return
		}
		answer(w, 200,
			client.AppList{Items: []client.App{{Slug: "demo", LatestVersion: "1.0.0", RuntimeBackend: "launchable_oci"}}})
	case "POST " + project + "/allocations":
		answer(w, 201, client.Allocation{ID: allocation, Status: "active", NodeID: nodeID, CPUCores: 1, FreeCPUCores: "1"})
	case "GET /orgs/" + orgID + "/users":
		answer(w, 200, client.UserList{Items: []client.User{h.user()}})
	case "POST /users/" + userID + "/disable":
		h.disabled = true
		answer(w, 200, h.user())
	case "PUT /users/" + userID + "/roles":
		var body client.UserRolesPut
		_ = json.NewDecoder(r.Body).Decode(&body)
		u := h.user()
		u.Roles = body.Roles
		answer(w, 200, u)
	case "GET /users/" + userID:
		answer(w, 200, h.user())
	case "DELETE /orgs/" + orgID + "/users/" + userID, "DELETE /users/" + userID + "/tokens", "DELETE /users/" + orgID +
		"/tokens/" + tokenID:
		w.WriteHeader(http.StatusNoContent)
	case "GET /users/" + orgID + "/tokens":
		answer(w, 200, client.UserTokenList{Items: []client.UserTokenInfo{{
			ID: tokenID, UserID: orgID,
			Description: "laptop",
		}}})
	case "GET " + project + "/roles":
		answer(w, 200, client.ProjectRolesList{Items: []client.ProjectRoles{{
			UserID: userID, Email: "ada@acme.example",
			Roles: []client.ProjectRole{"viewer"},
		}}})
	case "PUT " + project + "/roles/" + userID:
		var body client.ProjectRolesPut
		_ = json.NewDecoder(r.Body).Decode(&body)
		answer(w, 200, client.ProjectRoles{UserID: userID, Email: "ada@acme.example", Roles: body.Roles})
	case "GET /orgs/" + orgID + "/quota":
		answer(w, 200, client.OrgQuota{OrgID: orgID, Items: []client.OrgQuotaItem{{
			Name: "allocations", Limit: 5, Used: 3,
			DefaultLimit: 9,
		}}})
	case "PUT /admin/orgs/" + orgID + "/quota":
		var body client.OrgQuotaPut
		_ = json.NewDecoder(r.Body).Decode(&body)
		q := client.OrgQuota{OrgID: orgID}
		for _, l := range body.Limits {
			q.Items = append(q.Items, client.OrgQuotaItem{Name: l.Name, Limit: l.Limit})
		}
		answer(w, 200, q)
	case "GET /orgs/" + orgID + "/app-slugs":
		answer(w, 200, client.OwnedSlugList{Items: []client.OwnedSlug{{Slug: "vllm", OrgID: orgID}}})
	case "DELETE /orgs/" + orgID + "/app-slugs/vllm":
		w.WriteHeader(http.StatusNoContent)
	case "PUT /admin/apps/catalog/vllm/owner":
		answer(w, 200, client.OwnedSlug{Slug: "vllm"})
	case "GET /admin/nodes":
		answer(w, 200, client.NodeList{Items: []client.Node{{ID: nodeID, Hostname: "node-1", Status: "online"}}})
	case "POST /admin/nodes/" + nodeID + "/ban":
		refuse(w, r, http.StatusForbidden, "forbidden", "You may not do this.")
	case "POST " + project + "/app-instances":
		h.create(w, r)
	case "GET " + project + "/app-instances":
		list := client.AppInstanceList{Items: []client.AppInstance{}}
		for _, i := range h.instances {
			list.Items = append(list.Items, *i)
		}
		answer(w, 200, list)
	case "GET " + project + "/app-instances/" + instanceID:
		h.look(w, r)
	case "POST " + project + "/app-instances/" + instanceID + "/decommission":
		h.looks, h.instances[instanceID].Status = 0, "decommissioning"
		answer(w, 202, h.instances[instanceID])
	case "GET " + project + "/app-instances/" + instanceID + "/events":
		answer(w, 200, client.EventList{Items: []client.Event{
			{Type: "apps.instance.requested", Time: time.Unix(1_800_000_000, 0), Data: client.EventData{
				To:            "requested",
				CorrelationID: "c-1",
			}},
			{Type: "apps.instance.running", Time: time.Unix(1_800_000_001, 0), Data: client.EventData{
				From: "deploying",
				To:   "running", CorrelationID: "c-1",
			}},
		}})
	case "GET " + project + "/app-instances/" + instanceID + "/logs":
		_, _ = w.Write([]byte("line " + r.URL.Query().Get("tail_lines") + "\n"))
	case "GET /billing/usage":
		answer(w, 200, client.UsageRecordList{Items: []client.UsageRecord{{
			Meter: "session_seconds", Quantity: "12.5",
			UsageUnit: "second", AppInstanceID: r.URL.Query().Get("app_instance_id"),
			ProjectID: r.URL.Query().Get("project_id"),
		}}})
	case "GET /audit":
		answer(w, 200, client.AuditRowList{Items: []client.AuditRow{{
			Actor: client.AuditActor{Type: "user", ID: "u-1"}, Action: r.URL.Query().Get("action"),
			Outcome: client.AuditOutcome(r.URL.Query().Get("outcome")),
			Reason:  "forbidden", ResourceType: "app_instance", ResourceID: "i-1", CorrelationID: "c-1",
			At: time.Unix(1_800_000_000, 0),
		}}})
	case "GET /billing/ledger":
		answer(w, 200, client.PostingList{Items: []client.Posting{{
			PostingID: "p-1", Kind: "usage",
			Entries: []client.LedgerEntry{
				{Account: "hold:h", Amount: "-0.5", Currency: "EUR"}, {Account: "platform:revenue", Amount: "0.5", Currency: "EUR"},
			},
		}}})
	default:
		refuse(w, r, http.StatusNotFound, "not_found", "There is no such resource.")
	}
}

func (h *fakeHub) create(w http.ResponseWriter, r *http.Request) {
	var body client.AppInstanceCreate
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.AppSlug != "demo" {
		refuse(w, r, http.StatusConflict, "placement_required", "Say where.",
			client.ProblemField{Pointer: "/placement_intent", Reason: "is missing"})
		return
	}
	h.keys = append(h.keys, r.Header.Get("X-Idempotency-Key"))
	h.looks = 0
	h.instances[instanceID] = &client.AppInstance{
		ID: instanceID, AppSlug: body.AppSlug, Version: body.Version, DisplayName: body.DisplayName, Status: "requested",
		Parameters:      body.Parameters,
		PlacementIntent: body.PlacementIntent, Config: map[string]any{}, CorrelationID: r.Header.Get("X-Request-ID"),
	}
	answer(w, 201, h.instances[instanceID])
}

// look moves the instance on at every second look.
func (h *fakeHub) look(w http.ResponseWriter, r *http.Request) {
	i, ok := h.instances[instanceID]
	if !ok {
		refuse(w, r, http.StatusNotFound, "not_found", "There is no such resource.")
		return
	}
	if h.looks++; h.looks%2 == 0 {
		next := map[client.AppInstanceStatus]client.AppInstanceStatus{
			"requested": "deploying", "deploying": "running",
			"decommissioning": "decommissioned",
		}
		if i.DisplayName == "doomed" && i.Status == "deploying" {
			i.Status, i.StatusReason = "failed", "image_pull_failed"
		} else if s, ok := next[i.Status]; ok {
			i.Status = s
		}
	}
	if i.Status == "running" {
		i.Endpoints = []client.Endpoint{{Name: "http", URL: "http://127.0.0.1:20000", NodeID: nodeID, Access: "private"}}
	}
	answer(w, 200, i)
}

func (h *fakeHub) account() client.ServiceAccount {
	return client.ServiceAccount{
		ID: accountID, ProjectID: projectID, Slug: "ci", Name: "ci", Role: "app_operator",
		Status: "active", Key: client.ServiceAccountKey{
			KeyID: accountID, Algorithm: "Ed25519", PrivateKeyPem: testKey,
		},
	}
}

// testKey is good for nothing: it was made for these scripts.
const testKey = "-----BEGIN PRIVATE " +
	"KEY-----\nMC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f\n-----END PRIVATE KEY-----\n"

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, r *http.Request, status int, code, detail string, fields ...client.ProblemField) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(client.Problem{
		Status: int32(status), Code: code, Detail: detail, Errors: fields,
		CorrelationID: r.Header.Get("X-Request-ID"),
	})
}
