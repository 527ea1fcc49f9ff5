package guide_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
)

// Languages of the blocks in the guides.
const (
	// blockRun is run as it stands, in the shell of the guide's reader.
	blockRun = "sh"
	// blockAdmin is run in the platform admin's shell, which the operator's guide uses throughout.
	blockAdmin = "sh admin"
	// blockConsole cannot run in a test: it holds only commands of consoleCommands.
	blockConsole = "console"
)

// block is one fenced block of a guide.
type block struct {
	guide    string
	line     int
	language string
	text     string
}

func (b block) String() string { return fmt.Sprintf("docs/guide/%s.md:%d", b.guide, b.line) }

// readGuide returns the blocks of a guide in their order.
func readGuide(t *testing.T, guide string) (blocks []block) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(harness.Source(t), "docs", "guide", guide+".md"))
	require.NoError(t, err)
	open := false
	for n, line := range strings.Split(string(data), "\n") {
		fence, isFence := strings.CutPrefix(line, "```")
		switch {
		case isFence && !open:
			blocks, open = append(blocks, block{guide: guide, line: n + 1, language: fence}), true
		case isFence:
			open = false
		case open:
			blocks[len(blocks)-1].text += line + "\n"
		}
	}
	require.False(t, open, "%s.md ends within a block", guide)
	return blocks
}

// consoleCommands are the commands of a guide that no test runs: they change a machine's packages, users and units, or
// need a program that the tests do without.
func consoleCommands() []string {
	return []string{"apt-get", "chown", "docker", "install", "journalctl", "ssh", "systemctl", "useradd"}
}

// Every block of the guides is either run by TestGuidesWorkAsWritten, holds only commands of consoleCommands, or shows
// a file.
func TestGuidesHoldNoCommandThatIsNotRun(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(harness.Source(t), "docs", "guide", "*.md"))
	require.NoError(t, err)
	require.Len(t, files, len(guides()), "a new guide belongs into guides()")
	for _, guide := range guides() {
		for _, b := range readGuide(t, guide) {
			switch b.language {
			case blockRun, blockAdmin, "dockerfile", "yaml":
			case blockConsole:
				for line := range strings.Lines(b.text) {
					require.Contains(t, consoleCommands(), strings.Fields(line)[0], "%s: %s", b, line)
				}
			default:
				t.Errorf("%s: a block of %q is neither run nor known", b, b.language)
			}
		}
	}
}

// What a guide names between two blocks is a command that exists, with flags that it has.
func TestGuidesNameCommandsThatExist(t *testing.T) {
	inline := regexp.MustCompile("`(gpuaas(?:-hub|-agent)? [a-z][^`]*)`")
	flag := regexp.MustCompile(`(?:^| )--([a-z-]+)`)
	for _, guide := range guides() {
		for _, m := range inline.FindAllStringSubmatch(guideProse(t, guide), -1) {
			words := strings.Fields(m[1])
			argument := slices.IndexFunc(words, func(w string) bool {
				return !regexp.MustCompile(`^[a-z][a-z-]*$`).MatchString(w)
			})
			if argument > 0 {
				words = words[:argument]
			}
			help, err := exec.Command(filepath.Join(harness.Binaries(t), words[0]), append(slices.Clone(words[1:]),
				"--help")...).
				Output()
			require.NoError(t, err, "%s: %s", guide, m[1])
			used, _, _ := strings.Cut(string(help), "\nFlags:")
			require.Contains(t, used, "  "+strings.Join(words, " "), "%s: %s", guide, m[1])
			for _, f := range flag.FindAllStringSubmatch(m[1], -1) {
				require.Contains(t, string(help), " --"+f[1]+" ", "%s: %s", guide, m[1])
			}
		}
	}
}

// guideProse is a guide without its blocks, each run of white space as one space.
func guideProse(t *testing.T, guide string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(harness.Source(t), "docs", "guide", guide+".md"))
	require.NoError(t, err)
	var prose []string
	for n, part := range strings.Split(string(data), "```") {
		if n%2 == 0 {
			prose = append(prose, strings.Fields(part)...)
		}
	}
	return strings.Join(prose, " ")
}

// guides are run in this order: each starts with what the one before has left.
func guides() []string { return []string{"operator", "app-team", "tenant"} }

