// Package network gives each member a network of its own on this node: namespaces, an address behind a bridge, ports
// published on the node's 127.0.0.1, and rules that isolate it from its neighbours and from the host. It owns its
// bridge, one firewall table and its state directory, and restores the host's settings after the last member. It knows
// nothing of containers, and the networks outlive the agent.
package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/keylock"
)

// Defaults of Config.
const (
	DefaultBridge = "gpuaas0"
	DefaultCIDR   = "10.88.0.0/16"
	// DefaultSharedDir holds the state that the agents of one machine share.
	DefaultSharedDir = "/run/gpuaas-network"
)

// maxPorts bounds the published ports of one member.
const maxPorts = 32

// publishedOn is the only host address that ports are published on.
const publishedOn = "127.0.0.1"

// Config says which network this agent owns. Zero values take the defaults.
type Config struct {
	// Bridge is the link that this agent makes and removes; at most 15 characters.
	Bridge string
	// CIDR is the IPv4 network of the members; its first address is the bridge's.
	CIDR string
	// StateDir records what was made. It need not outlive a reboot; records of an earlier boot are recognised.
	StateDir string
	// SharedDir is the same for all agents of one machine.
	SharedDir string
	// UIDMapBase and UIDMapSize are the host ids of the members' user namespaces; a size of 0 means none are made.
	UIDMapBase, UIDMapSize uint32
	// Egress returns what the owner lets members reach outside the machine; each EnsureRules calls it. Nil is the
	// internet.
	Egress func() policy.Egress
	// Resolvers returns the members' name servers. Members reach them on port 53 wherever they are, except with
	// EgressNone.
	Resolvers func() []netip.Addr
	Log       *slog.Logger
}

func (c Config) withDefaults() Config {
	c.Bridge = cmp.Or(c.Bridge, DefaultBridge)
	c.CIDR = cmp.Or(c.CIDR, DefaultCIDR)
	c.SharedDir = cmp.Or(c.SharedDir, DefaultSharedDir)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c
}

// bridgePattern keeps a name harmless in a path and in arguments of iptables; the kernel allows 15 characters.
var bridgePattern = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_.-]{0,14}$`)

func (c Config) check() error {
	prefix, err := netip.ParsePrefix(c.CIDR)
	switch {
	case !bridgePattern.MatchString(c.Bridge):
		return badNetwork("The bridge's name must have 1 to 15 letters, digits, dots, dashes or underscores.")
	case err != nil || !prefix.Addr().Is4() || prefix.Masked() != prefix || prefix.Bits() > 29:
		return badNetwork("The members' network must be an IPv4 network like 10.88.0.0/16, with room for members.")
	case !filepath.IsAbs(c.StateDir) || !filepath.IsAbs(c.SharedDir):
		return badNetwork("The network's directories must be absolute paths.")
	}
	return nil
}

func badNetwork(public string) error {
	return fault.New(fault.Unprocessable, codeBadNetwork, public, nil).Permanent()
}

// PortMapping publishes a member's port on the node's 127.0.0.1.
type PortMapping struct {
	HostPort      uint16 `json:"host_port"`
	ContainerPort uint16 `json:"container_port"`
	// Protocol is tcp or udp.
	Protocol string `json:"protocol"`
}

func (p PortMapping) conflictsWith(q PortMapping) bool {
	return p.HostPort == q.HostPort && p.Protocol == q.Protocol
}

// Attachment is a member's network.
type Attachment struct {
	NetNSPath string
	// UserNSPath is the user namespace that owns the network namespace; empty where the host has none.
	UserNSPath string
	// IP is the member's address on the bridge.
	IP string
}

// Network is this agent's network. Its methods may be called at the same time.
type Network struct {
	cfg    Config
	prefix netip.Prefix
	bootID string

	// use is held for reading while a member is attached to the shared network or detached, and for writing while the
	// shared network is made or removed.
	use   sync.RWMutex
	ready bool
	// applied is the firewall table that was made, for earlierLinks; nil when that is not known. Both change with use held
	// for writing.
	applied      *ruleset
	earlierLinks []string
	// commit replaces the firewall table; a test refuses features that a kernel may lack.
	commit func(ruleset, []publication) error
	// countsFlows says that the table counts members' flows, countsLost that a replacement has lost the counts of
	// existing members.
	countsFlows, countsLost atomic.Bool
	// missing are the conditions that say what the kernel cannot do; nil before the first table.
	missing atomic.Pointer[[]string]
	// verifiedGeneration is the generation of the host's rules at the last check that found the table intact.
	verifiedGeneration atomic.Pointer[uint32]

	ipam   sync.Mutex // guards leases
	leases leases

	// portInUse says that another program uses a published port.
	portInUse atomic.Bool

	// members lets one call at a time work on a member.
	members keylock.Map
	mu      sync.Mutex // guards reserved
	// reserved are the published ports by member.
	reserved map[string][]portReservation
}

// Open prepares to make networks. It changes only its state directory; the bridge comes with the first member.
func Open(_ context.Context, cfg Config) (*Network, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	n := &Network{
		cfg: cfg, prefix: netip.MustParsePrefix(cfg.CIDR), bootID: strings.TrimSpace(string(boot)),
		reserved: map[string][]portReservation{},
	}
	n.commit = n.replaceTable
	if err := n.forgetEarlierBoot(); err != nil {
		return nil, err
	}
	if err := n.makeDirs(); err != nil {
		return nil, err
	}
	return n, n.loadLeases()
}

func (n *Network) nsDir() string      { return filepath.Join(n.cfg.StateDir, "ns") }
func (n *Network) membersDir() string { return filepath.Join(n.cfg.StateDir, "members") }

func (n *Network) makeDirs() error {
	for _, dir := range []string{n.nsDir(), n.membersDir()} {
		if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // remapped containers walk to their namespaces
			return fault.New(fault.Unavailable, fault.CodeDirectoryUnusable, fmt.Sprintf("The agent cannot make its directory "+
				"%s: run it as root and free space on that disk.", dir), err)
		}
	}
	return nil
}

// memberPattern is harmless in a path; the length is that of a comment in the firewall.
var memberPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,126}$`)

