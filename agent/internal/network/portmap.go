package network

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// closePortmap removes the chains in which the release of 2026-11-20 published a member's ports, with CNI's portmap
// plugin. Its members outlive the upgrade of the agent; the table publishes their ports as well, until they go.
func (n *Network) closePortmap(ctx context.Context, memberID string, r record) error {
	if r.InTable || len(r.Ports) == 0 {
		return nil
	}
	for _, dir := range n.cfg.PluginDirs {
		plugin := filepath.Join(dir, "portmap")
		if _, err := os.Stat(plugin); err != nil {
			continue
		}
		if err := n.portmapDelete(ctx, plugin, memberID, r.Ports); err != nil {
			return fmt.Errorf("remove the chains of member %s: %w", memberID, err)
		}
		return removeIdlePortmap(ctx)
	}
	return nil // without the plugin there never were any
}

// portmapDelete asks the plugin as CNI does (specification 1.0.0, DEL).
func (n *Network) portmapDelete(ctx context.Context, plugin, memberID string, ports []PortMapping) error {
	type mapping struct {
		HostPort      uint16 `json:"hostPort"`
		ContainerPort uint16 `json:"containerPort"`
		Protocol      string `json:"protocol"`
		HostIP        string `json:"hostIP"`
	}
	var mappings []mapping
	for _, p := range ports {
		mappings = append(mappings, mapping{p.HostPort, p.ContainerPort, p.Protocol, publishedOn})
	}
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": n.cfg.Bridge, "type": "portmap", "snat": true,
		"capabilities": map[string]bool{"portMappings": true}, "runtimeConfig": map[string]any{"portMappings": mappings},
	})
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, plugin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND=DEL", "CNI_CONTAINERID="+memberID, "CNI_NETNS=", "CNI_IFNAME="+memberLink,
		"CNI_PATH="+filepath.Dir(plugin))
	cmd.Stdin = bytes.NewReader(conf)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// removeIdlePortmap takes the plugin's own chains away once nothing is published through them. Whoever needs them again
// makes them.
func removeIdlePortmap(ctx context.Context) error {
	rules, err := run(ctx, "", "iptables", "-w", "-t", "nat", "-S", "CNI-HOSTPORT-DNAT")
	if err != nil || strings.Count(string(rules), "\n") > 1 {
		return nil //nolint:nilerr // there are none, or somebody uses them
	}
	for _, jump := range [][]string{
		{"PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CNI-HOSTPORT-DNAT"},
		{"OUTPUT", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CNI-HOSTPORT-DNAT"},
		{"POSTROUTING", "-m", "comment", "--comment", "CNI portfwd requiring masquerade", "-j", "CNI-HOSTPORT-MASQ"},
	} {
		// One that is not there does not keep the others.
		_, _ = run(ctx, "", "iptables", append([]string{"-w", "-t", "nat", "-D"}, jump...)...)
	}
	for _, chain := range []string{"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"} {
		for _, verb := range []string{"-F", "-X"} {
			_, _ = run(ctx, "", "iptables", "-w", "-t", "nat", verb, chain)
		}
	}
	return nil
}
