package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// commandTimeout bounds one call of a firewall command, which may wait for others to finish theirs.
const commandTimeout = 30 * time.Second

// makeShared makes what all members need: the bridge, forwarding between links, and the firewall table. The walls stand
// before the first member comes.
func (n *Network) makeShared(ctx context.Context) error {
	if err := n.makeDirs(); err != nil {
		return err
	}
	if err := n.overlapping(); err != nil {
		return err
	}
	if err := n.makeTable(ctx); err != nil {
		return err
	}
	failpoint.Hit("agent/share/table")
	if err := n.makeBridge(); err != nil {
		return err
	}
	failpoint.Hit("agent/share/bridge")
	if err := n.openForward(ctx); err != nil {
		return err
	}
	return n.agree(func(a *agreement) error {
		// What was there before is on disk before anything of it is changed.
		if err := a.join(n.cfg.Bridge); err != nil {
			return err
		}
		failpoint.Hit("agent/share/joined")
		return writeSysctl(ipForward, "1")
	})
}

// bridge is the members' link on the host. Somebody may have removed it, and then it is made again: with no member on
// it.
func (n *Network) bridge() (netlink.Link, error) {
	link, err := netlink.LinkByName(n.cfg.Bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		if err = n.makeBridge(); err == nil {
			link, err = netlink.LinkByName(n.cfg.Bridge)
		}
	}
	return link, err
}

// makeBridge makes the bridge, with the address that members send by.
func (n *Network) makeBridge() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = n.cfg.Bridge, egressMTU()
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil && !errors.Is(err, unix.EEXIST) {
		return fault.New(fault.Unavailable, "network_failed", "The node cannot make the bridge "+n.cfg.Bridge+
			": the bridge kernel module may be missing.", err)
	}
	link, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil {
		return err
	}
	if link.Type() != "bridge" {
		return fault.New(fault.Conflict, "network_overlaps", "The link "+n.cfg.Bridge+" is there already and is no bridge: "+
			"choose another name with --bridge.", nil)
	}
	// Who calls a published port comes from 127.0.0.1, and the kernel lets that out by the loopback link only.
	if err := writeSysctl("net/ipv4/conf/"+n.cfg.Bridge+"/route_localnet", "1"); err != nil {
		return err
	}
	// No member says to the host what networks there are. Without IPv6 none can.
	if err := writeSysctl("net/ipv6/conf/"+n.cfg.Bridge+"/accept_ra", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// Set even to what it is, it stays; otherwise it would change with the ports that come and go.
	if err := netlink.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr); err != nil {
		return fmt.Errorf("keep the bridge's hardware address: %w", err)
	}
	address := &net.IPNet{IP: n.gateway().AsSlice(), Mask: net.CIDRMask(n.prefix.Bits(), 32)}
	if err := netlink.AddrReplace(link, &netlink.Addr{IPNet: address}); err != nil {
		return fmt.Errorf("give the bridge its address: %w", err)
	}
	return netlink.LinkSetUp(link)
}

// overlapping refuses a network that the machine already uses for something else: members could not be told from it.
func (n *Network) overlapping() error {
	own, err := netlink.ParseIPNet(n.cfg.CIDR)
	if err != nil {
		return err
	}
	addrs, err := dumped(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	ownIndex := 0
	if bridge, err := netlink.LinkByName(n.cfg.Bridge); err == nil {
		ownIndex = bridge.Attrs().Index
	}
	for _, a := range addrs {
		if a.LinkIndex != ownIndex && (own.Contains(a.IP) || a.Contains(own.IP)) {
			return fault.New(fault.Conflict, "network_overlaps", fmt.Sprintf("The members' network %s overlaps with %s, which "+
				"this machine uses: choose another with --pod-cidr.", n.cfg.CIDR, a.IPNet), nil)
		}
	}
	return nil
}

// forwardComment marks the rules that this agent adds to iptables' own forward chain.
func (n *Network) forwardComment() string { return "gpuaas " + n.cfg.Bridge }

// openForward lets members out where another firewall on this host (Docker's, ufw) forwards nothing by default: an
// accept in the own table does not overrule a drop in another.
func (n *Network) openForward(ctx context.Context) error {
	rules, err := run(ctx, "", "iptables-save", "-t", "filter")
	if err != nil || !bytes.Contains(rules, []byte(":FORWARD DROP")) || bytes.Contains(rules, []byte(n.forwardComment())) {
		return err
	}
	for _, match := range [][]string{{"-i", n.cfg.Bridge}, {
		"-o", n.cfg.Bridge, "-m", "conntrack", "--ctstate",
		"RELATED,ESTABLISHED",
	}} {
		args := slices.Concat([]string{"-w", "30", "-I", "FORWARD"}, match, []string{
			"-m", "comment", "--comment",
			n.forwardComment(), "-j", "ACCEPT",
		})
		if _, err := run(ctx, "", "iptables", args...); err != nil {
			return fmt.Errorf("let members out through the host's firewall: %w", err)
		}
	}
	return nil
}

// closeForward takes those rules away, in one transaction.
func (n *Network) closeForward(ctx context.Context) error {
	rules, err := run(ctx, "", "iptables-save", "-t", "filter")
	if err != nil {
		return fmt.Errorf("read the host's firewall: %w", err)
	}
	var remove []string
	for line := range strings.Lines(string(rules)) {
		if rule, ok := strings.CutPrefix(strings.TrimSpace(line), "-A FORWARD "); ok && strings.Contains(rule,
			`"`+n.forwardComment()+`"`) {
			remove = append(remove, "-D FORWARD "+rule)
		}
	}
	if len(remove) == 0 {
		return nil
	}
	if _, err := run(ctx, "*filter\n"+strings.Join(remove, "\n")+"\nCOMMIT\n", "iptables-restore", "--noflush", "-w",
		"30"); err != nil {
		return fmt.Errorf("remove the rules that let members out: %w", err)
	}
	return nil
}

// removeShared removes what all members shared. It finds everything by name, so it also works after a crash.
func (n *Network) removeShared(ctx context.Context) error {
	if err := removeLink(n.cfg.Bridge); err != nil {
		return err
	}
	failpoint.Hit("agent/unshare/bridge")
	if err := n.closeForward(ctx); err != nil {
		return err
	}
	if err := n.agree(func(a *agreement) error { return a.leave(n.cfg.Bridge) }); err != nil {
		return err
	}
	failpoint.Hit("agent/unshare/left")
	if err := n.removeTable(); err != nil {
		return err
	}
	n.remade.Store(false)
	failpoint.Hit("agent/unshare/table")
	// Which address was given last is known from a file, too.
	return os.RemoveAll(n.ipamDir())
}

// run runs one of the host's commands. Firewall commands lie where not every user's PATH looks.
func run(ctx context.Context, stdin, name string, args ...string) ([]byte, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		if path, err = exec.LookPath(filepath.Join("/usr/sbin", name)); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(errOut.String()))
	}
	return out.Bytes(), nil
}