// The guides are followed on one machine that is hub and node: each block as it stands, but for the names of this
// test's own directories and ports; what systemctl would do with a unit, the test does.
func TestGuidesWorkAsWritten(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	r := newGuideRun(w)
	admin := r.terminal("admin")
	for _, guide := range guides() {
		reader := admin
		if guide != "operator" {
			reader = r.terminal(guide)
		}
		for _, b := range readGuide(t, guide) {
			switch b.language {
			case blockRun:
				reader.follow(b)
			case blockAdmin:
				admin.follow(b)
			case blockConsole:
				for line := range strings.Lines(b.text) {
					r.console(b, strings.TrimSpace(line))
				}
			}
		}
	}
	for _, effect := range slices.Sorted(maps.Keys(r.effects)) {
		require.Contains(t, r.done, effect, "no guide has this command any more")
	}
}

// guideRun is the machine on which the guides are followed.
type guideRun struct {
	w    *harness.Testbed
	hub  devcluster.HubConfig
	node devcluster.AgentConfig
	// place translates a guide's names into this test's.
	place *strings.Replacer
	// env is what a terminal of this machine has beside its own home.
	env []string

	// effects are what console commands do here; done are those that were met.
	effects map[string]func()
	done    map[string]bool

	runningHub  *devcluster.Hub
	runningNode *devcluster.Agent
}

func newGuideRun(w *harness.Testbed) *guideRun {
	w.T.Helper()
	address := harness.FreeAddress()
	r := &guideRun{w: w, hub: w.HubConfig(), done: map[string]bool{}}
	r.hub.Listen, r.hub.SessionListen = address, address
	// What the guide's agent.env and join token say is read when the agent starts.
	w.Hub = &devcluster.Hub{Config: r.hub}
	r.node = w.AgentConfig("node")
	r.node.ExtraArgs = append(r.node.ExtraArgs, "--dial-retry-max", "500ms")
	w.WatchForAudit(r.node)
	work, etc, backups := filepath.Join(w.Dir, "work"), filepath.Join(w.Dir, "etc"), filepath.Join(w.Dir, "backups")
	for _, dir := range []string{r.hub.Dir, r.node.Dir, work, etc, backups} {
		require.NoError(w.T, os.MkdirAll(dir, 0o711))
	}
	host, _, err := net.SplitHostPort(address)
	require.NoError(w.T, err)
	r.place = strings.NewReplacer(
		"hub.example.com:8443", address, "0.0.0.0:8443", address, "hub.example.com", host,
		"/var/lib/gpuaas-hub-keys", r.hub.KeyDir(), "/var/lib/gpuaas-hub", r.hub.DataDir(), "/var/backups/gpuaas-hub",
		backups,
		"/etc/gpuaas/join-token", filepath.Join(r.node.Dir, "join-token"), "/etc/gpuaas", etc, "/root/gpuaas", work,
		"/run/containerd/containerd.sock", w.Containerd.Address, "/usr/local/bin", harness.Binaries(w.T),
	)
	r.env = []string{
		"PATH=" + harness.Binaries(w.T) + ":" + os.Getenv("PATH"),
		"GPUAAS_HUB_DATA_DIR=" + r.hub.DataDir(), "GPUAAS_HUB_KEY_DIR=" + r.hub.KeyDir(),
		"GPUAAS_AGENT_DATA_DIR=" + r.node.DataDir(), "GPUAAS_AGENT_RUN_DIR=" + r.node.RunDir,
		"GPUAAS_AGENT_LOCAL_SOCKET=" + r.node.LocalSocket(), "GPUAAS_AGENT_CONTAINERD_NAMESPACE=" +
			r.node.ContainerdNamespace,
		"GPUAAS_AGENT_BRIDGE=" + r.node.Bridge, "GPUAAS_AGENT_POD_CIDR=" + r.node.PodCIDR,
		"GPUAAS_AGENT_PORT_RANGE=" + r.node.PortRange, "GPUAAS_AGENT_CGROUP_PARENT=" + r.node.CgroupParent,
	}
	r.effects = map[string]func(){
		"systemctl enable --now gpuaas-hub.service":    r.startHub,
		"systemctl start gpuaas-hub.service":           r.startHub,
		"systemctl stop gpuaas-hub.service":            r.stopHub,
		"systemctl restart gpuaas-hub.service":         func() { r.stopHub(); r.startHub() },
		"systemctl reload gpuaas-hub.service":          r.reloadHub,
		"systemctl start gpuaas-hub-backup.service":    r.backUp,
		"systemctl enable --now gpuaas-agent.service":  r.startNode,
		"systemctl start gpuaas-agent.service":         r.startNode,
		"systemctl stop gpuaas-agent.service":          r.stopNode,
		"systemctl disable --now gpuaas-agent.service": r.stopNode,
		"systemctl restart gpuaas-agent.service":       func() { r.stopNode(); r.startNode() },
		"docker save -o hello.tar hello:1.0.0":         r.saveImage,
	}
	w.T.Cleanup(func() {
		if r.runningHub != nil {
			r.stopHub()
		}
	})
	w.T.Cleanup(func() {
		if r.runningNode != nil {
			r.stopNode()
			require.NoError(w.T, devcluster.Uninstall(context.WithoutCancel(w.Ctx), r.node))
		}
	})
	w.Explain(harness.Faults{Why: "the operator's guide has the node leave and enroll again, twice", Enrolments: 2})
	w.AuditAtEnd()
	return r
}

