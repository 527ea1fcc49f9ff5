// Package network gives each service of a member a network of its own on this node: namespaces, an address behind a
// bridge, ports published on the node's 127.0.0.1, and rules that let it reach the services of its own member, and
// isolate it from all others and from the host. It owns its bridge, one firewall table and its state directory, and
// restores the host's settings after the last attachment. It knows nothing of containers, and the networks outlive the
// agent.
package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	"github.com/gpuaas/gpuaas/pkg/daemon"
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

// maxPorts bounds the published ports of one service.
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

// PortMapping publishes a service's port on the node's 127.0.0.1.
type PortMapping struct {
	HostPort      uint16 `json:"host_port"`
	ContainerPort uint16 `json:"container_port"`
	// Protocol is tcp or udp.
	Protocol string `json:"protocol"`
}

func (p PortMapping) conflictsWith(q PortMapping) bool {
	return p.HostPort == q.HostPort && p.Protocol == q.Protocol
}

// Attachment is the network of one service of a member.
type Attachment struct {
	NetNSPath string
	// UserNSPath is the user namespace that owns the network namespace; empty where the host has none.
	UserNSPath string
	// IP is the service's address on the bridge.
	IP string
}

// idSeparator is in no id of a member and in no name of a service.
const idSeparator = "@"

// ID names the attachment of a member's service.
func ID(memberID, service string) string { return memberID + idSeparator + service }

// ParseID returns the member and the service of an attachment.
func ParseID(id string) (memberID, service string) {
	memberID, service, _ = strings.Cut(id, idSeparator)
	return memberID, service
}

func memberOf(id string) string {
	memberID, _ := ParseID(id)
	return memberID
}

// Network is this agent's network. Its methods may be called at the same time.
type Network struct {
	cfg    Config
	prefix netip.Prefix
	bootID string

	// use is held for reading while a service is attached to the shared network or detached, and for writing while the
	// shared network is made or removed.
	use   sync.RWMutex
	ready bool
	// applied is the firewall table that was made, for earlierLinks; nil when that is not known. Both change with use held
	// for writing.
	applied      *ruleset
	earlierLinks []string
	// commit replaces the firewall table; a test refuses features that a kernel may lack.
	commit func(ruleset, openings) error
	// countsFlows says that the table counts members' flows, countsLost that a replacement has lost the counts of
	// existing members.
	countsFlows, countsLost atomic.Bool
	// missing are the conditions that say what the kernel cannot do; nil before the first table.
	missing atomic.Pointer[[]string]
	// verifiedGeneration is the generation of the host's rules at the last check that found the table intact.
	verifiedGeneration atomic.Pointer[uint32]
	// forwardingGeneration is the same for the rules that let members out through the host's own firewall.
	forwardingGeneration atomic.Pointer[uint32]

	ipam   sync.Mutex // guards leases
	leases leases

	// portInUse says that another program uses a published port.
	portInUse atomic.Bool

	// attachments lets one call at a time work on an attachment.
	attachments keylock.Map
	// peering is held while an attachment becomes ready or ends, so that each one sees the others of its member.
	peering sync.Mutex
	mu      sync.Mutex // guards reserved
	// reserved are the published ports by attachment.
	reserved map[string][]portReservation
}