func checkMember(memberID string) error {
	if !memberPattern.MatchString(memberID) {
		return badNetwork("The member has no usable id.")
	}
	return nil
}

func checkPorts(ports []PortMapping) error {
	if len(ports) > maxPorts {
		return badNetwork(fmt.Sprintf("A member may publish %d ports.", maxPorts))
	}
	for i, p := range ports {
		if p.HostPort == 0 || p.ContainerPort == 0 || p.Protocol != "tcp" && p.Protocol != "udp" {
			return badNetwork("A published port needs a host port, a container port, and tcp or udp.")
		}
		if slices.ContainsFunc(ports[:i], p.conflictsWith) {
			return badNetwork("A host port is published twice.")
		}
	}
	return nil
}

// Setup makes the member's network and publishes its ports. A complete network with the same ports is returned as it
// is; any other is made anew. namespaces, unless nil, is called when the namespaces exist and have no link yet: a
// container may be created in them, and must not run before Setup has returned.
func (n *Network) Setup(ctx context.Context, memberID string, ports []PortMapping,
	namespaces func(),
) (Attachment, error) {
	if err := errors.Join(checkMember(memberID), checkPorts(ports)); err != nil {
		return Attachment{}, err
	}
	if namespaces == nil {
		namespaces = func() {}
	}
	a, err := n.setup(ctx, memberID, ports, namespaces)
	if err != nil {
		// A first member that failed must not leave the bridge behind.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if e := n.Close(clean); e != nil {
			n.cfg.Log.Warn("cannot clean up after a failed network", slog.String("member_id", memberID), slog.Any("error", e))
		}
	}
	return a, err
}

func (n *Network) setup(ctx context.Context, memberID string, ports []PortMapping,
	namespaces func(),
) (Attachment, error) {
	unlock, err := n.members.Lock(ctx, memberID)
	if err != nil {
		return Attachment{}, err
	}
	defer unlock()
	if r, err := n.readRecord(memberID); err == nil && r.Ready && slices.Equal(r.Ports, ports) {
		release, err := n.share(ctx)
		if err != nil {
			return Attachment{}, err
		}
		attached := n.isAttached(memberID, r)
		release()
		if attached {
			return n.attachment(memberID, r.IP.String()), n.reservePorts(memberID, ports)
		}
	}
	if err := n.checkPortsFree(memberID, ports); err != nil {
		return Attachment{}, err
	}
	if err := n.detach(memberID); err != nil {
		return Attachment{}, err
	}
	a, err := n.attach(ctx, memberID, ports, namespaces)
	if err != nil {
		if e := n.detach(memberID); e != nil {
			n.cfg.Log.Warn("cannot clean up after a failed network", slog.String("member_id", memberID), slog.Any("error", e))
		}
		if _, known := errors.AsType[*fault.Error](err); !known {
			err = fault.New(fault.Unavailable, codeNetworkFailed, "The node could not make the member's network.", err)
		}
		return Attachment{}, err
	}
	return a, nil
}

// share makes the shared network unless it exists, and keeps it until release is called.
func (n *Network) share(ctx context.Context) (release func(), err error) {
	for {
		n.use.RLock()
		if n.ready {
			return n.use.RUnlock, nil
		}
		n.use.RUnlock()
		n.use.Lock()
		if !n.ready {
			if err := n.makeShared(ctx); err != nil {
				n.use.Unlock()
				return nil, err
			}
			n.ready = true
		}
		n.use.Unlock()
	}
}

// checkPortsFree refuses a host port that is published for another member.
func (n *Network) checkPortsFree(memberID string, ports []PortMapping) error {
	members, err := n.List()
	if err != nil {
		return err
	}
	for _, other := range members {
		r, err := n.readRecord(other)
		if other == memberID || err != nil {
			continue
		}
		for _, p := range ports {
			if slices.ContainsFunc(r.Ports, p.conflictsWith) {
				return fault.New(fault.Conflict, agent.CodePortTaken, fmt.Sprintf("Port %d of this node is published for another "+
					"member.", p.HostPort), nil)
			}
		}
	}
	return nil
}