// unitsOfProduct are the units whose commands must do something here.
var unitsOfProduct = regexp.MustCompile(`^systemctl .*\bgpuaas-[a-z-]+\.service$`)

// console does what a command would do to hub and node; all else a test machine does not need.
func (r *guideRun) console(b block, line string) {
	r.w.T.Helper()
	effect, known := r.effects[line]
	if !known {
		require.NotRegexp(r.w.T, unitsOfProduct, line, "%s: the test does not know what this does", b)
		return
	}
	r.done[line] = true
	effect()
}

// unit reads a unit file and gives the value of a key, with systemd's escapes resolved.
func (r *guideRun) unit(file, key string) string {
	r.w.T.Helper()
	data, err := os.ReadFile(filepath.Join(harness.Source(r.w.T), "systemd", file))
	require.NoError(r.w.T, err)
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), key+"="); ok {
			return r.place.Replace(strings.NewReplacer("%%", "%", "$$", "$").Replace(value))
		}
	}
	require.Fail(r.w.T, "no such key", "%s has no %s", file, key)
	return ""
}

// environment reads the file that a unit names.
func (r *guideRun) environment(unit string) (pairs []string) {
	r.w.T.Helper()
	data, err := os.ReadFile(r.unit(unit, "EnvironmentFile"))
	require.NoError(r.w.T, err)
	return strings.Fields(string(data))
}

