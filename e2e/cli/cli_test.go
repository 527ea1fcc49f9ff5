package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// An operator takes an app through its lifecycle with the command alone.
func TestTheCommandRunsAnAppFromLoginToLedger(t *testing.T) {
	w := harness.NewPlatform(t)
	s := w.Shell("admin")
	ready := w.Hub.Ready
	s.Fails(2, "gpuaas login", "nodes", "list")
	require.Contains(t, s.MustRun("login", "--name", "e2e", "--url", ready.APIURL, "--ca-file", ready.CAFile,
		"--token-file", ready.TokenFile), "Logged in to "+ready.APIURL)
	info, err := os.Stat(filepath.Join(w.Dir, "admin", ".config", "gpuaas", "config.yaml"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	require.Contains(t, s.MustRun("context", "list"), "e2e")

	requireCatalogAndProjects(w, s)
	ci := loginServiceAccount(w, s)

	allocations := harness.AsJSON[harness.Items[client.Allocation]](s, "allocations", "list", "--project", "main").Items
	require.Len(t, allocations, 1)
	more := harness.AsJSON[client.Allocation](s, "allocations", "create", "--project", "main", "--node",
		w.Agent.Ready.NodeID,
		"--cpu", "1", "--memory-mib", "64")
	require.Equal(t, more.ID, harness.AsJSON[client.Allocation](s, "allocations", "get", more.ID, "--project", "main").ID)
	s.MustRun("allocations", "release", more.ID, "--project", "main")

	// The account's project is known; create answers at once, watch waits.
	i := harness.AsJSON[client.AppInstance](ci, "instances", "create", harness.AppSlug, "--name", "cli", "--allocation",
		allocations[0].ID)
	require.Equal(t, client.AppInstanceStatusRequested, i.Status)
	i = harness.AsJSON[client.AppInstance](ci, "instances", "watch", "cli")
	require.Equal(t, client.AppInstanceStatusRunning, i.Status)
	w.RequireAnswer(i)
	require.Equal(t, i.ID, harness.AsJSON[client.AppInstance](ci, "instances", "get", "cli").ID)
	requireEveryFormat(t, ci, i.ID, "instances", "list")
	require.Contains(t, ci.MustRun("instances", "events", "cli"), "apps.instance.running")
	w.Eventually("the event has its position", func() error {
		events := ci.MustRun("events", "--type", "apps.instance")
		return harness.Pending(nil, strings.Contains(events, "apps.instance.running"))
	})
	ci.AwaitLog("\n", "instances", "logs", "cli", "--tail", "5")
	requireEveryFormat(t, s, w.Agent.Ready.NodeID, "nodes", "list")
	require.Equal(t, client.NodeStatusOnline, harness.AsJSON[client.Node](s, "nodes", "get", w.Agent.Ready.NodeID).Status)

	w.Eventually("the command shows usage", func() error {
		usage := harness.AsJSON[harness.Items[client.UsageRecord]](s, "usage", "--instance", i.ID).Items
		return harness.Pending(nil, slices.ContainsFunc(usage, func(u client.UsageRecord) bool {
			return u.Meter == "session_seconds" && u.PostingID != ""
		}))
	})
	requireEveryFormat(t, s, i.ID, "usage", "--instance", i.ID)
	hours := harness.AsJSON[harness.Items[client.UsageHour]](s, "usage", "hourly", "--instance", i.ID).Items
	require.True(t, slices.ContainsFunc(hours, func(h client.UsageHour) bool {
		return h.Meter == "session_seconds" && h.Charged != "0"
	}), "%v", hours)
	requireEveryFormat(t, s, i.ID, "usage", "hourly", "--instance", i.ID)
	requireLocalCommands(w, s, i)
	requireExitCodes(t, s, ci)

	require.Equal(t, client.AppInstanceStatusDecommissioned, harness.AsJSON[client.AppInstance](ci, "instances",
		"decommission", "cli", "--wait").Status)
	w.Eventually("the command shows all postings of the instance", func() error {
		postings := harness.AsJSON[harness.Items[client.Posting]](s, "ledger", "--instance", i.ID).Items
		return harness.Pending(nil, harness.HasKind(postings, client.PostingKindHoldClosed) && harness.HasKind(postings,
			client.PostingKindUsage))
	})
	for _, p := range harness.AsJSON[harness.Items[client.Posting]](s, "ledger", "--instance", i.ID).Items {
		sums, err := scenario.Sums(p)
		require.NoError(t, err)
		for _, sum := range sums {
			require.Zero(t, sum.Sign())
		}
	}
	require.Contains(t, s.MustRun("ledger", "--instance", i.ID, "--project", "main"), "usage")
	s.Fails(6, "", "instances", "decommission", i.ID, "--project", "main")
}

// requireCatalogAndProjects lists what the tenant may run, and where.
func requireCatalogAndProjects(w *harness.Testbed, s *harness.Shell) {
	w.T.Helper()
	apps := harness.AsJSON[harness.Items[client.App]](s, "apps", "list").Items
	require.Len(w.T, apps, 1)
	require.Equal(w.T, "1.0.0", apps[0].LatestVersion)
	require.Contains(w.T, s.MustRun("apps", "versions", harness.AppSlug), "active")
	require.NotEmpty(w.T, harness.AsJSON[client.Registry](s, "apps", "registry").RegistryHost)
	projects := harness.AsJSON[harness.Items[client.Project]](s, "projects", "list").Items
	require.Len(w.T, projects, 1)
	require.Equal(w.T, w.Tenant.Project.ID, projects[0].ID)
	require.Equal(w.T, projects[0], harness.AsJSON[client.Project](s, "projects", "get", "--project", "main"))
}

// loginServiceAccount makes a service account with its key in a file, and logs in with that file.
func loginServiceAccount(w *harness.Testbed, s *harness.Shell) *harness.Shell {
	w.T.Helper()
	ready := w.Hub.Ready
	file := filepath.Join(w.Dir, "admin", "ci.json")
	require.NotContains(w.T, s.MustRun("sa", "create", "ci", "--project", "main", "--save", file, "-o", "json"),
		"PRIVATE KEY")
	info, err := os.Stat(file)
	require.NoError(w.T, err)
	require.EqualValues(w.T, 0o600, info.Mode().Perm())
	require.Contains(w.T, s.MustRun("sa", "list", "--project", "main"), "ci")
	ci := w.Shell("ci")
	ci.MustRun("login", "--url", ready.APIURL, "--ca-file", ready.CAFile, "--service-account", file)
	require.Equal(w.T, client.WhoamiTypeServiceAccount, harness.AsJSON[client.Whoami](ci, "whoami").Type)
	return ci
}

// An admin manages people, quotas, app slugs and the audit trail with the command alone, without a node.
func TestTheCommandManagesPeopleQuotasAndNames(t *testing.T) {
	w := harness.New(t)
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	s := w.AdminShell()
	ada := requireUsersAndTokens(w, s)
	requireRoles(t, s, ada)
	requireQuotasAndSlugs(w, s)
	requireAudit(t, s, ada)
	require.Empty(t, harness.AsJSON[harness.Items[client.RecoveryFinding]](s, "recovery", "findings").Items)
	require.Empty(t, harness.AsJSON[harness.Items[client.RecoveringNode]](s, "recovery", "waiting").Items)
}

const adaEmail = "ada@acme.example"

// requireUsersAndTokens makes a user who logs in, then revokes the user's tokens and disables the user.
func requireUsersAndTokens(w *harness.Testbed, s *harness.Shell) client.User {
	w.T.Helper()
	ada := harness.AsJSON[client.User](s, "users", "create", adaEmail, "--org", "acme", "--role", "org_member")
	require.Equal(w.T, w.Tenant.Org.ID, ada.OrgID)
	requireEveryFormat(w.T, s, ada.ID, "users", "list", "--org", "acme")
	token := harness.AsJSON[client.UserToken](s, "users", "token", adaEmail, "--description", "laptop", "--life", "1h")
	more := harness.AsJSON[client.UserToken](s, "users", "token", adaEmail)

	own := w.Shell("ada")
	file := filepath.Join(w.Dir, "ada", "token")
	require.NoError(w.T, os.WriteFile(file, []byte(token.Token), 0o600))
	own.MustRun("login", "--url", w.Hub.Ready.APIURL, "--ca-file", w.Hub.Ready.CAFile, "--token-file", file)
	requireEveryFormat(w.T, own, token.ID, "tokens", "list")
	listed := own.MustRun("tokens", "list")
	require.Contains(w.T, listed, "laptop")
	require.NotContains(w.T, listed, token.Token)
	own.MustRun("tokens", "revoke", more.ID)
	require.Len(w.T, harness.AsJSON[harness.Items[client.UserTokenInfo]](s, "tokens", "list", "--user", adaEmail).Items, 1)
	own.Fails(4, "correlation id", "orgs", "set-quota", "acme", "users=1")
	own.Fails(2, "--all", "tokens", "revoke")

	require.Equal(w.T, client.UserStatusDisabled, harness.AsJSON[client.User](s, "users", "disable", adaEmail).Status)
	own.Fails(3, "", "whoami")
	require.Equal(w.T, client.UserStatusActive, harness.AsJSON[client.User](s, "users", "enable", adaEmail).Status)
	require.Equal(w.T, ada.ID, harness.AsJSON[client.Whoami](own, "whoami").ID)
	s.MustRun("tokens", "revoke", "--all", "--user", adaEmail)
	own.Fails(3, "", "whoami")
	return ada
}

// requireRoles changes what the user may do in the org and in the project, and removes the user in the end.
func requireRoles(t *testing.T, s *harness.Shell, ada client.User) {
	t.Helper()
	changed := harness.AsJSON[client.User](s, "users", "set-roles", adaEmail, "org_billing", "app_publisher")
	require.ElementsMatch(t, []client.UserRole{client.UserRoleOrgBilling, client.UserRoleAppPublisher}, changed.Roles)
	require.Equal(t, changed.Roles, harness.AsJSON[client.User](s, "users", "get", adaEmail).Roles)
	s.Fails(7, "", "users", "set-roles", adaEmail, "emperor")

	bound := harness.AsJSON[client.ProjectRoles](s, "roles", "set", adaEmail, "project_admin", "--project", "main")
	require.Equal(t, []client.ProjectRole{client.ProjectRoleProjectAdmin}, bound.Roles)
	requireEveryFormat(t, s, ada.ID, "roles", "list", "--project", "main")
	require.Empty(t, harness.AsJSON[client.ProjectRoles](s, "roles", "set", adaEmail, "--project", "main").Roles)
	require.Empty(t, harness.AsJSON[harness.Items[client.ProjectRoles]](s, "roles", "list", "--project", "main").Items)

	s.MustRun("users", "remove", adaEmail)
	s.Fails(5, "", "users", "get", ada.ID)
}

// requireQuotasAndSlugs sets a quota and exceeds it, and tries to release the slug of an app.
func requireQuotasAndSlugs(w *harness.Testbed, s *harness.Shell) {
	w.T.Helper()
	quota := func(list harness.Items[client.OrgQuotaItem], name client.QuotaName) client.OrgQuotaItem {
		at := slices.IndexFunc(list.Items, func(q client.OrgQuotaItem) bool { return q.Name == name })
		require.GreaterOrEqual(w.T, at, 0, name)
		return list.Items[at]
	}
	before := quota(harness.AsJSON[harness.Items[client.OrgQuotaItem]](s, "orgs", "quota", "acme"),
		client.QuotaNameAppSlugs)
	require.Equal(w.T, before.DefaultLimit, before.Limit)
	intent := client.PublishIntentCreate{
		AppSlug: "spare", AppVersion: "1.0.0", ArtifactName: "runtime",
		Channel: client.ChannelDev,
	}
	_, err := client.Read[client.PublishIntent](w.Tenant.Admin.CreatePublishIntent(w.Ctx, w.Tenant.Project.ID, intent))
	require.NoError(w.T, err)
	after := quota(harness.AsJSON[harness.Items[client.OrgQuotaItem]](s, "orgs", "set-quota", "acme", "app_slugs=1"),
		client.QuotaNameAppSlugs)
	require.EqualValues(w.T, 1, after.Limit)
	require.Equal(w.T, before.Used+1, after.Used)
	intent.AppSlug = "second"
	_, err = client.Read[client.PublishIntent](w.Tenant.Admin.CreatePublishIntent(w.Ctx, w.Tenant.Project.ID, intent))
	require.ErrorContains(w.T, err, "app_slugs")
	s.Fails(2, "NAME=LIMIT", "orgs", "set-quota", "acme", "app_slugs")
	s.Fails(7, "", "orgs", "set-quota", "acme", "wishes=3")

	// An hour passes before a slug is free: its publish intent is open.
	s.MustRun("orgs", "create", "globex")
	slugs := harness.AsJSON[harness.Items[client.OwnedSlug]](s, "apps", "slugs", "--org", "acme").Items
	require.Len(w.T, slugs, 1)
	require.Equal(w.T, "spare", slugs[0].Slug)
	require.False(w.T, slugs[0].Published)
	s.Fails(6, "app_slug_in_use", "apps", "transfer-slug", "spare", "--org", "globex")
	s.Fails(6, "app_slug_in_use", "apps", "release-slug", "spare", "--org", "acme")
	s.Fails(5, "", "apps", "release-slug", "spare", "--org", "globex")
}

// requireAudit finds the earlier actions in the audit trail by each filter.
func requireAudit(t *testing.T, s *harness.Shell, ada client.User) {
	t.Helper()
	requireEveryFormat(t, s, ada.ID, "audit", "list")
	rows := func(args ...string) []client.AuditRow {
		return harness.AsJSON[harness.Items[client.AuditRow]](s, append([]string{"audit", "list"}, args...)...).Items
	}
	onAda := rows("--resource-type", "user", "--resource", ada.ID, "--outcome", "done")
	require.NotEmpty(t, onAda)
	for _, row := range onAda {
		require.Equal(t, ada.ID, row.ResourceID)
	}
	var denied []client.AuditRow
	s.Testbed.Eventually("the row has its number", func() error {
		denied = rows("--actor", ada.ID, "--outcome", "denied", "--from", "1h")
		require.NotEmpty(t, denied, "the quota that the user tried to set")
		return harness.Pending(nil, denied[0].Number > 0)
	})
	require.Equal(t, denied[:1], rows("--correlation", denied[0].CorrelationID))
	require.Empty(t, rows("--to", "25h"), "the prepared hub is less than a day old")
	s.Fails(7, "", "audit", "list", "--outcome", "undone")
	requireAuditChain(t, s, ada)
}

// requireAuditChain verifies the chain of the org on the hub and in a file.
func requireAuditChain(t *testing.T, s *harness.Shell, ada client.User) {
	t.Helper()
	var chain struct {
		Head string `json:"head"`
	}
	lines := ""
	s.Testbed.Eventually("the rows about the user have numbers", func() error {
		text := s.MustRun("audit", "verify", "--org", ada.OrgID, "-o", "json")
		require.NoError(t, json.Unmarshal([]byte(text), &chain))
		lines = s.MustRun("audit", "export", "--org", ada.OrgID)
		return harness.Pending(nil, chain.Head != "" && strings.Contains(lines, ada.ID))
	})
	s.MustRun("audit", "verify", "--org", ada.OrgID, "--head", chain.Head)
	file := filepath.Join(t.TempDir(), "audit.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(lines), 0o600))
	s.MustRun("audit", "verify", file, "--head", chain.Head)
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(lines, ada.ID, ada.OrgID, 1)), 0o600))
	s.Fails(1, "is changed", "audit", "verify", file)
}

