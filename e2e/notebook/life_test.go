package notebook_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// Jupyter, with packages of its tenant's, is created, used, followed, configured, upgraded, left, rolled back, stopped,
// started, rebooted and decommissioned on a node of each kind; the notebooks stay, and go back with a rollback.
func TestJupyterLivesOnEachKindOfNode(t *testing.T) {
	w := harness.New(t)
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	index, args := indexIn(w, false)
	var lives []*life
	for _, kind := range harness.NodeKinds(t) {
		lives = append(lives, &life{Testbed: w.StartNode(kind, args...), NodeKind: kind})
	}
	shipVersions(w)
	putIndex(w, index)
	user := w.UserShell(w.AdminShell())
	var all sync.WaitGroup
	for _, l := range lives {
		all.Go(func() {
			t.Run(l.Name, func(t *testing.T) {
				l.T = t
				l.user = &harness.Shell{Testbed: l.Testbed, Env: user.Env}
				l.live()
			})
		})
	}
	all.Wait()
}

// shipVersions ships 1.0.0, 1.1.0, which differs in its environment variables, and 1.2.0, which never is ready.
func shipVersions(w *harness.Testbed) {
	w.T.Helper()
	publisher, err := w.Tenant.NewPublisher(w.Ctx)
	require.NoError(w.T, err)
	const env = "      - {name: LANG, value: C.UTF-8}\n"
	shipVersion(w, publisher, "jupyter", "1.0.0")
	shipVersion(w, publisher, "jupyter", "1.1.0", env, env+"      - {name: RELEASE, value: next}\n")
	shipVersion(w, publisher, "jupyter", "1.2.0", "path: /api,", "path: /nowhere,",
		"readiness_timeout_seconds: 120", "readiness_timeout_seconds: 5")
	require.NoError(w.T, w.Tenant.Entitle(w.Ctx, "jupyter"))
	require.NoError(w.T, w.Tenant.Price(w.Ctx, "jupyter", "0.01"))
}

// life is an instance of Jupyter on a node.
type life struct {
	*harness.Testbed
	harness.NodeKind
	user *harness.Shell
	i    client.AppInstance
}

func (l *life) live() {
	l.Take(
		harness.Step{Name: "create", Take: l.create},
		harness.Step{Name: "devices", Take: l.requireDevices},
		harness.Step{Name: "access", Take: l.use},
		harness.Step{Name: "logs", Take: l.requireLogs},
		harness.Step{Name: "exec", Take: l.requirePackages},
		harness.Step{Name: "config", Take: l.configure},
		harness.Step{Name: "upgrade", Take: l.upgrade},
		harness.Step{Name: "failed upgrade", Take: l.failUpgrade},
		harness.Step{Name: "rollback", Take: l.rollBack},
		harness.Step{Name: "stop and start", Take: l.stopAndStart},
		harness.Step{Name: "reboot", Take: l.reboot},
		harness.Step{Name: "devices again", Take: l.requireDevices},
		harness.Step{Name: "decommission", Take: l.decommission},
	)
}

func (l *life) create() {
	l.AllocateOn(l.NodeKind)
	in := jupyterRequest(l.Testbed, "jupyter", l.Name, "greetpack>=1")
	if l.GPUs > 0 {
		in.Resources.Accelerators = &l.GPUs
	}
	var err error
	l.i, _, err = l.Tenant.Launch(l.Ctx, l.Operator, in, nil)
	require.NoError(l.T, err)
	require.Equal(l.T, client.AppInstanceHealthHealthy, l.Instance(l.i.ID).Health)
}

func (l *life) requireDevices() { l.RequireDevices(l.NodeKind, l.i, "main") }

// visitor is a person in a browser who has logged in to Jupyter.
type visitor struct {
	l    *life
	base string
	http http.Client
	xsrf string
}