// Namespaces returns the paths at which Setup mounts a member's namespaces.
func (n *Network) Namespaces(memberID string) Attachment { return n.attachment(memberID, "") }

func (n *Network) attachment(memberID, ip string) Attachment {
	a := Attachment{NetNSPath: n.netnsPath(memberID), IP: ip}
	if n.cfg.UIDMapSize > 0 {
		a.UserNSPath = n.usernsPath(memberID)
	}
	return a
}

// attach makes a member's network from nothing.
func (n *Network) attach(ctx context.Context, memberID string, ports []PortMapping,
	namespaces func(),
) (Attachment, error) {
	// Written first: after a crash the record leads to everything of the member.
	r := record{BootID: n.bootID, Ports: ports}
	if err := n.writeRecord(memberID, r); err != nil {
		return Attachment{}, err
	}
	failpoint.Hit("agent/attach/recorded")
	ip, err := n.allocateAddress(memberID)
	if err != nil {
		return Attachment{}, err
	}
	if err := n.makeNamespaces(ctx, memberID, ip); err != nil {
		return Attachment{}, err
	}
	failpoint.Hit("agent/attach/namespaces_made")
	namespaces()
	// The isolation rules are there before a packet can reach the member.
	release, err := n.share(ctx)
	if err != nil {
		return Attachment{}, err
	}
	defer release()
	if err := n.attachVeth(memberID, ip); err != nil {
		return Attachment{}, err
	}
	r.Ready, r.IP = true, ip
	if err := n.reservePorts(memberID, ports); err != nil {
		return Attachment{}, err
	}
	if err := n.publish(memberID, ip, ports); err != nil {
		return Attachment{}, err
	}
	return n.attachment(memberID, ip.String()), n.writeRecord(memberID, r)
}

// Remove removes the member's network, also an incomplete one, and with the last member the shared network. An unknown
// member is no error.
func (n *Network) Remove(ctx context.Context, memberID string) error {
	if err := checkMember(memberID); err != nil {
		return err
	}
	unlock, err := n.members.Lock(ctx, memberID)
	if err != nil {
		return err
	}
	err = n.detach(memberID)
	unlock()
	if err != nil {
		return err
	}
	return n.Close(ctx)
}

// detach removes everything of one member.
func (n *Network) detach(memberID string) error {
	n.use.RLock()
	defer n.use.RUnlock()
	r, err := n.readRecord(memberID)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Nothing is made without a record; only empty files can be there.
		return n.removeNamespaces(memberID)
	case err != nil:
		return fmt.Errorf("read the record of member %s: %w", memberID, err)
	}
	var counted net.IP // the address, if the table counts flows of it
	begun := false
	addr := net.IP(r.IP.AsSlice())
	if addr != nil {
		if counted, begun, err = n.countedFlows(addr); err != nil {
			return err
		}
	}
	if err := errors.Join(n.unpublish(r.Ports, counted), n.reservePorts(memberID, nil)); err != nil {
		return err
	}
	if err := removeLink(n.hostLink(memberID)); err != nil {
		return err
	}
	if begun {
		if err := deleteFlows(addr); err != nil {
			return err
		}
	}
	failpoint.Hit("agent/detach/veth_removed")
	if err := errors.Join(n.releaseAddress(memberID), n.removeNamespaces(memberID)); err != nil {
		return err
	}
	failpoint.Hit("agent/detach/namespaces_removed")
	return os.RemoveAll(n.recordPath(memberID))
}

// List names every member that has a network or a part of one, in order.
func (n *Network) List() ([]string, error) {
	entries, err := os.ReadDir(n.membersDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list members' networks: %w", err)
	}
	var members []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), recordSuffix); ok {
			members = append(members, id)
		}
	}
	return members, nil
}

// Close removes the shared network, unless there is a member. The next Setup makes it again.
func (n *Network) Close(ctx context.Context) error {
	members, err := n.List()
	if err != nil || len(members) > 0 {
		return err
	}
	n.use.Lock()
	defer n.use.Unlock()
	if members, err = n.List(); err != nil || len(members) > 0 {
		return err
	}
	n.ready = false
	return n.removeShared(ctx)
}

// Purge removes every member's network and everything else of this agent, also its state directory.
func (n *Network) Purge(ctx context.Context) error {
	members, err := n.List()
	if err != nil {
		return err
	}
	for _, id := range members {
		if err := n.Remove(ctx, id); err != nil {
			return err
		}
	}
	if err := n.Close(ctx); err != nil {
		return err
	}
	return os.RemoveAll(n.cfg.StateDir)
}

// isReady reports whether the member's network was completed.
func (n *Network) isReady(memberID string) bool {
	r, err := n.readRecord(memberID)
	return err == nil && r.Ready
}
