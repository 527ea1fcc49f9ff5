package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/host"
	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxTokenBytes bounds the join token's file.
	maxTokenBytes = 1024
)

func newRun() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the node (the default command); it enrolls first if it is new",
		Long: `Runs the node until SIGTERM. Containers outlive it: they go on while it is stopped, and it finds them again.
Every flag --foo-bar can also be given as the environment variable GPUAAS_AGENT_FOO_BAR.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	c.runFlags(cmd.Flags())
	return cmd
}

func newEnroll() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "enroll",
		Short: "Join a mesh and stop; run does this by itself",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			n, err := c.open(cmd.Context())
			if err != nil {
				return err
			}
			if !n.creds.Enrolled() {
				err = c.enroll(cmd.Context(), n)
			}
			if err == nil {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "This node is %s.\n", n.creds.Identity().NodeID)
			}
			return errors.Join(err, n.close())
		},
	}
	c.machineFlags(cmd.Flags())
	c.enrollmentFlags(cmd.Flags())
	return cmd
}

// node is what every command that works as the node opens first.
type node struct {
	lock  *os.File
	creds *uplink.Credentials
	store *state.Store
	clock *state.Clock
	log   *slog.Logger
}

func (n *node) close() error { return errors.Join(n.store.Close(), n.lock.Close()) }

func (c *config) open(ctx context.Context) (_ *node, err error) {
	log, err := c.logger()
	if err != nil {
		return nil, err
	}
	if err := c.directories(); err != nil {
		return nil, err
	}
	lock, err := lockDataDir(c.dataDir)
	if err != nil {
		return nil, err
	}
	n := &node{lock: lock, log: log}
	if n.creds, err = uplink.OpenCredentials(c.dataDir); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if n.store, err = state.Open(filepath.Join(c.dataDir, "state"),
		state.Options{CopyDir: filepath.Join(c.runDir, "state"), Key: n.creds.StoreKey()}); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if err := accept.Resume(n.store, n.creds.Identity().RootFingerprint, c.rootFingerprint, n.creds.Node()); err != nil {
		return nil, errors.Join(err, n.close())
	}
	for key, why := range n.store.Unverified() {
		log.ErrorContext(ctx, "what is stored does not verify and is set aside", slog.String("key", key),
			slog.String("reason", why))
	}
	source, err := state.MachineTime()
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	n.clock = state.NewClock(n.store, source, daemon.BuiltAt())
	if err := host.CheckClock(source.RTC(), n.clock.Now()); err != nil {
		log.WarnContext(ctx, fault.As(err).Public)
	}
	return n, nil
}

func (c *config) enroll(ctx context.Context, n *node) error {
	token, err := readToken(c.joinTokenFile)
	if err != nil {
		return err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}
	e := uplink.Enrollment{
		APIURL: c.uplink.APIURL, RootFingerprint: c.rootFingerprint, JoinToken: token, Hostname: hostname,
	}
	retry := hubsession.Backoff{Longest: c.uplink.DialRetryMax} // nodes that boot together do not ask together
	for {
		err := uplink.Enroll(ctx, e, n.creds, n.store, n.clock)
		if err == nil {
			n.log.InfoContext(ctx, "enrolled", slog.String("node_id", n.creds.Identity().NodeID), slog.String("hub", e.APIURL))
			return nil
		}
		// A node may boot before its hub, so the agent repeats an attempt that may succeed later without end.
		if fault.IsPermanent(err) || (!fault.Is(err, fault.Unavailable) && !fault.Is(err, fault.RateLimited)) {
			return err
		}
		pause := retry.Pause(0, err, rand.Float64()) //nolint:gosec // not a secret
		n.log.WarnContext(ctx, "cannot enroll yet", slog.Any("error", err), slog.String("retry_in", pause.String()))
		if !loop.Pause(ctx, pause) {
			return err
		}
	}
}

func readToken(path string) (string, error) {
	if path == "" {
		return "", nil // Enroll says what is missing
	}
	f, err := os.Open(path)
	if err != nil {
		return "", fault.New(fault.Malformed, codeJoinTokenUnreadable, "The join token cannot be read from "+path+".", err)
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxTokenBytes))
	if err := errors.Join(err, f.Close()); err != nil {
		return "", fault.New(fault.Malformed, codeJoinTokenUnreadable, "The join token cannot be read from "+path+".", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

func (c *config) run(ctx context.Context, out io.Writer) (err error) {
	from, to, err := c.ports()
	if err != nil {
		return err
	}
	mode, err := c.mode()
	if err != nil {
		return err
	}
	if c.inventory.Sharing, err = accelerator.ParseSharing(c.sharing); err != nil {
		return err
	}
	var asking sync.WaitGroup
	defer asking.Wait() // or a child of this program outlives it
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	oldRunc := false
	asking.Go(func() { // while the store is opened
		version, err := runtime.RuncVersion(ctx)
		oldRunc = err != nil || len(host.RuncConditions(version)) > 0
	})
	n, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	owner, err := local.OpenPolicy(c.policyFile, filepath.Join(c.dataDir, "policy.yaml"), n.creds.StoreKey())
	if err != nil {
		return err
	}
	if err := host.Check(ctx, host.Requirements{
		DataDir: c.dataDir, RunDir: c.runDir, ContainerdAddress: c.runtime.Address, Enrolled: n.creds.Enrolled(),
	}); err != nil {
		return err
	}
	rt, err := runtime.Open(ctx, c.runtimeConfig(n.log))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close()) }()
	nw, err := network.Open(ctx, c.networkConfig(rt, owner.Egress, n.log))
	if err != nil {
		return err
	}
	defer nw.Abandon()
	// Last of all: a machine that cannot run anything must not use up its join token.
	if !n.creds.Enrolled() {
		if err := c.enroll(ctx, n); err != nil {
			return err
		}
	}
	if err := n.store.Identify(n.creds.Identity().NodeID, n.creds.Signer()); err != nil {
		return err
	}
	stop, err := telemetry.StartTraces(ctx, telemetry.Program{
		Service: "gpuaas-agent", Version: daemon.Version(), Instance: n.creds.Identity().NodeID,
	}, n.log)
	if err != nil {
		return err
	}
	defer stop()
	socket, err := local.Listen(ctx, c.socket(), mode)
	if err != nil {
		return err
	}
	c.reconcile.PortFrom, c.reconcile.PortTo, c.reconcile.Policy, c.reconcile.Log = from, to, owner.Read, n.log
	asking.Wait()
	c.reconcile.WeakIsolation = weakIsolation(oldRunc, rt.Conditions())
	return c.serve(ctx, out, n, rt, nw, socket)
}

// serve wires reconciler, session and local socket together and runs them until ctx ends or one of them fails.
func (c *config) serve(ctx context.Context, out io.Writer, n *node, rt *runtime.Runtime, nw *network.Network,
	socket net.Listener,
) error {
	var up *uplink.Uplink
	acceptor := accept.New(accept.Config{
		Store: n.store,
		Node:  n.creds.Node,
		FetchBundle: func(ctx context.Context, version uint64) (*protocol.Envelope, error) {
			return up.FetchBundle(ctx, version)
		},
		Log: n.log,
	})
	inventory := accelerator.New(c.inventoryConfig(n.log))
	volumes, environments, err := c.openVolumes(n.log)
	if err != nil {
		return err
	}
	c.uplink.AgentVersion, c.uplink.Logs, c.uplink.Log = daemon.Version(), rt.LogsSince, n.log
	c.uplink.Facts = facts(rt, inventory, volumes, c.reconcile.Policy, n)
	if err := volumes.Supported(); err != nil {
		n.log.WarnContext(ctx, fault.As(err).Public)
		c.uplink.LacksFeatures = []string{
			manifest.FeatureVolumes, manifest.FeatureProjectVolumes, manifest.FeatureEnvironments,
		}
	}
	c.uplink.Exec, c.uplink.Copy = rt.RunCommand, rt.CopyFiles
	var re *reconcile.Reconciler
	c.uplink.RemoveEnvironment = func(ctx context.Context, projectID, digest string) error {
		return re.RemoveEnvironment(ctx, projectID, digest)
	}
	up = uplink.New(c.uplink, n.creds, n.store, n.clock, acceptor)
	machine := reconcile.Machine{
		Containers: rt, Images: rt, Stats: rt, Logs: rt, Disk: rt, Exec: rt, Host: rt, Network: nw, Accelerators: inventory,
		Devices: rt, Volumes: volumes, Environments: environments,
	}
	key, err := n.creds.SealingKey()
	if err != nil {
		return err
	}
	c.reconcile.Unseal = key.Open
	re = reconcile.New(c.reconcile, n.store, n.clock, machine, up)
	server := &local.Server{
		AgentVersion: daemon.Version(), Store: n.store, Clock: n.clock, Reconciler: re, Session: up,
		Acceptor: acceptor, Accelerators: inventory, Images: rt, Logs: rt.Logs, Node: n.creds.Node,
		Policy: c.reconcile.Policy, Log: n.log,
	}
	if err := ready(out, n.creds.Identity().NodeID, c.socket()); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return re.Run(ctx) })
	group.Go(func() error { return inventory.Run(ctx) })
	group.Go(func() error {
		inventory.AwaitFirstScan(ctx) // or the first session would call all accelerators missing
		return up.Run(ctx, re)
	})
	group.Go(func() error {
		if err := errors.Join(rt.EndOldCommands(ctx), rt.RemoveInterrupted(ctx)); err != nil {
			n.log.WarnContext(ctx, "cannot end what an earlier agent was doing", slog.Any("error", err))
		}
		return nil
	})
	group.Go(func() error { return server.Serve(ctx, socket) })
	return group.Wait()
}

// ready reports on out that the store is open and containerd answers.
func ready(out io.Writer, nodeID, socket string) error {
	return json.NewEncoder(out).Encode(struct {
		Ready       bool   `json:"ready"`
		NodeID      string `json:"node_id"`
		LocalSocket string `json:"local_socket"`
	}{true, nodeID, socket})
}

// weakIsolation names what the machine lacks to isolate containers. The agent checks once: an upgraded runc counts from
// the agent's next start.
func weakIsolation(oldRunc bool, conditions []string) []string {
	var weak []string
	if oldRunc {
		weak = append(weak, protocol.ConditionRuncVulnerable)
	}
	for _, c := range conditions {
		if slices.Contains(protocol.WeakIsolation(), c) {
			weak = append(weak, c)
		}
	}
	return weak
}

// facts returns the function that describes the machine for each hello: it may change while the agent runs.
func facts(rt *runtime.Runtime, inventory *accelerator.Inventory, volumes *volume.Volumes,
	owner func() (policy.Policy, error), n *node,
) func(context.Context) *protocol.NodeFacts {
	return func(ctx context.Context) *protocol.NodeFacts {
		facts, err := host.Facts(ctx, host.Config{})
		if err != nil {
			n.log.WarnContext(ctx, "cannot gather all facts of this machine", slog.Any("error", err))
		}
		if facts == nil {
			facts = &protocol.NodeFacts{}
		}
		if v, err := rt.Version(ctx); err == nil {
			facts.ContainerdVersion, facts.RuncVersion = v.Containerd, v.Runc
			facts.Conditions = append(facts.Conditions, host.RuncConditions(v.Runc)...)
		}
		facts.Conditions = slices.Concat(facts.Conditions, rt.Conditions(), inventory.Conditions())
		facts.Accelerators, facts.VolumeBytes = inventory.List(), volumes.CapacityBytes()
		rules, _ := owner() // the reconciler reports an error in the file
		facts.HostPorts = rules.HostPorts.Protocol()
		if key, err := n.creds.SealingKey(); err == nil {
			facts.SealingKey, _ = key.Sign(n.creds.Signer()) // a key in memory always signs
		}
		return facts
	}
}
