package cli_test

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/auditchain"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// fakeHub answers as the contract says, for as much as the scripts need.
type fakeHub struct {
	// polled says that a device login was asked about once.
	polled bool
	// refreshed is the idempotency key of the refresh whose answer was cut off.
	refreshed string
	mu        sync.Mutex
	instances map[string]*client.AppInstance
	reads     int
	keys      []string
	disabled  bool
	storage   storage
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

func customRole() client.CustomRole {
	return client.CustomRole{
		ID: "0192f0c0-0000-7000-8000-000000000077", OrgID: orgID, Slug: "restarter", DisplayName: "Restarter",
		Permissions: []string{"apps.instance.stop"},
	}
}

func (h *fakeHub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	path := strings.TrimPrefix(r.URL.Path, "/api/v1")
	w.Header().Set("X-Request-ID", r.Header.Get("X-Request-ID"))
	switch path {
	case "/auth/service-account/token", "/auth/login", "/auth/refresh", "/auth/invitations/accept", "/auth/oidc/device",
		"/auth/oidc/device/finish":
	default:
		switch strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ") {
		case "good-token", "minted":
		default:
			refuse(w, r, http.StatusUnauthorized, "credential_invalid", "Log in again.")
			return
		}
	}
	route := r.Method + " " + path
	for _, serve := range []func(http.ResponseWriter, *http.Request, string) bool{
		h.serveUsers, h.serveLogins, h.serveMembers, serveCustomRoles, serveWebhooks, serveVersions, h.serveCatalog,
		h.serveInstances,
		h.storage.serveVolumes, h.storage.serveSecrets, h.storage.serveEnvironments, serveFleet,
	} {
		if serve(w, r, route) {
			return
		}
	}
	refuse(w, r, http.StatusNotFound, "not_found", "There is no such resource.")
}

// serveCustomRoles answers for the roles that the org has made.
func serveCustomRoles(w http.ResponseWriter, r *http.Request, route string) bool {
	switch route {
	case "GET /orgs/" + orgID + "/roles":
		answer(w, 200, client.CustomRoleList{Items: []client.CustomRole{customRole()}})
	case "POST /orgs/" + orgID + "/roles", "GET /orgs/" + orgID + "/roles/" + customRole().ID:
		answer(w, 200, customRole())
	case "PUT /orgs/" + orgID + "/roles/" + customRole().ID:
		var body client.CustomRolePut
		_ = json.NewDecoder(r.Body).Decode(&body)
		out := customRole()
		out.Permissions = body.Permissions
		answer(w, 200, out)
	case "GET /projects/" + projectID:
		answer(w, 200, client.Project{ID: projectID, OrgID: orgID, Slug: "dev"})
	case "POST /admin/users":
		var body client.UserCreate
		_ = json.NewDecoder(r.Body).Decode(&body)
		answer(w, 201, client.User{ID: userID, Email: body.Email, CustomRoles: body.CustomRoles})
	case "DELETE /orgs/" + orgID + "/roles/" + customRole().ID:
		w.WriteHeader(http.StatusNoContent)
	default:
		return false
	}
	return true
}

// serveUsers answers for logins, users, roles and service accounts.
func (h *fakeHub) serveUsers(w http.ResponseWriter, r *http.Request, route string) bool {
	const project = "/projects/" + projectID
	switch route {
	case "GET /auth/whoami":
		who := client.Whoami{Type: "user", ID: orgID, DisplayName: "Ada", OrgID: orgID, Permissions: []string{}}
		if r.Header.Get("Authorization") == "Bearer minted" {
			who = client.Whoami{
				Type: "service_account", ID: accountID, OrgID: orgID, ProjectID: projectID,
				Permissions: []string{},
			}
		}
		answer(w, 200, who)
	case "POST /auth/explain":
		var body client.AccessQuestion
		_ = json.NewDecoder(r.Body).Decode(&body)
		out := client.AccessExplanation{Permission: body.Permission, Reason: "role_missing"}
		if body.ProjectID == projectID && body.Principal.ID == "" {
			out.Allowed, out.Reason = true, "permitted"
			out.Rules = []client.AccessRule{{ID: "viewer", Description: "A viewer reads."}}
			out.RolesWithPermission = []string{"org_admin", "viewer"}
		}
		answer(w, 200, out)
	case "POST /auth/service-account/token":
		answer(w, 200, client.Token{AccessToken: "minted", TokenType: "Bearer", ExpiresIn: 900})
	case "POST " + project + "/service-accounts":
		answer(w, 201, h.account())
	case "GET " + project + "/service-accounts":
		answer(w, 200, client.ServiceAccountList{Items: []client.ServiceAccount{h.account()}})
	case "POST " + project + "/service-accounts/" + accountID + "/rotate-key":
		answer(w, 201, h.rotated(r))
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
		if body.CustomRoles != nil {
			u.CustomRoles = *body.CustomRoles
		}
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
	default:
		return false
	}
	return true
}

