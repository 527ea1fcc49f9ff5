package lifecycle_test

import (
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vllmopenai "github.com/gpuaas/gpuaas/deploy/apps/vllm-openai"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// fieldNode is a kind of node, and what the vLLM app is on it.
type fieldNode struct {
	harness.NodeKind
	// image is the artifact that the app must run there.
	image string
	// version, next and broken are the versions that it has: at first, after an upgrade, and never ready.
	version, next, broken string
	// reason is why the broken one is left.
	reason string
	// restarts says that a new config restarts the app.
	restarts bool

	node *harness.Testbed
}

func fieldNodes(t *testing.T) (nodes []fieldNode) {
	t.Helper()
	for _, kind := range harness.NodeKinds(t) {
		n := fieldNode{
			NodeKind: kind, image: "server", version: "1.0.0", next: "1.1.0", broken: "1.3.0", reason: "readiness_timeout",
		}
		switch kind.Name {
		case "cpu":
			n.broken, n.reason = "1.2.0", "crash_loop"
		case "amd":
			n.image, n.version, n.next, n.broken, n.restarts = "rocm", "1.0.1", "1.1.1", "1.3.1", true
		case "nvidia":
			n.image = "cuda"
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// shipFieldApp ships the vLLM app with an image of its own for each kind of node, and a service that must end before
// the server starts.
func shipFieldApp(w *harness.Testbed) {
	t := w.T
	t.Helper()
	images, err := vllmopenai.Images(filepath.Join(w.Dir, "vllm"), func(program, binary string) error {
		return devcluster.Build(w.Ctx, harness.Source(t), program, binary)
	})
	require.NoError(t, err)
	images["cuda"], images["rocm"] = images["server"], images["server"]
	images["prepare"], err = devcluster.DemoImage(harness.DemoBinary(t))
	require.NoError(t, err)
	template := harness.Edited(t, vllmopenai.Template(),
		`accelerator: nvidia, image_ref: "${server_image}"`, `accelerator: nvidia, image_ref: "${cuda_image}"`,
		`accelerator: amd, image_ref: "${server_image}"`, `accelerator: amd, image_ref: "${rocm_image}"`,
		"        aliases: [server]\n", "        aliases: [server]\n        volumes:\n"+
			"          - {name: cache, path: /cache, size_mib: 16}\n        depends_on:\n"+
			"          - {service: prepare, condition: service_completed_successfully}\n",
		"      - name: monitor\n", `      - name: prepare
        image_variants:
          - {name: any, accelerator: none, image_ref: "${prepare_image}"}
        args: [exit, "0"]
        resources:
          cpu_millis: {min: 50, default: 50, max: 50}
          memory_mib: {min: 32, default: 32, max: 32}
        restart: on_failure
      - name: monitor
`)
	w.Publisher, err = w.Tenant.NewPublisher(w.Ctx)
	require.NoError(t, err)
	ship := func(version string, changes ...string) {
		_, err := w.Tenant.Ship(w.Ctx, w.Publisher, scenario.Release{
			AppSlug: vllmSlug, Version: version, Images: images, Template: harness.Edited(t, template, changes...),
		})
		require.NoError(t, err)
	}
	restart := []string{"{on_change: none}", "{on_change: restart}"}
	sidecar := []string{`value: ":9400"}`, `value: ":9400"}` + "\n          - {name: RELEASE, value: next}"}
	unready := []string{
		"path: /health, period_millis: 200", "path: /nowhere, period_millis: 200",
		"readiness_timeout_seconds: 600", "readiness_timeout_seconds: 3",
	}
	ship("1.0.0")
	ship("1.0.1", restart...)
	ship("1.1.0", sidecar...)
	ship("1.1.1", append(sidecar, restart...)...)
	ship("1.2.0", "- --port=8000\n", "- --port=8000\n          - --pipeline-parallel-size=64\n")
	ship("1.3.0", unready...)
	ship("1.3.1", append(unready, restart...)...)
	require.NoError(t, w.Tenant.Entitle(w.Ctx, vllmSlug))
	require.NoError(t, w.Tenant.Price(w.Ctx, vllmSlug, harness.PricePerHour))
}

// The vLLM app, with a sidecar and a service that runs once, is created, called, followed, configured, upgraded, left,
// rolled back, stopped, started, killed, rebooted and decommissioned on a node of each kind; what one service suffers
// the other does not notice.
func TestTheVLLMAppLivesOnEachKindOfNode(t *testing.T) {
	w := harness.New(t)
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	nodes := fieldNodes(t)
	for n := range nodes {
		nodes[n].node = w.StartNode(nodes[n].NodeKind)
	}
	shipFieldApp(w)
	user := w.UserShell(w.AdminShell())
	var lives sync.WaitGroup
	for _, n := range nodes {
		lives.Go(func() {
			t.Run(n.Name, func(t *testing.T) {
				n.node.T = t
				l := fieldLife{Testbed: n.node, fieldNode: n, user: &harness.Shell{Testbed: n.node, Env: user.Env}}
				l.live()
			})
		})
	}
	lives.Wait()
}

// fieldLife is an instance of the vLLM app on a node.
type fieldLife struct {
	*harness.Testbed
	fieldNode
	user *harness.Shell
	i    api.AppInstance
	// idle are the times in which nothing of it ran; lost bounds how long it was not billed in all.
	idle []timespan
	lost time.Duration
}

type timespan struct{ from, to time.Time }

func (l *fieldLife) live() {
	l.Take(
		harness.Step{Name: "create", Take: l.create},
		harness.Step{Name: "devices", Take: l.requireDevices},
		harness.Step{Name: "access", Take: l.requireAccess},
		harness.Step{Name: "logs", Take: l.requireLogs},
		harness.Step{Name: "exec", Take: l.requireExec},
		harness.Step{Name: "config", Take: l.configure},
		harness.Step{Name: "upgrade", Take: l.upgrade},
		harness.Step{Name: "failed upgrade", Take: l.failUpgrade},
		harness.Step{Name: "rollback", Take: l.rollBack},
		harness.Step{Name: "stop and start", Take: l.stopAndStart},
		harness.Step{Name: "kill", Take: l.kill},
		harness.Step{Name: "reboot", Take: l.reboot},
		harness.Step{Name: "devices again", Take: l.requireDevices},
		harness.Step{Name: "decommission", Take: l.decommission},
	)
}

func (l *fieldLife) create() {
	in := api.AppInstanceCreate{
		AppSlug: vllmSlug, Version: l.version, DisplayName: l.Name,
		Parameters: map[string]any{"model": "org/model", "max_model_len": 64},
	}
	l.AllocateOn(l.NodeKind)
	if l.GPUs > 0 {
		in.Resources.Accelerators = &l.GPUs
		// The server ends where it does not see as many.
		in.Parameters["tensor_parallel_size"] = l.GPUs
	}
	in.PlacementIntent.AllocationIds = []string{l.Allocation.ID}
	var err error
	l.i, _, err = l.Tenant.Launch(l.Ctx, l.Operator, in, nil)
	require.NoError(l.T, err)
	require.Equal(l.T, api.AppInstanceHealthHealthy, l.Instance(l.i.ID).Health)
	l.requireOrder(time.Time{})
	vllm, prepare, _ := l.services()
	l.lost += vllm.StartedAt.Sub(prepare.ExitedAt) // neither ran
	found := l.Running(l.i)
	require.Len(l.T, found, 2)
	require.Contains(l.T, found["vllm"].Image, vllmSlug+"/"+l.image+"@")
}

// services are the instance's services as the API shows them.
func (l *fieldLife) services() (vllm, prepare, monitor api.MemberService) {
	l.T.Helper()
	all := l.Instance(l.i.ID).Members[0].Services
	require.Len(l.T, all, 3)
	for n, name := range []string{"vllm", "prepare", "monitor"} {
		require.Equal(l.T, name, all[n].Name)
	}
	return all[0], all[1], all[2]
}

// requireOrder checks that each service started after a time, and after what it depends on.
func (l *fieldLife) requireOrder(after time.Time) {
	l.T.Helper()
	vllm, prepare, monitor := l.services()
	require.Equal(l.T, []string{"ready", "completed", "ready"},
		[]string{string(vllm.Status), string(prepare.Status), string(monitor.Status)})
	require.False(l.T, vllm.StartedAt.Before(after), "the server started at %s", vllm.StartedAt)
	require.False(l.T, vllm.StartedAt.Before(prepare.ExitedAt), "the server waits for the preparation")
	require.False(l.T, monitor.StartedAt.Before(vllm.ReadyAt), "the sidecar waits for the server")
}

// awaitServing waits until the server answers and the sidecar has read that from its metrics.
func (l *fieldLife) awaitServing() {
	l.T.Helper()
	l.Eventually("the server answers", func() error { return complete(l.Testbed, l.i, "one two three") })
	l.Eventually("the sidecar reads the server's metrics by its name", func() error {
		m, err := monitor(l.Testbed, l.i)
		return harness.Pending(err, m.PromptTokens >= 3)
	})
}

func (l *fieldLife) requireDevices() { l.RequireDevices(l.NodeKind, l.i, "vllm") }