// requireEveryFormat compares the three formats of one list. Nodes report and the hub works on between two commands, so
// that names of fields and ids are compared and not all values, and a list that changed meanwhile is read again.
func requireEveryFormat(t *testing.T, s *harness.Shell, id string, args ...string) {
	t.Helper()
	require.Contains(t, s.MustRun(args...), id)
	before := fieldsOfItems(t, json.Unmarshal, s.MustRun(append(args, "-o", "json")...))
	s.Testbed.Eventually("the list stays as it is for three commands", func() error {
		fromYAML := fieldsOfItems(t, yaml.Unmarshal, s.MustRun(append(args, "-o", "yaml")...))
		after := fieldsOfItems(t, json.Unmarshal, s.MustRun(append(args, "-o", "json")...))
		changed := !reflect.DeepEqual(before, after)
		if !changed {
			require.Equal(t, before, fromYAML)
		}
		before = after
		return harness.Pending(nil, !changed)
	})
}

// fieldsOfItems is the id of each item of a list, and true for its other fields.
func fieldsOfItems(t *testing.T, unmarshal func([]byte, any) error, text string) []map[string]any {
	t.Helper()
	var list struct {
		Items []map[string]any `json:"items" yaml:"items"`
	}
	require.NoError(t, unmarshal([]byte(text), &list))
	require.NotEmpty(t, list.Items)
	for _, item := range list.Items {
		for name := range item {
			if name != "id" {
				item[name] = true
			}
		}
	}
	return list.Items
}

