package reconcile_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// composeManifest is an app of a database, a migration that runs once, a server and a sidecar.
const composeManifest = `
schema: gpuaas.app/v1
app: {slug: hello, display_name: Hello, description: An app., category: demo, runtime_backend: docker_compose}
version:
  version: ${version}
  runtime_profile:
    kind: docker_compose
    main: server
    readiness_timeout_seconds: 30
    services:
      - name: sidecar
        depends_on: [{service: server}]
        restart: always
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        args: [SIDECAR]
        resources: {cpu_millis: {min: 50, default: 50, max: 50}, memory_mib: {min: 32, default: 32, max: 32}}
        stop_grace_seconds: 0
        SIDECAR_MORE
      - name: server
        aliases: [api, api.hello]
        depends_on: [{service: migrate, condition: service_completed_successfully}]
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        ports: [{name: http, container: 8080}]
        resources: {cpu_millis: {min: 50, default: 200, max: 500}, memory_mib: {min: 32, default: 64, max: 64}}
        readiness: {kind: http, port: http, path: /healthz}
        files: [{path: /etc/hello/server.conf, content: "greeting\n", mode: "0440"}]
        capabilities: [CAP_SYS_NICE]
      - name: db
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        env: [{name: ADDR, value: ":5432"}, {name: GREETING, value: "I am the database"}]
        resources: {cpu_millis: {min: 50, default: 100, max: 100}, memory_mib: {min: 32, default: 64, max: 64}}
        readiness: {kind: exec, command: [/app, get, "http://db:5432/healthz"], period_millis: 200}
      - name: migrate
        depends_on: [{service: db, condition: service_healthy}]
        restart: on_failure
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        args: [get, "http://db:5432/"]
        resources: {cpu_millis: {min: 50, default: 50, max: 50}, memory_mib: {min: 32, default: 32, max: 32}}
  parameters: {type: object, additionalProperties: false}
  metering: {kind: session_seconds}
`

// neverReady is a readiness probe that fails even where it runs before its container has exited.
const neverReady = `readiness: {kind: exec, command: [/app, exit, "9"]}`

// compose is the app with what its sidecar runs, with more keys of it, and with other text in place of some.
func (h *hub) compose(sidecar, more string, edits ...string) *protocol.Workload {
	h.t.Helper()
	template := bytes.ReplaceAll([]byte(composeManifest), []byte("SIDECAR_MORE"), []byte(more))
	template = bytes.ReplaceAll(template, []byte("SIDECAR"), []byte(sidecar))
	template = []byte(strings.NewReplacer(edits...).Replace(string(template)))
	doc, err := appkit.FillTemplate(template, map[string]string{"version": "1.0.0", "image": h.image})
	require.NoError(h.t, err)
	env, err := manifest.Sign(doc, protocol.NewEd25519Signer(h.cat))
	require.NoError(h.t, err)
	m, err := manifest.Parse(doc)
	require.NoError(h.t, err)
	services, err := manifest.Lower(m, manifest.Inputs{}, manifest.Shape{})
	require.NoError(h.t, err)
	return &protocol.Workload{
		Id: uuid.Must(uuid.NewV7()).String(), InstanceId: uuid.Must(uuid.NewV7()).String(), Revision: 1, AppSlug: "hello",
		AppVersion: "1.0.0", CorrelationId: "corr-1", Manifest: env, Services: services, ParametersJson: `{}`,
		Features: m.Features(), ReadinessTimeoutSeconds: m.Version.RuntimeProfile.ReadinessTimeoutSeconds,
	}
}

// next is the workload as another revision of the member, which falls back to it.
func next(old, w *protocol.Workload) *protocol.Workload {
	w.Id, w.InstanceId, w.Revision, w.Fallback = old.GetId(), old.GetInstanceId(), old.GetRevision()+1, old
	old.Fallback = nil
	return w
}

// service is the container of a member's service that runs.
func (f *fixture) service(memberID, service string) runtime.Container {
	f.t.Helper()
	for _, c := range f.containersOf(memberID) {
		if c.Service == service && c.State == runtime.StateRunning {
			return c
		}
	}
	f.t.Fatalf("service %s of %s does not run", service, memberID)
	return runtime.Container{}
}

