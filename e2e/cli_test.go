package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// shell is a person at a terminal with a home directory of the test's own.
type shell struct {
	w   *world
	env []string
}

// said is what one command wrote and how it ended.
type said struct {
	out, err string
	code     int
}

func (w *world) shell(home string) *shell {
	w.t.Helper()
	dir := filepath.Join(w.dir, home)
	require.NoError(w.t, os.MkdirAll(dir, 0o700))
	return &shell{w: w, env: []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH")}}
}

func (s *shell) run(name string, args ...string) said {
	s.w.t.Helper()
	cmd := exec.CommandContext(s.w.ctx, name, args...)
	cmd.Env = s.env
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cmd.Run()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		require.NoError(s.w.t, err)
	}
	return said{out: out.String(), err: stderr.String(), code: cmd.ProcessState.ExitCode()}
}

// gpuaas runs the command, which must end with 0, and returns what it wrote.
func (s *shell) gpuaas(args ...string) string {
	s.w.t.Helper()
	r := s.run(filepath.Join(binaries(s.w.t), "gpuaas"), args...)
	require.Zero(s.w.t, r.code, "gpuaas %s: %s", strings.Join(args, " "), r.err)
	return r.out
}

// fails runs the command, which must end with this code and say these words.
func (s *shell) fails(code int, words string, args ...string) {
	s.w.t.Helper()
	r := s.run(filepath.Join(binaries(s.w.t), "gpuaas"), args...)
	require.Equal(s.w.t, code, r.code, "gpuaas %s: %s%s", strings.Join(args, " "), r.out, r.err)
	require.Contains(s.w.t, r.err, words)
	require.Empty(s.w.t, r.out, "an error belongs on standard error")
}

// asJSON runs the command with -o json and reads its answer.
func asJSON[T any](s *shell, args ...string) T {
	s.w.t.Helper()
	var v T
	require.NoError(s.w.t, json.Unmarshal([]byte(s.gpuaas(append(args, "-o", "json")...)), &v), "%v", args)
	return v
}

type items[T any] struct {
	Items []T `json:"items"`
}