// requireLocalCommands runs the commands of the node's owner.
func requireLocalCommands(w *harness.Testbed, s *harness.Shell, i client.AppInstance) {
	w.T.Helper()
	ask := func(args ...string) string {
		r := s.Run(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), append(args, "--local-socket",
			w.Agent.Ready.LocalSocket)...)
		require.Zero(w.T, r.Code, "gpuaas-agent %v: %s", args, r.Err)
		return r.Out
	}
	require.Contains(w.T, ask("status"), w.Agent.Ready.NodeID)
	var workloads []struct {
		MemberID   string `json:"member_id"`
		InstanceID string `json:"instance_id"`
		Status     string `json:"status"`
		Endpoints  []struct {
			URL string `json:"url"`
		} `json:"endpoints"`
	}
	require.NoError(w.T, json.Unmarshal([]byte(ask("workloads", "-o", "json")), &workloads))
	require.Len(w.T, workloads, 1)
	require.Equal(w.T, i.ID, workloads[0].InstanceID)
	require.Equal(w.T, "ready", workloads[0].Status)
	require.Equal(w.T, i.Endpoints[0].URL, workloads[0].Endpoints[0].URL)
	require.Contains(w.T, ask("workloads"), workloads[0].MemberID)
	w.Eventually("the agent prints the log", func() error {
		return harness.Pending(nil, ask("logs", workloads[0].MemberID) != "")
	})
	var checks []struct {
		OK bool `json:"ok"`
	}
	require.NoError(w.T, json.Unmarshal([]byte(ask("verify", "-o", "json")), &checks))
	require.NotEmpty(w.T, checks)
	for _, c := range checks {
		require.True(w.T, c.OK)
	}
	r := s.Run(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), "logs", w.Tenant.Org.ID, "--local-socket",
		w.Agent.Ready.LocalSocket)
	require.Equal(w.T, 1, r.Code, "a member that is not there: %s", r.Out)
	r = s.Run(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), "status", "--local-socket",
		filepath.Join(w.RunDir, "absent.sock"))
	require.Equal(w.T, 1, r.Code)
	require.Contains(w.T, r.Err, "gpuaas-agent")
}

