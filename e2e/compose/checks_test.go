package compose_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/execstream"
)

// app is a file that runs.
type app struct {
	*harness.Testbed
	i          client.AppInstance
	containers map[string]harness.ServiceContainer
}

// proc is a file of a service's process.
func (a *app) proc(service, file string) string {
	a.T.Helper()
	require.Contains(a.T, a.containers, service)
	return fmt.Sprintf("/proc/%d/%s", a.containers[service].PID, file)
}

func (a *app) read(service, file string) string {
	a.T.Helper()
	text, err := os.ReadFile(a.proc(service, file))
	require.NoError(a.T, err)
	return string(text)
}

func (a *app) requireEnv(service string, want ...string) {
	a.T.Helper()
	require.Subset(a.T, strings.Split(a.read(service, "environ"), "\x00"), want)
}

// service is a service as the API shows it.
func (a *app) service(name string) client.MemberService {
	a.T.Helper()
	for _, s := range a.i.Members[0].Services {
		if s.Name == name {
			return s
		}
	}
	require.Fail(a.T, "there is no service", name)
	return client.MemberService{}
}

// requireAnswers asks every published port.
func (a *app) requireAnswers(ports int) {
	a.T.Helper()
	require.Len(a.T, a.i.Endpoints, ports)
	for _, e := range a.i.Endpoints {
		a.Eventually(e.Name+" answers", func() error {
			_, err := scenario.Get(a.Ctx, "http://"+e.URL[strings.Index(e.URL, "//")+2:])
			return err
		})
	}
}

// requireReaches runs a command in a service that calls another one by this name.
func (a *app) requireReaches(from, name string) {
	a.T.Helper()
	a.Eventually(from+" reaches "+name, func() error {
		s, err := a.Operator.Exec(a.Ctx, a.Tenant.Project.ID, a.i.ID, client.AppInstanceExec{
			Service: from, Command: []string{"/app", "get", "http://" + name + "/"},
		})
		if err != nil {
			return err
		}
		defer s.Abort()
		kind, payload, err := execstream.Receive(s)
		return harness.Pending(err, kind == execstream.Stdout && len(payload) > 0)
	})
}

// requireBefore checks that one service was done, ready or started before another one started.
func (a *app) requireBefore(first, then string) {
	a.T.Helper()
	one, two := a.service(first), a.service(then)
	at := one.StartedAt
	if one.Status == "completed" {
		at = one.ExitedAt
	}
	require.False(a.T, at.IsZero())
	require.False(a.T, two.StartedAt.Before(at), "%s starts after %s", then, first)
}

// requireReadyBefore checks that one service was ready before another one started.
func (a *app) requireReadyBefore(first, then string) {
	a.T.Helper()
	require.False(a.T, a.service(first).ReadyAt.IsZero())
	require.False(a.T, a.service(then).StartedAt.Before(a.service(first).ReadyAt), "%s waits for %s", then, first)
}

// requireMemory checks that a directory is a file system in memory of this size.
func (a *app) requireMemory(service, dir string, mib uint64) {
	a.T.Helper()
	var st unix.Statfs_t
	require.NoError(a.T, unix.Statfs(a.proc(service, "root"+dir), &st))
	require.EqualValues(a.T, unix.TMPFS_MAGIC, st.Type, dir)
	require.Equal(a.T, mib<<20, st.Blocks*uint64(st.Bsize), dir)
}

// requireReadOnly checks that a directory refuses to be written to, also by its owner.
func (a *app) requireReadOnly(service, dir string) {
	a.T.Helper()
	err := os.WriteFile(a.proc(service, "root"+dir+"/probe"), nil, 0o600)
	require.ErrorIs(a.T, err, unix.EROFS, dir)
}

// requirePids checks how many processes the service's cgroup allows.
func (a *app) requirePids(service string, most int) {
	a.T.Helper()
	id := a.containers[service].ID
	below := filepath.Join(a.Agent.Config.CgroupParent, harness.MemberOf(id), id, "pids.max")
	text, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/pids", below))
	if err != nil {
		text, err = os.ReadFile(filepath.Join("/sys/fs/cgroup", below))
	}
	require.NoError(a.T, err)
	require.Equal(a.T, strconv.Itoa(most), string(bytes.TrimSpace(text)))
}