// fetch gets a URL from inside a container.
func (f *fixture) fetch(c runtime.Container, url string) (out string, code int) {
	f.t.Helper()
	var stdout, stderr bytes.Buffer
	code, err := f.rt.RunCommand(f.ctx(), c.ID, execstream.Command{
		Argv: []string{"/app", "get", url}, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr,
	})
	require.NoError(f.t, err)
	return stdout.String() + stderr.String(), code
}

func serviceOf(s *protocol.WorkloadStatus, name string) *protocol.ServiceStatus {
	for _, x := range s.GetServices() {
		if x.GetName() == name {
			return x
		}
	}
	return nil
}

func TestAnAppOfSeveralServicesStartsInOrderAndLeavesNothing(t *testing.T) {
	f := newFixture(t)
	w, stranger := f.hub.compose("wait", ""), f.hub.compose("wait", "")
	f.push(w, stranger)
	ready := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(stranger.GetId(), protocol.WorkloadStatus_READY)
	require.Len(t, ready.GetServices(), 4)
	require.Equal(t, protocol.ServiceStatus_COMPLETED, serviceOf(ready, "migrate").GetStatus())
	migrated := serviceOf(ready, "migrate").GetExitedAt().AsTime()
	require.False(t, migrated.Before(serviceOf(ready, "db").GetReadyAt().AsTime()), "the database is healthy first")
	require.False(t, serviceOf(ready, "server").GetStartedAt().AsTime().Before(migrated), "then the migration ends")
	require.Equal(t, "Hello from GPUaaS\n", get(t, url(ready, "/")))

	server := f.service(w.GetId(), "server")
	for _, name := range []string{"db:5432", "server:8080", "api:8080", "api.hello:8080"} {
		_, code := f.fetch(server, "http://"+name+"/")
		require.Zero(t, code, name)
	}
	_, code := f.fetch(f.service(w.GetId(), "sidecar"), "http://api:8080/")
	require.Zero(t, code)
	db := f.store.Members()[stranger.GetId()].Services["db"].IP
	out, code := f.fetch(server, "http://"+db+":5432/")
	require.NotZero(t, code, "another member's database answers: %s", out)
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/hello/server.conf", server.PID))
	require.NoError(t, err)
	require.Equal(t, "greeting\n", string(raw))

	f.restart()
	again := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, server.PID, f.service(w.GetId(), "server").PID)
	require.Equal(t, migrated, serviceOf(again, "migrate").GetExitedAt().AsTime(), "the migration is not run again")

	f.push(stranger)
	removed := f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	require.True(t, removed.GetRemoval().Complete())
	left, err := f.rt.Leftovers(f.ctx(), w.GetId())
	require.NoError(t, err)
	require.Empty(t, left)
	left, err = f.nw.Leftovers(f.ctx(), w.GetId())
	require.NoError(t, err)
	require.Empty(t, left)
	f.measured(w.GetId())
	f.push()
	f.untilStatus(stranger.GetId(), protocol.WorkloadStatus_REMOVED)
}

func TestASidecarThatFailsLeavesTheServerServing(t *testing.T) {
	f := newFixture(t)
	w := f.hub.compose("wait", "")
	f.push(w)
	ready := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	server := f.service(w.GetId(), "server").PID
	for range 3 {
		require.NoError(t, unix.Kill(int(f.service(w.GetId(), "sidecar").PID), unix.SIGKILL))
		s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
			return s.GetStatus() == protocol.WorkloadStatus_DEGRADED && s.GetReason() == protocol.WorkloadStatus_CRASH_LOOP
		})
		require.Contains(t, s.GetDetail(), "service sidecar: the container exited with code 137")
		require.Equal(t, protocol.ServiceStatus_READY, serviceOf(s, "server").GetStatus())
		get(t, url(ready, "/"))
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	}
	require.Equal(t, server, f.service(w.GetId(), "server").PID)

	// One that has never come up fails its member, whose server is started and goes on.
	broken := f.hub.compose(`exit, "3"`, neverReady)
	f.push(w, broken)
	s := f.untilStatus(broken.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, "service sidecar: the container exited with code 3", s.GetDetail())
	require.Equal(t, protocol.ServiceStatus_READY, serviceOf(s, "server").GetStatus())
	get(t, url(s, "/"))
	f.push()
	f.untilStatus(broken.GetId(), protocol.WorkloadStatus_REMOVED)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
}

