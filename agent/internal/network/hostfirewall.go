package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
)

// commandTimeout bounds one call of iptables, which may wait for others to finish theirs.
const commandTimeout = 30 * time.Second

// forwardRules are added to iptables' own forward chain where that drops by default (Docker, ufw): an accept in the
// agent's table does not overrule a drop in another. The agent uses the iptables command for them, because iptables
// cannot read a chain with rules of the nftables library, and iptables-legacy has no nftables chain.
func (n *Network) forwardRules() [][]string {
	mark := []string{"-m", "comment", "--comment", "gpuaas " + n.cfg.Bridge, "-j", "ACCEPT"}
	return [][]string{
		slices.Concat([]string{"FORWARD", "-i", n.cfg.Bridge}, mark),
		slices.Concat([]string{"FORWARD", "-o", n.cfg.Bridge, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"}, mark),
	}
}

// allowForwarding lets members out where the host's own firewall forwards nothing by default.
func (n *Network) allowForwarding(ctx context.Context) error {
	if used, err := usesForwardChain(); err != nil || !used {
		return err
	}
	policy, err := iptables(ctx, "-S", "FORWARD")
	if err != nil || !bytes.HasPrefix(policy, []byte("-P FORWARD DROP")) {
		return err
	}
	for _, rule := range n.forwardRules() {
		if _, err := iptables(ctx, append([]string{"-C"}, rule...)...); err == nil {
			continue
		}
		if _, err := iptables(ctx, append([]string{"-I"}, rule...)...); err != nil {
			return fmt.Errorf("let members out through the host's firewall: %w", err)
		}
	}
	return nil
}

// keepForwarding lets members out again where another program has changed the host's own firewall since;
// iptables-legacy does not tell of that. The caller holds use.
func (n *Network) keepForwarding(ctx context.Context) error {
	generation, err := rulesetGeneration()
	if err != nil {
		return err
	}
	if checked := n.forwardingGeneration.Load(); checked != nil && *checked == generation {
		return nil
	}
	if err := n.allowForwarding(ctx); err != nil {
		return err
	}
	n.forwardingGeneration.Store(&generation)
	return nil
}

// removeForwardRules removes those rules, also when they were added more than once.
func (n *Network) removeForwardRules(ctx context.Context) error {
	if used, err := usesForwardChain(); err != nil || !used {
		return err
	}
	for _, rule := range n.forwardRules() {
		for {
			if _, err := iptables(ctx, append([]string{"-C"}, rule...)...); err != nil {
				break
			}
			if _, err := iptables(ctx, append([]string{"-D"}, rule...)...); err != nil {
				return fmt.Errorf("remove the rules that let members out: %w", err)
			}
		}
	}
	return nil
}

// usesForwardChain reports whether the host has iptables' forward chain. Without this question the iptables command
// would make it.
func usesForwardChain() (bool, error) {
	kernel, err := nftables.New()
	if err != nil {
		return false, err
	}
	chains, err := kernel.ListChainsOfTableFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return false, fmt.Errorf("list the host's firewall: %w", err)
	}
	if slices.ContainsFunc(chains, func(c *nftables.Chain) bool {
		return c.Table.Name == "filter" && c.Name == "FORWARD"
	}) {
		return true, nil
	}
	// The tables of iptables-legacy; the file is there with its module.
	legacy, err := os.ReadFile("/proc/net/ip_tables_names")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return slices.Contains(strings.Fields(string(legacy)), "filter"), err
}

// iptables runs the host's command; /usr/sbin is not in every PATH.
func iptables(ctx context.Context, args ...string) ([]byte, error) {
	path, err := exec.LookPath("iptables")
	if err != nil {
		if path, err = exec.LookPath(filepath.Join("/usr/sbin", "iptables")); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, append([]string{"-w", "30"}, args...)...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("iptables: %w: %s", err, strings.TrimSpace(errOut.String()))
	}
	return out.Bytes(), nil
}