// requireGPUs counts the device nodes of GPUs that a service has.
func (a *app) requireGPUs(service, pattern string, count int) {
	a.T.Helper()
	found, err := filepath.Glob(a.proc(service, "root/dev/"+pattern))
	require.NoError(a.T, err)
	require.Len(a.T, found, count)
}

// requireUser checks which user of the container the service is.
func (a *app) requireUser(service string, id int) {
	a.T.Helper()
	var first, host, size, own int
	_, err := fmt.Sscan(a.read(service, "uid_map"), &first, &host, &size)
	require.NoError(a.T, err)
	_, text, _ := strings.Cut(a.read(service, "status"), "\nUid:")
	_, err = fmt.Sscan(text, &own)
	require.NoError(a.T, err)
	require.Equal(a.T, id, own-host+first)
}

// checks are what each file's first line says, seen from outside of the containers.
func checks() map[string]func(a *app) {
	answers := func(a *app) { a.requireAnswers(1) }
	return map[string]func(a *app){
		"01-one-service": answers,
		"02-web-and-database": func(a *app) {
			a.requireReadyBefore("db", "web")
			a.requireEnv("web", "DATABASE_URL=postgres://app@db:5432/app")
			a.requireEnv("db", "POSTGRES_USER=app", "POSTGRES_HOST_AUTH_METHOD=trust")
			a.requireReaches("web", "db:5432")
		},
		"03-depends-on-list": func(a *app) {
			a.requireBefore("cache", "api")
			a.requireBefore("queue", "api")
		},
		"04-one-shot-migration": func(a *app) {
			a.requireDone("migrate")
			a.requireBefore("migrate", "app")
		},
		"05-one-shot-without-policy": func(a *app) {
			a.requireDone("fetch")
			a.requireBefore("fetch", "app")
		},
		"06-command-as-text": func(a *app) {
			require.Equal(a.T, "server\x00--greeting\x00hello world\x00--dollar\x00$5\x00", a.read("app", "cmdline"))
		},
		"07-healthcheck-shell": func(a *app) { require.Equal(a.T, client.AppInstanceHealthHealthy, a.i.Health) },
		"08-healthcheck-disabled": func(a *app) {
			a.requireAnswers(1)
			require.Len(a.T, a.containers, 2)
		},
		"09-environment-as-map":   func(a *app) { a.requireEnv("app", "WORKERS=4", "DEBUG=true", "EMPTY=") },
		"10-ports-in-every-form":  func(a *app) { a.requireAnswers(7) },
		"11-deploy-resources":     func(a *app) { a.requirePids("app", 200) },
		"12-old-limits":           checkOldLimits,
		"13-tmpfs":                checkTmpfs,
		"14-configs-with-content": checkConfigs,
		"15-capabilities":         checkCapabilities,
		"16-user-and-root":        checkUser,
		"17-network-aliases":      checkAliases,
		"18-underscore":           func(a *app) { a.requireReaches("web-app", "my_db:8000") },
		"19-gpus-all":             checkAllGPUs,
		"20-gpu-reservation":      checkReservation,
		"21-amd":                  func(a *app) { a.requireGPUs("llm", "dri/renderD*", 1) },
		"22-anchors":              checkAnchors,
		"23-labels":               answers,
		"24-five-services":        checkFive,
		"25-pinned-image":         answers,
		"26-named-volumes":        checkVolumes,
		"27-merged-names":         checkMerged,
		"28-emptied-entrypoint": func(a *app) {
			require.Equal(a.T, "server\x00--fast\x00", a.read("app", "cmdline"))
			require.Equal(a.T, "server\x00", a.read("db", "cmdline"))
			require.Equal(a.T, "server\x00", a.read("cache", "cmdline"), "tini has become it")
		},
		"29-healthcheck-times": func(a *app) { a.requireReadyBefore("model", "app") },
	}
}