// settings is environment, of which each variable must be a flag of the unit's program.
func (r *guideRun) settings(unit string) (pairs []string) {
	r.w.T.Helper()
	help, err := exec.CommandContext(r.w.Ctx, "sh", "-c", r.unit(unit, "ExecStart")+" --help").Output()
	require.NoError(r.w.T, err)
	has := flags(regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z-]+)`), string(help))
	pairs = r.environment(unit)
	for _, pair := range pairs {
		variable, _, _ := strings.Cut(pair, "=")
		_, flag, _ := strings.Cut(strings.TrimPrefix(variable, "GPUAAS_"), "_")
		require.Contains(r.w.T, has, strings.ToLower(strings.ReplaceAll(flag, "_", "-")), variable)
	}
	return pairs
}

func (r *guideRun) startHub() {
	r.w.T.Helper()
	require.Nil(r.w.T, r.runningHub)
	c := r.hub
	c.Env = r.settings("gpuaas-hub.service")
	var err error
	r.runningHub, err = devcluster.StartHub(r.w.Ctx, c)
	require.NoError(r.w.T, err)
}

func (r *guideRun) stopHub() {
	r.w.T.Helper()
	require.NotNil(r.w.T, r.runningHub)
	require.NoError(r.w.T, r.runningHub.Stop())
	r.runningHub = nil
}

func (r *guideRun) reloadHub() {
	r.w.T.Helper()
	require.Equal(r.w.T, "/bin/kill -HUP $MAINPID", r.unit("gpuaas-hub.service", "ExecReload"))
	require.NoError(r.w.T, syscall.Kill(r.runningHub.PID, syscall.SIGHUP))
}

func (r *guideRun) backUp() {
	r.w.T.Helper()
	s := &harness.Shell{Testbed: r.w, Env: append(r.env, r.environment("gpuaas-hub-backup.service")...)}
	for _, key := range []string{"ExecStart", "ExecStartPost"} {
		said := s.Run("bash", "-c", r.unit("gpuaas-hub-backup.service", key))
		require.Zero(r.w.T, said.Code, "%s: %s", said.Out, said.Err)
	}
}

func (r *guideRun) startNode() {
	r.w.T.Helper()
	require.Nil(r.w.T, r.runningNode)
	c := r.node
	for _, pair := range r.settings("gpuaas-agent.service") {
		key, value, _ := strings.Cut(pair, "=")
		switch key {
		case "GPUAAS_AGENT_API_URL":
			c.APIURL = value
		case "GPUAAS_AGENT_ROOT_FINGERPRINT":
			c.RootFingerprint = value
		}
	}
	policy := r.place.Replace("/etc/gpuaas/policy.yaml")
	c.ExtraArgs = append(slices.Clone(c.ExtraArgs), "--policy", policy)
	var err error
	r.runningNode, err = devcluster.StartAgent(r.w.Ctx, c)
	require.NoError(r.w.T, err)
}

func (r *guideRun) stopNode() {
	r.w.T.Helper()
	require.NotNil(r.w.T, r.runningNode)
	require.NoError(r.w.T, r.runningNode.Stop())
	r.runningNode = nil
}

// saveImage writes the demo's app as docker save would.
func (r *guideRun) saveImage() {
	r.w.T.Helper()
	tag, err := name.NewTag("hello:1.0.0")
	require.NoError(r.w.T, err)
	file := filepath.Join(r.place.Replace("/root/gpuaas"), "hello.tar")
	require.NoError(r.w.T, tarball.WriteToFile(file, tag, r.w.Release("1.0.0").Image))
}

// terminal is one person's shell: what one block sets, the next one has.
type terminal struct {
	r *guideRun
	// blocks goes into the shell, a byte of done comes back for each that ended with 0; said is what they wrote.
	blocks *os.File
	done   *os.File
	said   string
}

// terminalLoop runs what comes by descriptor 3, so that no command can read the next block from its standard input.
const terminalLoop = `set -euo pipefail
while IFS= read -r -d '' -u 3 block; do eval "$block"; printf . >&4; done`

func (r *guideRun) terminal(home string) *terminal {
	r.w.T.Helper()
	dir := filepath.Join(r.w.Dir, home)
	require.NoError(r.w.T, os.MkdirAll(dir, 0o700))
	x := &terminal{r: r, said: filepath.Join(dir, "said")}
	said, err := os.Create(x.said)
	require.NoError(r.w.T, err)
	blocks, in, err := os.Pipe()
	require.NoError(r.w.T, err)
	out, done, err := os.Pipe()
	require.NoError(r.w.T, err)
	x.blocks, x.done = in, out
	bash := exec.CommandContext(r.w.Ctx, "bash", "-c", terminalLoop)
	bash.Dir, bash.Env = r.place.Replace("/root/gpuaas"), append([]string{"HOME=" + dir}, r.env...)
	bash.Stdout, bash.Stderr, bash.ExtraFiles = said, said, []*os.File{blocks, done}
	require.NoError(r.w.T, bash.Start())
	for _, f := range []*os.File{blocks, done, said} {
		require.NoError(r.w.T, f.Close())
	}
	r.w.T.Cleanup(func() {
		require.NoError(r.w.T, in.Close())
		_ = bash.Wait() // a block that failed has failed the test
		require.NoError(r.w.T, out.Close())
	})
	return x
}

// follow runs a block in the shell as the blocks before have left it.
func (x *terminal) follow(b block) {
	x.r.w.T.Helper()
	before, err := os.Stat(x.said)
	require.NoError(x.r.w.T, err)
	_, err = x.blocks.WriteString(x.r.place.Replace(b.text) + "\x00")
	if err == nil {
		_, err = x.done.Read(make([]byte, 1))
	}
	if err != nil {
		said, _ := os.ReadFile(x.said)
		require.Fail(x.r.w.T, "the block failed", "%s\n%s\nsaid:\n%s", b, b.text, said[before.Size():])
	}
}