// Open prepares to make networks. It changes only its state directory; the bridge comes with the first member.
func Open(_ context.Context, cfg Config) (*Network, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	boot, err := daemon.BootID()
	if err != nil {
		return nil, err
	}
	n := &Network{
		cfg: cfg, prefix: netip.MustParsePrefix(cfg.CIDR), bootID: boot,
		reserved: map[string][]portReservation{},
	}
	n.commit = n.replaceTable
	if err := n.forgetEarlierBoot(); err != nil {
		return nil, err
	}
	if err := n.makeDirs(); err != nil {
		return nil, err
	}
	if err := n.removeUnfinished(); err != nil {
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

// idPattern is harmless in a path. maxIDLength is the length of a comment in the firewall.
var idPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*(@[a-zA-Z0-9][a-zA-Z0-9_.-]*)?$`)

const maxIDLength = 127

func checkID(id string) error {
	if len(id) > maxIDLength || !idPattern.MatchString(id) {
		return badNetwork("The member or its service has no usable name.")
	}
	return nil
}

func checkPorts(ports []PortMapping) error {
	if len(ports) > maxPorts {
		return badNetwork(fmt.Sprintf("A service may publish %d ports.", maxPorts))
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

// Setup makes the network of a member's service and publishes its ports. A complete network with the same ports is
// returned as it is; any other is made anew. namespaces, unless nil, is called when the namespaces exist and have no
// link yet: a container may be created in them, and must not run before Setup has returned.
func (n *Network) Setup(ctx context.Context, id string, ports []PortMapping,
	namespaces func(),
) (Attachment, error) {
	if err := errors.Join(checkID(id), checkPorts(ports)); err != nil {
		return Attachment{}, err
	}
	if namespaces == nil {
		namespaces = func() {}
	}
	a, err := n.setup(ctx, id, ports, namespaces)
	if err != nil {
		// A first member that failed must not leave the bridge behind.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if e := n.Close(clean); e != nil {
			n.cfg.Log.Warn("cannot clean up after a failed network", slog.String("attachment", id), slog.Any("error", e))
		}
	}
	return a, err
}

func (n *Network) setup(ctx context.Context, id string, ports []PortMapping,
	namespaces func(),
) (Attachment, error) {
	unlock, err := n.attachments.Lock(ctx, id)
	if err != nil {
		return Attachment{}, err
	}
	defer unlock()
	if r, err := n.readRecord(id); err == nil && r.Ready && slices.Equal(r.Ports, ports) {
		release, err := n.share(ctx)
		if err != nil {
			return Attachment{}, err
		}
		attached := n.isAttached(id, r)
		release()
		if attached {
			return n.attachment(id, r.IP.String()), n.reservePorts(id, ports)
		}
	}
	if err := n.checkPortsFree(id, ports); err != nil {
		return Attachment{}, err
	}
	if err := n.detach(id); err != nil {
		return Attachment{}, err
	}
	a, err := n.attach(ctx, id, ports, namespaces)
	if err != nil {
		if e := n.detach(id); e != nil {
			n.cfg.Log.Warn("cannot clean up after a failed network", slog.String("attachment", id), slog.Any("error", e))
		}
		if _, known := errors.AsType[*fault.Error](err); !known {
			err = fault.New(fault.Unavailable, codeNetworkFailed, "The node could not make the service's network.", err)
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

// checkPortsFree refuses a host port that is published for another service.
func (n *Network) checkPortsFree(id string, ports []PortMapping) error {
	all, err := n.List()
	if err != nil {
		return err
	}
	for _, other := range all {
		r, err := n.readRecord(other)
		if isCopyOf(id, other) || err != nil {
			continue
		}
		for _, p := range ports {
			if slices.ContainsFunc(r.Ports, p.conflictsWith) {
				return fault.New(fault.Conflict, agent.CodePortTaken, fmt.Sprintf("Port %d of this node is published for another "+
					"service.", p.HostPort), nil)
			}
		}
	}
	return nil
}

// Namespaces returns the paths at which Setup mounts an attachment's namespaces.
func (n *Network) Namespaces(id string) Attachment { return n.attachment(id, "") }

func (n *Network) attachment(id, ip string) Attachment {
	a := Attachment{NetNSPath: n.netnsPath(id), IP: ip}
	if n.cfg.UIDMapSize > 0 {
		a.UserNSPath = n.usernsPath(id)
	}
	return a
}

// attach makes an attachment from nothing.
func (n *Network) attach(ctx context.Context, id string, ports []PortMapping,
	namespaces func(),
) (Attachment, error) {
	// Written first: after a crash the record leads to everything of the attachment.
	r := record{BootID: n.bootID, Ports: ports}
	if err := n.writeRecord(id, r); err != nil {
		return Attachment{}, err
	}
	failpoint.Hit("agent/attach/recorded")
	ip, err := n.allocateAddress(id)
	if err != nil {
		return Attachment{}, err
	}
	if err := n.makeNamespaces(ctx, id, ip); err != nil {
		return Attachment{}, err
	}
	failpoint.Hit("agent/attach/namespaces_made")
	namespaces()
	// The isolation rules are there before a packet can reach the service.
	release, err := n.share(ctx)
	if err != nil {
		return Attachment{}, err
	}
	defer release()
	if err := n.attachVeth(id, ip); err != nil {
		return Attachment{}, err
	}
	r.Ready, r.IP = true, ip
	if err := n.reservePorts(id, ports); err != nil {
		return Attachment{}, err
	}
	return n.attachment(id, ip.String()), n.complete(id, r)
}

// complete opens the attachment's ports and the way to its peers, then marks its record ready.
func (n *Network) complete(id string, r record) error {
	n.peering.Lock()
	defer n.peering.Unlock()
	stale, err := n.peersWith(r.IP)
	if err != nil {
		return err
	}
	if err := n.close(nil, nil, stale); err != nil {
		return err
	}
	if err := n.open(openings{publications(id, r.IP, r.Ports), n.peersOf(id, r.IP)}); err != nil {
		return err
	}
	failpoint.Hit("agent/attach/opened")
	return n.writeRecord(id, r)
}