// requireDone checks that a service that runs once is done.
func (a *app) requireDone(once string) {
	a.T.Helper()
	a.Eventually(once+" is done", func() error {
		a.i = a.Instance(a.i.ID)
		return harness.Pending(nil, a.service(once).Status == "completed")
	})
	require.Zero(a.T, a.service(once).ExitCode)
}

func checkOldLimits(a *app) {
	a.requirePids("app", 300)
	a.requireMemory("app", "/dev/shm", 256)
}

func checkTmpfs(a *app) {
	a.requireMemory("app", "/run", 64)
	a.requireMemory("worker", "/tmp", 32)
	a.requireMemory("worker", "/var/cache/worker", 64)
	a.requireMemory("worker", "/scratch", 16)
}

func checkConfigs(a *app) {
	require.Equal(a.T, "hello", a.read("proxy", "root/motd"))
	const path = "root/etc/proxy/proxy.conf"
	require.Equal(a.T, "listen 80;\nforward app:8000;\n", a.read("proxy", path))
	info, err := os.Stat(a.proc("proxy", path))
	require.NoError(a.T, err)
	require.Equal(a.T, fs.FileMode(0o440), info.Mode())
}

func checkCapabilities(a *app) {
	_, text, _ := strings.Cut(a.read("app", "status"), "\nCapEff:")
	effective, err := strconv.ParseUint(strings.Fields(text)[0], 16, 64)
	require.NoError(a.T, err)
	require.NotZero(a.T, effective&(1<<unix.CAP_SYS_NICE))
	require.NotZero(a.T, effective&(1<<unix.CAP_NET_BIND_SERVICE))
	require.Zero(a.T, effective&(1<<unix.CAP_SYS_ADMIN))
}

func checkUser(a *app) {
	a.requireUser("app", 1000)
	a.requireReadOnly("app", "/srv")
	cwd, err := os.Readlink(a.proc("app", "cwd"))
	require.NoError(a.T, err)
	require.Equal(a.T, "/srv", cwd)
}

func checkAliases(a *app) {
	a.requireReaches("app", "database:8000")
	a.requireReaches("app", "db.internal:8000")
	a.requireReaches("db", "the-app:8000")
}

func checkAllGPUs(a *app) {
	a.requireGPUs("llm", "nvidia[0-9]*", 1)
	a.requireMemory("llm", "/dev/shm", 1024)
}

func checkReservation(a *app) {
	a.requireGPUs("llm", "nvidia[0-9]*", 2)
	a.requireGPUs("metrics", "nvidia*", 0)
	a.requireBefore("llm", "metrics")
}

func checkAnchors(a *app) {
	a.requireEnv("app", "TZ=UTC")
	a.requireEnv("worker", "TZ=UTC", "QUEUE=default")
	a.Explain(harness.Faults{Why: "a worker is killed", Restarts: 1})
	require.NoError(a.T, unix.Kill(int(a.containers["worker"].PID), unix.SIGKILL))
	a.Eventually("the worker is started again", func() error {
		a.i = a.Instance(a.i.ID)
		return harness.Pending(nil, a.service("worker").Restarts == 1)
	})
}

func checkMerged(a *app) {
	a.requireReadOnly("app", "/srv")
	a.requireReaches("db", "front:8000")
	a.requireReaches("app", "queue:8000")
	a.requireBefore("db", "app")
	require.NoError(a.T, os.WriteFile(a.proc("db", "root/data/file"), nil, 0o600))
}

func checkFive(a *app) {
	require.Len(a.T, a.containers, 5)
	a.requireReadyBefore("db", "api")
	a.requireBefore("cache", "api")
	a.requireReadyBefore("api", "gateway")
	a.requireReaches("gateway", "worker:8000")
}

func checkVolumes(a *app) {
	a.requireDone("fetch")
	a.Eventually("the volume that both mount has what one wrote", func() error {
		text, err := os.ReadFile(a.proc("app", "root/models/weights"))
		return harness.Pending(err, string(text) == "weights")
	})
	a.requireReadOnly("app", "/models")
	require.NoError(a.T, os.WriteFile(a.proc("app", "root/var/lib/app/file"), nil, 0o600))
}
