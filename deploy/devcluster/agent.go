package devcluster

import (
	"context"
	"os"
	"path/filepath"
)

// Agent is one node.
type Agent struct {
	*Process
	Config AgentConfig
	Ready  AgentReady
}

// AgentConfig says where an agent lives and how it differs from another one on the same machine.
type AgentConfig struct {
	Bin string
	// Dir holds data/ and logs/; RunDir is on a file system that a reboot empties.
	Dir, RunDir         string
	APIURL              string
	RootFingerprint     string
	JoinToken           string
	ContainerdAddress   string
	ContainerdNamespace string
	Bridge, PodCIDR     string
	PortRange           string
	CgroupParent        string
	NetNS               string
	ExtraArgs           []string
	Env                 []string
}

// AgentReady is the line that gpuaas-agent prints when its store is open and containerd answers.
type AgentReady struct {
	Ready       bool   `json:"ready"`
	NodeID      string `json:"node_id"`
	LocalSocket string `json:"local_socket"`
}

// DataDir is the agent's data directory.
func (c AgentConfig) DataDir() string { return filepath.Join(c.Dir, "data") }

// LocalSocket is the agent's Unix socket.
func (c AgentConfig) LocalSocket() string { return filepath.Join(c.RunDir, "agent.sock") }

func (c AgentConfig) binary() string { return filepath.Join(c.Bin, "gpuaas-agent") }

func (c AgentConfig) args(verb string) []string {
	return []string{
		verb, "--data-dir", c.DataDir(), "--run-dir", c.RunDir, "--api-url", c.APIURL, "--root-fingerprint",
		c.RootFingerprint,
		"--join-token-file", filepath.Join(c.Dir, "join-token"),
		"--containerd-address", c.ContainerdAddress, "--containerd-namespace", c.ContainerdNamespace,
		"--bridge", c.Bridge, "--pod-cidr", c.PodCIDR, "--port-range", c.PortRange, "--cgroup-parent", c.CgroupParent,
		"--local-socket", c.LocalSocket(),
	}
}

// StartAgent runs `gpuaas-agent run` and waits until its store is open and containerd answers. It does not wait for the
// hub.
func StartAgent(ctx context.Context, c AgentConfig) (*Agent, error) {
	for _, d := range []string{c.Dir, c.RunDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if c.JoinToken != "" {
		if err := os.WriteFile(filepath.Join(c.Dir, "join-token"), []byte(c.JoinToken), 0o600); err != nil {
			return nil, err
		}
	}
	a := &Agent{Config: c}
	var err error
	a.Process, err = start(ctx, command{
		name: "agent", path: c.binary(), args: append(c.args("run"), c.ExtraArgs...), env: c.Env, netns: c.NetNS,
		logDir: filepath.Join(c.Dir, "logs"), ready: &a.Ready,
	})
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Restart starts an agent that has ended, with its configuration.
func (a *Agent) Restart(ctx context.Context) error {
	again, err := StartAgent(ctx, a.Config)
	if err == nil {
		a.Process, a.Ready = again.Process, again.Ready
	}
	return err
}

// Uninstall removes everything that the agent made on the node. The agent must be stopped.
func Uninstall(ctx context.Context, c AgentConfig) error {
	path, args := c.binary(), c.args("uninstall")
	if c.NetNS != "" {
		path, args = "nsenter", append([]string{"--net=" + c.NetNS, "--", path}, args...)
	}
	_, err := run(ctx, path, args...)
	return err
}