// requireExitCodes runs a command for each exit code of `gpuaas exit-codes` that needs no broken network.
func requireExitCodes(t *testing.T, admin, operator *harness.Shell) {
	t.Helper()
	w := admin.Testbed
	admin.Fails(2, "there is no command", "instance", "list")
	admin.Fails(2, "--output is", "nodes", "list", "-o", "xml")
	admin.Fails(2, "which project?", "instances", "list")
	bad := filepath.Join(w.Dir, "bad-token")
	require.NoError(t, os.WriteFile(bad, []byte("of no account"), 0o600))
	admin.Fails(3, "", "login", "--name", "bad", "--url", w.Hub.Ready.APIURL, "--ca-file", w.Hub.Ready.CAFile,
		"--token-file", bad)
	require.NotContains(t, admin.MustRun("context", "list"), "bad", "a credential that does not count is not kept")
	operator.Fails(4, "correlation id", "entitlements", "set", harness.AppSlug)
	operator.Fails(5, "", "instances", "get", "no-such-app")
	operator.Fails(5, "correlation id", "instances", "get", w.Tenant.Org.ID)
	admin.Fails(7, "", "orgs", "create", "Not A Slug")
	admin.Fails(8, "", "login", "--name", "gone", "--url", "https://"+harness.FreeAddress(), "--ca-file",
		w.Hub.Ready.CAFile, "--token-file", w.Hub.Ready.TokenFile)
	operator.Fails(9, "", "instances", "watch", "cli", "--until", "stopped", "--timeout", "300ms")
	operator.Fails(7, "", "instances", "create", harness.AppSlug, "--param", "surprise=1")
}