// serveWebhooks answers for webhooks.
func serveWebhooks(w http.ResponseWriter, r *http.Request, route string) bool {
	const hooks = "/orgs/" + orgID + "/webhooks"
	hook := client.Webhook{
		ID: userID, OrgID: orgID, URL: "https://hooks.example/a", Types: []string{"apps.instance"}, Status: "disabled",
		DisabledReason: "failing", LastError: "status 500",
	}
	switch route {
	case "POST " + hooks:
		_ = json.NewDecoder(r.Body).Decode(&hook)
		hook.Secret = "whsec_first"
		answer(w, 201, hook)
	case "GET " + hooks:
		answer(w, 200, client.WebhookList{Items: []client.Webhook{hook}})
	case "GET " + hooks + "/" + userID:
		answer(w, 200, hook)
	case "POST " + hooks + "/" + userID + "/enable", "POST " + hooks + "/" + userID + "/replay":
		hook.Status, hook.DisabledReason = "active", ""
		answer(w, 202, hook)
	case "POST " + hooks + "/" + userID + "/rotate-secret":
		var body client.WebhookSecretRotate
		_ = json.NewDecoder(r.Body).Decode(&body)
		hook.Secret = "whsec_" + strconv.FormatInt(*body.OverlapSeconds, 10)
		answer(w, 200, hook)
	case "GET " + hooks + "/" + userID + "/dead-letters":
		answer(w, 200, client.WebhookDeadLetterList{Items: []client.WebhookDeadLetter{{
			EventID: tokenID, Type: "apps.instance.failed", Tries: 10, LastError: "status 500",
		}}})
	case "DELETE " + hooks + "/" + userID:
		w.WriteHeader(http.StatusNoContent)
	default:
		return false
	}
	return true
}

// serveVersions answers what changes the status of a version.
func serveVersions(w http.ResponseWriter, r *http.Request, route string) bool {
	const versions = "/admin/apps/catalog/demo/versions/1.0.0/"
	switch route {
	case "POST " + versions + "promote":
		var body client.AppVersionPromote
		_ = json.NewDecoder(r.Body).Decode(&body)
		answer(w, 200, client.AppVersion{
			AppSlug: "demo", Version: "1.0.0", Status: client.AppVersionStatus(body.Status),
			CanaryPercent: body.CanaryPercent,
		})
	case "POST " + versions + "publish":
		answer(w, 200, client.AppVersion{AppSlug: "demo", Version: "1.0.0", Status: "active"})
	case "POST " + versions + "deprecate":
		answer(w, 200, client.AppVersion{AppSlug: "demo", Version: "1.0.0", Status: "deprecated"})
	case "POST " + versions + "retire":
		var body client.AppVersionMove
		_ = json.NewDecoder(r.Body).Decode(&body)
		if body.Reason != "" {
			answer(w, 200, client.AppVersion{AppSlug: "demo", Version: "1.0.0", Status: "retired"})
		}
	default:
		return false
	}
	return true
}

// serveCatalog answers for projects, apps, quotas, capacity and nodes.
func (h *fakeHub) serveCatalog(w http.ResponseWriter, r *http.Request, route string) bool {
	const project = "/projects/" + projectID
	switch route {
	case "GET /projects":
		answer(w, 200, client.ProjectList{Items: []client.Project{{
			ID: projectID, OrgID: orgID, Slug: "dev",
			DisplayName: "Dev\x1b[2J",
		}}})
	case "GET /apps/catalog":
		// Two pages, so that paging is walked.
		if r.URL.Query().Get("cursor") == "" {
			answer(w, 200, client.AppList{Items: []client.App{{Slug: "jupyter", LatestVersion: "2"}}, NextCursor: "next"})
			return true
		}
		answer(w, 200,
			client.AppList{Items: []client.App{{Slug: "demo", LatestVersion: "1.0.0", RuntimeBackend: "launchable_oci"}}})
	case "GET " + project + "/app-artifacts/" + artifactID:
		answer(w, 200, client.Artifact{ID: artifactID, Repository: "org/acme/demo/runtime", Status: "active"})
	case "POST " + project + "/app-artifacts/" + artifactID + "/verify":
		answer(w, 200, client.Artifact{ID: artifactID, TrustState: "verified"})
	case "POST " + project + "/app-artifacts/" + artifactID + "/promote":
		var body client.ArtifactPromote
		_ = json.NewDecoder(r.Body).Decode(&body)
		answer(w, 200, client.Artifact{ID: artifactID, Channel: body.Channel})
	case "POST " + project + "/app-artifacts/" + artifactID + "/deprecate":
		answer(w, 200, client.Artifact{ID: artifactID, Status: "deprecated"})
	case "POST " + project + "/app-artifacts/" + artifactID + "/retire",
		"POST " + project + "/app-artifacts/" + artifactID + "/revoke":
		var body client.ArtifactWithdraw
		_ = json.NewDecoder(r.Body).Decode(&body)
		status := map[string]client.ArtifactStatus{"superseded": "retired", "backdoor": "revoked"}[body.Reason]
		answer(w, 200, client.Artifact{ID: artifactID, Repository: "org/acme/demo/runtime", Status: status})
	case "POST " + project + "/allocations":
		answer(w, 201, client.Allocation{ID: allocation, Status: "active", NodeID: nodeID, CPUCores: 1, FreeCPUCores: "1"})
	case "PUT " + project + "/allocations/" + allocation + "/ssh-keys/app":
		var put client.SSHKeySetPut
		_ = json.NewDecoder(r.Body).Decode(&put)
		set := client.SSHKeySet{}
		for _, k := range put.Keys {
			set.Keys = append(set.Keys, client.SSHKeyEntry{User: k.User, PublicKey: k.PublicKey, Fingerprint: "SHA256:x"})
		}
		answer(w, 200, set)
	case "GET " + project + "/allocations/" + allocation + "/ssh-keys/operator":
		answer(w, 200, client.SSHKeySet{Keys: []client.SSHKeyEntry{{User: "ubuntu", Fingerprint: "SHA256:y"}}})
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
	default:
		return false
	}
	return true
}