// The whole life of an app with the command alone: an operator's day.
func TestTheCommandRunsAnAppFromLoginToLedger(t *testing.T) {
	w := platform(t)
	s := w.shell("admin")
	ready := w.hub.Ready
	s.fails(2, "gpuaas login", "nodes", "list")
	require.Contains(t, s.gpuaas("login", "--name", "e2e", "--url", ready.APIURL, "--ca-file", ready.CAFile,
		"--token-file", ready.TokenFile), "Logged in to "+ready.APIURL)
	info, err := os.Stat(filepath.Join(w.dir, "admin", ".config", "gpuaas", "config.yaml"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	require.Contains(t, s.gpuaas("context", "list"), "e2e")

	apps := asJSON[items[client.App]](s, "apps", "list").Items
	require.Len(t, apps, 1)
	require.Equal(t, "1.0.0", apps[0].LatestVersion)
	require.Contains(t, s.gpuaas("apps", "versions", appSlug), "active")
	require.NotEmpty(t, asJSON[client.Registry](s, "apps", "registry").RegistryHost)
	projects := asJSON[items[client.Project]](s, "projects", "list").Items
	require.Len(t, projects, 1)
	require.Equal(t, w.tenant.Project.ID, projects[0].ID)
	require.Equal(t, projects[0], asJSON[client.Project](s, "projects", "get", "--project", "main"))

	// A program's account: its key is in a file of its own, and the program logs in with it.
	file := filepath.Join(w.dir, "admin", "ci.json")
	require.NotContains(t, s.gpuaas("sa", "create", "ci", "--project", "main", "--save", file, "-o", "json"),
		"PRIVATE KEY")
	info, err = os.Stat(file)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	require.Contains(t, s.gpuaas("sa", "list", "--project", "main"), "ci")
	ci := w.shell("ci")
	ci.gpuaas("login", "--url", ready.APIURL, "--ca-file", ready.CAFile, "--service-account", file)
	require.Equal(t, client.WhoamiTypeServiceAccount, asJSON[client.Whoami](ci, "whoami").Type)

	allocations := asJSON[items[client.Allocation]](s, "allocations", "list", "--project", "main").Items
	require.Len(t, allocations, 1)
	more := asJSON[client.Allocation](s, "allocations", "create", "--project", "main", "--node", w.agent.Ready.NodeID,
		"--cpu", "1", "--memory-mib", "64")
	require.Equal(t, more.ID, asJSON[client.Allocation](s, "allocations", "get", more.ID, "--project", "main").ID)
	s.gpuaas("allocations", "release", more.ID, "--project", "main")

	// The account's project is known; create answers at once, watch waits.
	i := asJSON[client.AppInstance](ci, "instances", "create", appSlug, "--name", "cli", "--allocation", allocations[0].ID)
	require.Equal(t, client.AppInstanceStatusRequested, i.Status)
	i = asJSON[client.AppInstance](ci, "instances", "watch", "cli")
	require.Equal(t, client.AppInstanceStatusRunning, i.Status)
	w.answers(i)
	require.Equal(t, i.ID, asJSON[client.AppInstance](ci, "instances", "get", "cli").ID)
	requireEveryFormat(t, ci, i.ID, "instances", "list")
	require.Contains(t, ci.gpuaas("instances", "events", "cli"), "apps.instance.running")
	require.NotEmpty(t, ci.gpuaas("instances", "logs", "cli", "--tail", "5"))
	requireEveryFormat(t, s, w.agent.Ready.NodeID, "nodes", "list")
	require.Equal(t, client.NodeStatusOnline, asJSON[client.Node](s, "nodes", "get", w.agent.Ready.NodeID).Status)

	w.eventually("the command shows usage", func() error {
		usage := asJSON[items[client.UsageRecord]](s, "usage", "--instance", i.ID).Items
		return orMissing(nil, slices.ContainsFunc(usage, func(u client.UsageRecord) bool {
			return u.Meter == "session_seconds" && u.PostingID != ""
		}))
	})
	requireEveryFormat(t, s, i.ID, "usage", "--instance", i.ID)
	hours := asJSON[items[client.UsageHour]](s, "usage", "hourly", "--instance", i.ID).Items
	require.True(t, slices.ContainsFunc(hours, func(h client.UsageHour) bool {
		return h.Meter == "session_seconds" && h.Charged != "0"
	}), "%v", hours)
	requireEveryFormat(t, s, i.ID, "usage", "hourly", "--instance", i.ID)
	w.requireLocalCommands(s, i)
	requireExitCodes(t, s, ci)

	require.Equal(t, client.AppInstanceStatusDecommissioned, asJSON[client.AppInstance](ci, "instances", "decommission",
		"cli", "--wait").Status)
	w.eventually("the command shows all postings of the instance", func() error {
		postings := asJSON[items[client.Posting]](s, "ledger", "--instance", i.ID).Items
		return orMissing(nil, hasKind(postings, client.PostingKindHoldClosed) && hasKind(postings, client.PostingKindUsage))
	})
	for _, p := range asJSON[items[client.Posting]](s, "ledger", "--instance", i.ID).Items {
		sums, err := scenario.Sums(p)
		require.NoError(t, err)
		for _, sum := range sums {
			require.Zero(t, sum.Sign())
		}
	}
	require.Contains(t, s.gpuaas("ledger", "--instance", i.ID, "--project", "main"), "usage")
	s.fails(6, "", "instances", "decommission", i.ID, "--project", "main")
}

// People, quotas, names and the audit trail with the command alone. It needs no node.
func TestTheCommandManagesPeopleQuotasAndNames(t *testing.T) {
	w := newWorld(t)
	w.startHub(w.hubConfig())
	w.newTenant("acme")
	s := w.adminShell()
	ada := w.requireUsersAndTokens(s)
	requireRoles(t, s, ada)
	w.requireQuotasAndSlugs(s)
	requireAudit(t, s, ada)
	require.Empty(t, asJSON[items[client.RecoveryFinding]](s, "recovery", "findings").Items)
	require.Empty(t, asJSON[items[client.RecoveringNode]](s, "recovery", "waiting").Items)
}

const adaEmail = "ada@acme.example"

// requireUsersAndTokens makes a user, who logs in, and takes the user's tokens and access away again.
func (w *world) requireUsersAndTokens(s *shell) client.User {
	w.t.Helper()
	ada := asJSON[client.User](s, "users", "create", adaEmail, "--org", "acme", "--role", "org_member")
	require.Equal(w.t, w.tenant.Org.ID, ada.OrgID)
	requireEveryFormat(w.t, s, ada.ID, "users", "list", "--org", "acme")
	token := asJSON[client.UserToken](s, "users", "token", adaEmail, "--description", "laptop", "--life", "1h")
	more := asJSON[client.UserToken](s, "users", "token", adaEmail)

	own := w.shell("ada")
	file := filepath.Join(w.dir, "ada", "token")
	require.NoError(w.t, os.WriteFile(file, []byte(token.Token), 0o600))
	own.gpuaas("login", "--url", w.hub.Ready.APIURL, "--ca-file", w.hub.Ready.CAFile, "--token-file", file)
	requireEveryFormat(w.t, own, token.ID, "tokens", "list")
	listed := own.gpuaas("tokens", "list")
	require.Contains(w.t, listed, "laptop")
	require.NotContains(w.t, listed, token.Token)
	own.gpuaas("tokens", "revoke", more.ID)
	require.Len(w.t, asJSON[items[client.UserTokenInfo]](s, "tokens", "list", "--user", adaEmail).Items, 1)
	own.fails(4, "correlation id", "orgs", "set-quota", "acme", "users=1")
	own.fails(2, "--all", "tokens", "revoke")

	require.Equal(w.t, client.UserStatusDisabled, asJSON[client.User](s, "users", "disable", adaEmail).Status)
	own.fails(3, "", "whoami")
	require.Equal(w.t, client.UserStatusActive, asJSON[client.User](s, "users", "enable", adaEmail).Status)
	require.Equal(w.t, ada.ID, asJSON[client.Whoami](own, "whoami").ID)
	s.gpuaas("tokens", "revoke", "--all", "--user", adaEmail)
	own.fails(3, "", "whoami")
	return ada
}

// requireRoles changes what the user may do in the org and in the project, and removes the user in the end.
func requireRoles(t *testing.T, s *shell, ada client.User) {
	t.Helper()
	changed := asJSON[client.User](s, "users", "set-roles", adaEmail, "org_billing", "app_publisher")
	require.ElementsMatch(t, []client.UserRole{client.UserRoleOrgBilling, client.UserRoleAppPublisher}, changed.Roles)
	require.Equal(t, changed.Roles, asJSON[client.User](s, "users", "get", adaEmail).Roles)
	s.fails(7, "", "users", "set-roles", adaEmail, "emperor")

	bound := asJSON[client.ProjectRoles](s, "roles", "set", adaEmail, "project_admin", "--project", "main")
	require.Equal(t, []client.ProjectRole{client.ProjectRoleProjectAdmin}, bound.Roles)
	requireEveryFormat(t, s, ada.ID, "roles", "list", "--project", "main")
	require.Empty(t, asJSON[client.ProjectRoles](s, "roles", "set", adaEmail, "--project", "main").Roles)
	require.Empty(t, asJSON[items[client.ProjectRoles]](s, "roles", "list", "--project", "main").Items)

	s.gpuaas("users", "remove", adaEmail)
	s.fails(5, "", "users", "get", ada.ID)
}

// requireQuotasAndSlugs sets a quota and meets it, and tries to give away the name of an app.
func (w *world) requireQuotasAndSlugs(s *shell) {
	w.t.Helper()
	quota := func(list items[client.OrgQuotaItem], name client.QuotaName) client.OrgQuotaItem {
		at := slices.IndexFunc(list.Items, func(q client.OrgQuotaItem) bool { return q.Name == name })
		require.GreaterOrEqual(w.t, at, 0, name)
		return list.Items[at]
	}
	before := quota(asJSON[items[client.OrgQuotaItem]](s, "orgs", "quota", "acme"), client.QuotaNameAppSlugs)
	require.Equal(w.t, before.DefaultLimit, before.Limit)
	intent := client.PublishIntentCreate{
		AppSlug: "spare", AppVersion: "1.0.0", ArtifactName: "runtime",
		Channel: client.ChannelDev,
	}
	_, err := client.Read[client.PublishIntent](w.tenant.Admin.CreatePublishIntent(w.ctx, w.tenant.Project.ID, intent))
	require.NoError(w.t, err)
	after := quota(asJSON[items[client.OrgQuotaItem]](s, "orgs", "set-quota", "acme", "app_slugs=1"),
		client.QuotaNameAppSlugs)
	require.EqualValues(w.t, 1, after.Limit)
	require.Equal(w.t, before.Used+1, after.Used)
	intent.AppSlug = "second"
	_, err = client.Read[client.PublishIntent](w.tenant.Admin.CreatePublishIntent(w.ctx, w.tenant.Project.ID, intent))
	require.ErrorContains(w.t, err, "app_slugs")
	s.fails(2, "NAME=LIMIT", "orgs", "set-quota", "acme", "app_slugs")
	s.fails(7, "", "orgs", "set-quota", "acme", "wishes=3")

	// An hour passes before a slug is free: its publish intent is open.
	s.gpuaas("orgs", "create", "globex")
	slugs := asJSON[items[client.OwnedSlug]](s, "apps", "slugs", "--org", "acme").Items
	require.Len(w.t, slugs, 1)
	require.Equal(w.t, "spare", slugs[0].Slug)
	require.False(w.t, slugs[0].Published)
	s.fails(6, "app_slug_in_use", "apps", "transfer-slug", "spare", "--org", "globex")
	s.fails(6, "app_slug_in_use", "apps", "release-slug", "spare", "--org", "acme")
	s.fails(5, "", "apps", "release-slug", "spare", "--org", "globex")
}

// requireAudit finds in the audit trail what was done before, by each filter.
func requireAudit(t *testing.T, s *shell, ada client.User) {
	t.Helper()
	requireEveryFormat(t, s, ada.ID, "audit", "list")
	rows := func(args ...string) []client.AuditRow {
		return asJSON[items[client.AuditRow]](s, append([]string{"audit", "list"}, args...)...).Items
	}
	onAda := rows("--resource-type", "user", "--resource", ada.ID, "--outcome", "done")
	require.NotEmpty(t, onAda)
	for _, row := range onAda {
		require.Equal(t, ada.ID, row.ResourceID)
	}
	denied := rows("--actor", ada.ID, "--outcome", "denied", "--from", "1h")
	require.NotEmpty(t, denied, "the quota that the user tried to set")
	require.Equal(t, denied[:1], rows("--correlation", denied[0].CorrelationID))
	require.Empty(t, rows("--to", "1h"))
	s.fails(7, "", "audit", "list", "--outcome", "undone")
}

// requireEveryFormat holds the three formats of one list against each other.
func requireEveryFormat(t *testing.T, s *shell, id string, args ...string) {
	t.Helper()
	require.Contains(t, s.gpuaas(args...), id)
	var fromJSON, fromYAML any
	// Between the two the node goes on reporting, so the keys are compared and not the values.
	require.NoError(t, json.Unmarshal([]byte(s.gpuaas(append(args, "-o", "json")...)), &fromJSON))
	require.NoError(t, yaml.Unmarshal([]byte(s.gpuaas(append(args, "-o", "yaml")...)), &fromYAML))
	require.Equal(t, firstKeys(t, fromJSON), firstKeys(t, fromYAML))
}

func firstKeys(t *testing.T, v any) map[string]bool {
	t.Helper()
	list, ok := v.(map[string]any)["items"].([]any)
	require.True(t, ok)
	require.NotEmpty(t, list)
	keys := map[string]bool{}
	for key := range list[0].(map[string]any) { //nolint:forcetypeassert // a panic fails the test as well
		keys[key] = true
	}
	return keys
}

// requireLocalCommands asks the node itself, as its owner does.
func (w *world) requireLocalCommands(s *shell, i client.AppInstance) {
	w.t.Helper()
	ask := func(args ...string) string {
		r := s.run(filepath.Join(binaries(w.t), "gpuaas-agent"), append(args, "--local-socket", w.agent.Ready.LocalSocket)...)
		require.Zero(w.t, r.code, "gpuaas-agent %v: %s", args, r.err)
		return r.out
	}
	require.Contains(w.t, ask("status"), w.agent.Ready.NodeID)
	var workloads []struct {
		MemberID   string `json:"member_id"`
		InstanceID string `json:"instance_id"`
		Status     string `json:"status"`
		Endpoints  []struct {
			URL string `json:"url"`
		} `json:"endpoints"`
	}
	require.NoError(w.t, json.Unmarshal([]byte(ask("workloads", "-o", "json")), &workloads))
	require.Len(w.t, workloads, 1)
	require.Equal(w.t, i.ID, workloads[0].InstanceID)
	require.Equal(w.t, "ready", workloads[0].Status)
	require.Equal(w.t, i.Endpoints[0].URL, workloads[0].Endpoints[0].URL)
	require.Contains(w.t, ask("workloads"), workloads[0].MemberID)
	require.NotEmpty(w.t, ask("logs", workloads[0].MemberID))
	var checks []struct {
		OK bool `json:"ok"`
	}
	require.NoError(w.t, json.Unmarshal([]byte(ask("verify", "-o", "json")), &checks))
	require.NotEmpty(w.t, checks)
	for _, c := range checks {
		require.True(w.t, c.OK)
	}
	r := s.run(filepath.Join(binaries(w.t), "gpuaas-agent"), "logs", w.tenant.Org.ID, "--local-socket",
		w.agent.Ready.LocalSocket)
	require.Equal(w.t, 1, r.code, "a member that is not there: %s", r.out)
	r = s.run(filepath.Join(binaries(w.t), "gpuaas-agent"), "status", "--local-socket",
		filepath.Join(w.run, "nobody.sock"))
	require.Equal(w.t, 1, r.code)
	require.Contains(w.t, r.err, "gpuaas-agent")
}

// requireExitCodes has one command for each exit code of `gpuaas exit-codes` that needs no fault on the way.
func requireExitCodes(t *testing.T, admin, operator *shell) {
	t.Helper()
	w := admin.w
	admin.fails(2, "there is no command", "instance", "list")
	admin.fails(2, "--output is", "nodes", "list", "-o", "xml")
	admin.fails(2, "which project?", "instances", "list")
	bad := filepath.Join(w.dir, "bad-token")
	require.NoError(t, os.WriteFile(bad, []byte("nobody's"), 0o600))
	admin.fails(3, "", "login", "--name", "bad", "--url", w.hub.Ready.APIURL, "--ca-file", w.hub.Ready.CAFile,
		"--token-file", bad)
	require.NotContains(t, admin.gpuaas("context", "list"), "bad", "a credential that does not count is not kept")
	operator.fails(4, "correlation id", "entitlements", "set", appSlug)
	operator.fails(5, "", "instances", "get", "no-such-app")
	operator.fails(5, "correlation id", "instances", "get", w.tenant.Org.ID)
	admin.fails(7, "", "orgs", "create", "Not A Slug")
	admin.fails(8, "", "login", "--name", "gone", "--url", "https://"+closedPort(t), "--ca-file", w.hub.Ready.CAFile,
		"--token-file", w.hub.Ready.TokenFile)
	operator.fails(9, "", "instances", "watch", "cli", "--until", "stopped", "--timeout", "300ms")
	operator.fails(7, "", "instances", "create", appSlug, "--param", "surprise=1")
}

// runPrinted runs every command with which the demo says how to look further, as a person would who copies the line.
func (w *world) runPrinted(out string) {
	w.t.Helper()
	_, rest, found := strings.Cut(out, "To look further:\n")
	require.True(w.t, found, out)
	s := w.shell("looking-further")
	ran := 0
	for line := range strings.Lines(rest) {
		line = strings.TrimSpace(line)
		if line == "" {
			break
		}
		if line == "make demo-down" {
			continue // it names the demo's own directories; this one is in the test's
		}
		r := s.run("sh", "-c", line)
		require.Zero(w.t, r.code, "%s: %s%s", line, r.out, r.err)
		require.NotEmpty(w.t, r.out, line)
		ran++
	}
	require.GreaterOrEqual(w.t, ran, 8)
}