func TestAContainerThatIsNotAliveIsEndedAndStartsAgain(t *testing.T) {
	f := newFixture(t)
	w := f.hub.compose("wait", `liveness:
          {kind: exec, command: [/app, exit, "7"], period_millis: 900, timeout_millis: 60000, failure_threshold: 2,
           start_period_millis: 900}`)
	f.push(w)
	first := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return serviceOf(s, "sidecar").GetStartedAt() != nil
	})
	require.Zero(t, serviceOf(first, "sidecar").GetRestarts())
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return serviceOf(s, "sidecar").GetRestarts() > 0 })
	require.Contains(t, f.store.Members()[w.GetId()].Services["sidecar"].Detail,
		"the liveness probe failed: the probe's command exited with code 7")
	require.Zero(t, serviceOf(s, "server").GetRestarts())
	require.Greater(t, s.GetExitedAt().AsTime().Sub(serviceOf(first, "sidecar").GetStartedAt().AsTime()), time.Second)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
}

// A container that has had its start period has none again because the agent starts.
func TestTheStartPeriodOfALivenessProbeBeginsWithTheContainer(t *testing.T) {
	f := newFixture(t)
	w := f.hub.compose("wait", `liveness:
          {kind: exec, command: [/app, exit, "7"], period_millis: 500, failure_threshold: 1,
           start_period_millis: 3000000}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.NoError(t, f.store.UpdateRun(f.service(w.GetId(), "sidecar").ID, func(run *state.Run) {
		run.StartedAt = run.StartedAt.Add(-time.Hour)
	}))
	f.restart()
	s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return serviceOf(s, "sidecar").GetRestarts() > 0 })
	require.Zero(t, serviceOf(s, "server").GetRestarts())
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
}

// The reason quotes what the workload says. A report with half a character could not be encoded, for no member.
func TestWhyAContainerIsNotAliveIsWholeCharacters(t *testing.T) {
	f := newFixture(t)
	w := f.hub.compose("wait", `liveness: {kind: exec, command: ["/`+strings.Repeat("𝄞", 60)+`"], failure_threshold: 1}`)
	f.push(w)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return serviceOf(s, "sidecar").GetRestarts() > 0 })
	detail := f.store.Members()[w.GetId()].Services["sidecar"].Detail
	require.Contains(t, detail, "the liveness probe failed: ")
	require.Contains(t, detail, "𝄞")
	require.True(t, utf8.ValidString(detail), "%q", detail)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
}

func TestAnUpgradeTouchesOnlyWhatDiffers(t *testing.T) {
	f := newFixture(t)
	one := f.hub.compose("wait", "")
	f.push(one)
	ready := f.untilStatus(one.GetId(), protocol.WorkloadStatus_READY)
	pids := func() [2]uint32 {
		return [2]uint32{f.service(one.GetId(), "server").PID, f.service(one.GetId(), "db").PID}
	}
	before, sidecar := pids(), f.service(one.GetId(), "sidecar").PID
	two := next(one, f.hub.compose("wait", `env: [{name: GREETING, value: "Hello again"}]`))
	f.push(two)
	upgraded := f.until(one.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.Equal(t, before, pids())
	require.NotEqual(t, sidecar, f.service(one.GetId(), "sidecar").PID)
	was, is := serviceOf(ready, "migrate").GetExitedAt(), serviceOf(upgraded, "migrate").GetExitedAt()
	require.Equal(t, was.AsTime(), is.AsTime())

	// The third revision never comes up: the node goes back, and leaves again what does not differ.
	three := next(two, f.hub.compose(`exit, "1"`, neverReady))
	f.push(three)
	back := f.until(one.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetFallbackFromRevision() == 3 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.Contains(t, back.GetDetail(), "service sidecar")
	require.Equal(t, before, pids())
	get(t, url(back, "/"))

	f.measured(one.GetId())
	f.push()
	f.untilStatus(one.GetId(), protocol.WorkloadStatus_REMOVED)
}

// hammer gets a URL again and again until the answer to stop, which is how many requests have failed.
func hammer(url string) (stop func() int) {
	quit, failed := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-quit:
				failed <- n
				return
			default:
			}
			resp, err := http.Get(url)
			if err != nil || resp.StatusCode != http.StatusOK {
				n++
			}
			if err == nil {
				_ = resp.Body.Close()
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	return func() int {
		close(quit)
		return <-failed
	}
}

// The server differs, and the sidecar waits for it; the database and its migration go on.
func TestServicesThatDifferStartBesideTheOthers(t *testing.T) {
	f := newFixture(t)
	version := func(sidecar, more, greeting string) *protocol.Workload {
		return f.hub.compose(sidecar, more, "metering:", "upgrade: {strategy: start_first}\n  metering:",
			"aliases: [api, api.hello]", `aliases: [api, api.hello]
        env: [{name: GREETING, value: "`+greeting+`"}]`)
	}
	one := version("wait", "", "one")
	f.push(one)
	ready := f.untilStatus(one.GetId(), protocol.WorkloadStatus_READY)
	id, failed := one.GetId(), hammer(url(ready, "/"))
	pids := func() [3]uint32 {
		return [3]uint32{f.service(id, "db").PID, f.service(id, "server").PID, f.service(id, "sidecar").PID}
	}
	first := pids()
	two := next(one, version("wait", "", "two"))
	f.push(two)
	f.until(id, func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	second := pids()
	require.Equal(t, first[0], second[0])
	require.NotEqual(t, first[1], second[1])
	require.NotEqual(t, first[2], second[2], "it would have the address of the one that has ended")
	for _, service := range []string{"db", "sidecar"} {
		out, code := f.fetch(f.service(id, service), "http://api:8080/")
		require.Zero(t, code, out)
		require.Contains(t, out, "two", service)
	}

	// The sidecar of the third revision is never ready: the node goes back to what has never stopped.
	f.push(next(two, version(`exit, "1"`, neverReady, "three")))
	f.until(id, func(s *protocol.WorkloadStatus) bool {
		return s.GetFallbackFromRevision() == 3 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.Equal(t, second, pids())
	require.Equal(t, "two\n", get(t, url(ready, "/")))
	require.Zero(t, failed(), "requests have failed")
	require.Eventually(t, func() bool { return len(f.store.Members()[id].Services) == 4+4 }, time.Minute,
		50*time.Millisecond, "each service, and the one network of each")
	f.measured(id)
	f.push()
	f.untilStatus(id, protocol.WorkloadStatus_REMOVED)
}

// An image that a service mounts is pulled before the service starts; its programs run there.
func TestAServiceMountsAnotherImage(t *testing.T) {
	f := newFixture(t)
	other := f.hub.push("apps/hello/other", "/tool")
	w := f.hub.compose("wait", `image_mounts: [{image_ref: "`+other+`", path: /opt/other}]`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	sidecar := f.service(w.GetId(), "sidecar")
	run := func(argv ...string) int {
		code, err := f.rt.Exec(f.ctx(), sidecar.ID, argv, time.Minute)
		require.NoError(t, err)
		return code
	}
	require.Equal(t, 7, run("/opt/other/tool", "exit", "7"))
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
}

// A service whose ports change is attached anew. Its peers run on and find it at its new address.
func TestAServiceThatMovesIsFoundByItsPeers(t *testing.T) {
	f := newFixture(t)
	one, stranger := f.hub.compose("wait", ""), f.hub.compose("wait", "")
	f.push(one, stranger)
	f.untilStatus(one.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(stranger.GetId(), protocol.WorkloadStatus_READY)
	server, db := f.service(one.GetId(), "server"), f.store.Members()[one.GetId()].Services["db"].IP
	const greeting = `env: [{name: ADDR, value: ":5432"}, {name: GREETING, value: "I am the database"}]`
	moved := f.hub.compose("wait", "", greeting, greeting+"\n        ports: [{name: sql, container: 5432}]")
	f.push(next(one, moved), stranger)
	f.until(one.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY && len(s.GetEndpoints()) == 2
	})
	require.Equal(t, server.PID, f.service(one.GetId(), "server").PID)
	require.NotEqual(t, db, f.store.Members()[one.GetId()].Services["db"].IP)
	for _, c := range []runtime.Container{server, f.service(stranger.GetId(), "server")} {
		out, code := f.fetch(c, "http://db:5432/")
		require.Zero(t, code, "each finds its own: %s", out)
	}
	f.push()
	f.untilStatus(one.GetId(), protocol.WorkloadStatus_REMOVED)
	f.untilStatus(stranger.GetId(), protocol.WorkloadStatus_REMOVED)
}