// serveInstances answers for app instances, bills and the audit log.
func (h *fakeHub) serveInstances(w http.ResponseWriter, r *http.Request, route string) bool {
	const project = "/projects/" + projectID
	switch route {
	case "POST " + project + "/app-instances":
		h.create(w, r)
	case "GET " + project + "/app-instances":
		list := client.AppInstanceList{Items: []client.AppInstance{}}
		for _, i := range h.instances {
			list.Items = append(list.Items, *i)
		}
		answer(w, 200, list)
	case "GET " + project + "/app-instances/" + instanceID:
		h.readInstance(w, r)
	case "POST " + project + "/app-instances/" + instanceID + "/decommission":
		h.reads, h.instances[instanceID].Status = 0, "decommissioning"
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
			At: time.Unix(1_800_000_000, 0), SourceAddress: "192.0.2.7",
		}}})
	case "GET /audit/export":
		w.Header().Set("Content-Type", "application/jsonl")
		_, _ = w.Write([]byte(exported(r.URL.Query().Get("org_id"))))
	case "GET /billing/ledger":
		answer(w, 200, client.PostingList{Items: []client.Posting{{
			PostingID: "p-1", Kind: "usage",
			Entries: []client.LedgerEntry{
				{Account: "hold:h", Amount: "-0.5", Currency: "EUR"}, {Account: "platform:revenue", Amount: "0.5", Currency: "EUR"},
			},
		}}})
	default:
		return false
	}
	return true
}

func (h *fakeHub) create(w http.ResponseWriter, r *http.Request) {
	var body client.AppInstanceCreate
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.AppSlug != "demo" {
		refuse(w, r, http.StatusConflict, "placement_required", "Say where.",
			client.ProblemField{Pointer: "/placement_intent", Reason: "is missing"})
		return
	}
	h.keys = append(h.keys, r.Header.Get("X-Idempotency-Key"))
	h.reads = 0
	h.instances[instanceID] = &client.AppInstance{
		ID: instanceID, AppSlug: body.AppSlug, Version: body.Version, DisplayName: body.DisplayName, Status: "requested",
		Parameters:      body.Parameters,
		PlacementIntent: body.PlacementIntent, Config: map[string]any{}, CorrelationID: r.Header.Get("X-Request-ID"),
	}
	answer(w, 201, h.instances[instanceID])
}

// readInstance moves the instance on at every second read.
func (h *fakeHub) readInstance(w http.ResponseWriter, r *http.Request) {
	i, ok := h.instances[instanceID]
	if !ok {
		refuse(w, r, http.StatusNotFound, "not_found", "There is no such resource.")
		return
	}
	if h.reads++; h.reads%2 == 0 {
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
		i.Members = []client.Member{{Services: []client.MemberService{
			{Name: "db", Status: "unhealthy", StatusReason: "out_of_memory", Restarts: 2},
			{Name: "web", Status: "ready", DependsOn: []client.ServiceDependency{
				{Service: "db", Condition: "service_healthy"},
			}},
		}}}
		i.Endpoints = []client.Endpoint{{
			Name: "http", Service: "web", URL: "http://127.0.0.1:20000", NodeID: nodeID, Access: "private",
			Instructions: client.AccessInstructions{PortForward: "gpuaas port-forward x http"},
		}}
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

// rotated is the account after a rotation that asked for an overlap.
func (h *fakeHub) rotated(r *http.Request) client.ServiceAccount {
	var body client.ServiceAccountKeyRotation
	_ = json.NewDecoder(r.Body).Decode(&body)
	account := h.account()
	account.Keys = []client.ServiceAccountPublicKey{
		{KeyID: orgID, ExpiresAt: time.Unix(body.OverlapSeconds, 0)}, {KeyID: accountID},
	}
	return account
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

// exported is a chain of three records of an org. Go writes the members of a map as RFC 8785 wants them.
func exported(org string) string {
	var lines strings.Builder
	previous := auditchain.First
	for number := 1; number <= 3; number++ {
		record := map[string]any{"id": "a", "org_id": org, "number": number, "previous_hash": previous}
		raw, _ := json.Marshal(record)
		previous, _ = auditchain.Hash(raw)
		record["hash"] = previous
		raw, _ = json.Marshal(record)
		lines.Write(append(raw, '\n'))
	}
	return lines.String()
}