// visit logs in at an address of the app.
func (l *life) visit(base string) *visitor {
	l.T.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(l.T, err)
	v := &visitor{l: l, base: base, http: http.Client{Jar: jar, Transport: &http.Transport{DisableKeepAlives: true}}}
	_, status := v.request(http.MethodGet, "/login", "", nil)
	require.Equal(l.T, http.StatusOK, status)
	at, err := url.Parse(base)
	require.NoError(l.T, err)
	for _, c := range jar.Cookies(at) {
		if c.Name == "_xsrf" {
			v.xsrf = c.Value
		}
	}
	_, status = v.request(http.MethodGet, "/api/contents", "", nil)
	require.Equal(l.T, http.StatusForbidden, status, "nobody comes in without the password")
	form := url.Values{"_xsrf": {v.xsrf}, "password": {password}}
	_, status = v.request(http.MethodPost, "/login", "application/x-www-form-urlencoded", []byte(form.Encode()))
	require.Equal(l.T, http.StatusOK, status, "the page after the login")
	return v
}

func (v *visitor) request(method, path, contentType string, body []byte) (answer string, status int) {
	t := v.l.T
	t.Helper()
	r, err := http.NewRequestWithContext(v.l.Ctx, method, v.base+path, bytes.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("X-Xsrftoken", v.xsrf)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	resp, err := v.http.Do(r)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	out, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(out), resp.StatusCode
}

// write keeps a text as a file among the notebooks.
func (v *visitor) write(name, text string) {
	v.l.T.Helper()
	body, err := json.Marshal(map[string]string{"type": "file", "format": "text", "content": text})
	require.NoError(v.l.T, err)
	answer, status := v.request(http.MethodPut, "/api/contents/"+name, "application/json", body)
	require.Contains(v.l.T, []int{http.StatusOK, http.StatusCreated}, status, answer)
}

// requireText checks what a file among the notebooks holds.
func (v *visitor) requireText(name, text string) {
	v.l.T.Helper()
	answer, status := v.request(http.MethodGet, "/api/contents/"+name, "", nil)
	require.Equal(v.l.T, http.StatusOK, status, answer)
	var file struct {
		Content string `json:"content"`
	}
	require.NoError(v.l.T, json.Unmarshal([]byte(answer), &file))
	require.Equal(v.l.T, text, file.Content)
}

// requireTerminals checks whether visitors may open terminals.
func (v *visitor) requireTerminals(may bool) {
	v.l.T.Helper()
	_, status := v.request(http.MethodGet, "/api/terminals", "", nil)
	require.Equal(v.l.T, may, status == http.StatusOK, status)
}

// at is the app's published address.
func (l *life) at() string { return l.Instance(l.i.ID).Endpoints[0].URL }

// use visits Jupyter through the hub, from a machine that does not reach the node.
func (l *life) use() {
	v := l.visit(l.user.Forward(l.Name, "--project", "main", "http"))
	v.requireTerminals(true)
	v.write("work.txt", "first")
	v.requireText("work.txt", "first")
}

func (l *life) requireLogs() {
	l.user.AwaitLog("302 GET /", "logs", "--project", "main", l.Name)
}

func (l *life) requirePackages() {
	requireGreeting(l.Testbed, l.i)
	out, code := python(l.Testbed, l.i, "import os; print(os.getuid(), os.environ['HOME'])")
	require.Zero(l.T, code, out)
	require.Equal(l.T, "1000 /home/jupyter\n", out)
}

// configure closes the terminals: Jupyter starts again with the notebooks and the packages that it had.
func (l *life) configure() {
	_, err := client.Read[client.AppInstance](l.Operator.ChangeAppInstance(l.Ctx, l.Tenant.Project.ID, l.i.ID,
		client.AppInstanceChange{Config: map[string]any{"NotebookApp": map[string]any{"terminals_enabled": false}}}))
	require.NoError(l.T, err)
	l.Eventually("Jupyter runs with its config", func() error {
		now := l.Instance(l.i.ID)
		return harness.Pending(nil, now.Members[0].ConfigCurrent && now.Status == client.AppInstanceStatusRunning &&
			now.Health == client.AppInstanceHealthHealthy)
	})
	v := l.visit(l.at())
	v.requireTerminals(false)
	v.requireText("work.txt", "first")
	requireGreeting(l.Testbed, l.i)
}

func (l *life) upgrade() {
	up, err := l.Tenant.Upgrade(l.Ctx, l.Operator, l.i.ID, "1.1.0", nil)
	require.NoError(l.T, err)
	require.Equal(l.T, "1.1.0", up.Version)
	out, code := python(l.Testbed, l.i, "import os; print(os.environ['RELEASE'])")
	require.Zero(l.T, code, out)
	requireGreeting(l.Testbed, l.i)
	l.visit(l.at()).requireText("work.txt", "first")
}

// failUpgrade upgrades to a version that never is ready: the node goes back by itself.
func (l *life) failUpgrade() {
	v := l.visit(l.at())
	v.write("work.txt", "second")
	left, err := l.Tenant.Upgrade(l.Ctx, l.Operator, l.i.ID, "1.2.0", nil)
	require.NoError(l.T, err)
	require.Equal(l.T, "1.1.0", left.Version)
	failed := slices.DeleteFunc(l.Events(l.i.ID), func(e client.Event) bool { return e.Type != "apps.instance.failed" })
	require.Len(l.T, failed, 1)
	require.Equal(l.T, "readiness_timeout", failed[0].Data.Reason)
	l.visit(l.at()).requireText("work.txt", "second")
}

// rollBack returns to the first version, with the notebooks that it had at the upgrade.
func (l *life) rollBack() {
	up, err := l.Tenant.Upgrade(l.Ctx, l.Operator, l.i.ID, "1.0.0", nil)
	require.NoError(l.T, err)
	require.Equal(l.T, "1.0.0", up.Version)
	l.visit(l.at()).write("work.txt", "third")
	back, err := l.Tenant.Rollback(l.Ctx, l.Operator, l.i.ID, nil)
	require.NoError(l.T, err)
	require.Equal(l.T, "1.1.0", back.Version)
	v := l.visit(l.at())
	v.requireText("work.txt", "second")
	v.requireTerminals(false)
}

func (l *life) stopAndStart() {
	_, err := l.Tenant.Stop(l.Ctx, l.Operator, l.i.ID)
	require.NoError(l.T, err)
	require.Empty(l.T, l.Running(l.i))
	_, err = scenario.Get(l.Ctx, l.i.Endpoints[0].URL+"/api")
	require.Error(l.T, err, "nothing answers")
	l.RequireNoDevices()
	_, err = l.Tenant.Start(l.Ctx, l.Operator, l.i.ID)
	require.NoError(l.T, err)
	l.visit(l.at()).requireText("work.txt", "second")
	requireGreeting(l.Testbed, l.i)
}

func (l *life) reboot() {
	if l.GPUs > 0 {
		l.ExplainUnconfirmed(1)
	}
	_, on := l.Reboot(l.Agent)
	l.Eventually("the hub sees Jupyter run again", func() error {
		now := l.Instance(l.i.ID)
		return harness.Pending(nil, now.Status == client.AppInstanceStatusRunning &&
			now.Health == client.AppInstanceHealthHealthy && now.Members[0].Services[0].StartedAt.After(on))
	})
	l.visit(l.at()).requireText("work.txt", "second")
	requireGreeting(l.Testbed, l.i)
}

// decommission leaves nothing on the node but the environment, which the project keeps, and a bill.
func (l *life) decommission() {
	l.Decommission(l.i)
	require.Zero(l.T, l.ContainersOn(l.Agent, l.i))
	l.RequireNoDevices()
	left, err := os.ReadDir(fmt.Sprintf("%s/volumes", l.Agent.Config.DataDir()))
	require.NoError(l.T, err)
	require.Empty(l.T, left)
	l.FinalPostings(l.i)
	usage, err := l.Tenant.Usage(l.Ctx, l.i.ID)
	require.NoError(l.T, err)
	harness.RequireNoOverlap(l.T, usage)
	require.Equal(l.T, l.GPUs > 0, slices.ContainsFunc(usage, func(u client.UsageRecord) bool {
		return string(u.Meter) == protocol.MeterAcceleratorSeconds
	}))
}
