package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/agent/internal/host"
	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// memoryLimitBytes is what the collector aims at when GOMEMLIMIT says nothing: a node's memory is for workloads.
	memoryLimitBytes = 48 << 20
	gcPercent        = 50
	// calmAfter is how long nothing may have changed before memory is given back.
	calmAfter = 10 * time.Second
	// enrolRetryMax bounds the pause between attempts to reach the hub before the node is enrolled.
	enrolRetryMin = time.Second
	enrolRetryMax = 30 * time.Second
	// maxTokenBytes bounds the join token's file.
	maxTokenBytes = 1024
)

func newRun() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the node (the default command); it enrols first if it is new",
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
	c.enrolmentFlags(cmd.Flags())
	return cmd
}

// node is what must be open before anything runs.
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
	if n.store, err = state.Open(filepath.Join(c.dataDir, "state"), state.Options{}); err != nil {
		return nil, errors.Join(err, lock.Close())
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
	e := uplink.Enrolment{APIURL: c.apiURL, RootFingerprint: c.rootFingerprint, JoinToken: token, Hostname: hostname}
	for retry := enrolRetryMin; ; retry = min(2*retry, enrolRetryMax) {
		err := uplink.Enroll(ctx, e, n.creds, n.store, n.clock)
		if err == nil {
			n.log.InfoContext(ctx, "enrolled", "node", n.creds.Identity().NodeID, "hub", c.apiURL)
			return nil
		}
		// What another attempt may heal is tried for ever: a node may well boot before its hub.
		if fault.IsPermanent(err) || (!fault.Is(err, fault.Unavailable) && !fault.Is(err, fault.RateLimited)) {
			return err
		}
		n.log.WarnContext(ctx, "cannot enrol yet", "error", err, "retry_in", retry.String())
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retry):
		}
	}
}

func readToken(path string) (string, error) {
	if path == "" {
		return "", nil // Enroll says what is missing
	}
	f, err := os.Open(path)
	if err != nil {
		return "", fault.New(fault.Malformed, "join_token_unreadable", "The join token cannot be read from "+path+".", err)
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxTokenBytes))
	if err := errors.Join(err, f.Close()); err != nil {
		return "", fault.New(fault.Malformed, "join_token_unreadable", "The join token cannot be read from "+path+".", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

func (c *config) run(ctx context.Context, out io.Writer) (err error) {
	limitMemory()
	from, to, err := c.ports()
	if err != nil {
		return err
	}
	mode, err := c.mode()
	if err != nil {
		return err
	}
	n, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	owner, err := local.OpenPolicy(c.policyFile, filepath.Join(c.dataDir, "policy.yaml"))
	if err != nil {
		return err
	}
	if err := host.Check(ctx, c.requirements()); err != nil {
		return err
	}
	rt, err := runtime.Open(ctx, c.runtimeConfig(n.log))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close()) }()
	nw, err := network.Open(ctx, c.networkConfig(rt, n.log))
	if err != nil {
		return err
	}
	// Last of all: a machine that cannot run anything must not use up its join token.
	if !n.creds.Enrolled() {
		if err := c.enroll(ctx, n); err != nil {
			return err
		}
	}
	id := n.creds.Identity()
	if err := n.store.Identify(id.NodeID, n.creds.Signer()); err != nil {
		return err
	}
	socket, err := local.Listen(ctx, c.socket(), mode)
	if err != nil {
		return err
	}
	up := uplink.New(uplink.Config{
		AgentVersion: daemon.Version(), ReportInterval: c.reportInterval, APIURL: c.apiURL, SessionAddr: c.sessionAddr, DialRetryMax: c.dialRetryMax,
		Facts: c.facts(rt, n.log), Logs: logsOf(rt), Log: n.log,
	}, n.creds, n.store, n.clock)
	re := reconcile.New(reconcile.Config{
		Beat: c.beat, UsageInterval: c.usageInterval, Resync: c.resync, PortFrom: from, PortTo: to, AllowUnbilled: c.allowUnbilled,
		Policy: owner.Read, Log: n.log,
	}, n.store, n.clock, rt, nw, up)
	server := &local.Server{
		AgentVersion: daemon.Version(), Store: n.store, Clock: n.clock, Reconciler: re, Uplink: up, Logs: logsOf(rt), Node: n.creds.Node, Log: n.log,
	}
	if err := ready(out, id.NodeID, c.socket()); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return re.Run(ctx) })
	group.Go(func() error { return up.Run(ctx, re) })
	group.Go(func() error { return server.Serve(ctx, socket) })
	group.Go(func() error { return giveBack(ctx, re.Subscribe(), n.log) })
	return group.Wait()
}

func limitMemory() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimitBytes)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// giveBack returns memory to the machine once nothing has changed on the node for a while. What starting and ending workloads takes
// is as much as all that the agent keeps, and without this it would hold it for as long as nothing happens.
func giveBack(ctx context.Context, changed <-chan struct{}, log *slog.Logger) error {
	calm := time.NewTimer(calmAfter)
	defer calm.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			calm.Reset(calmAfter)
		case <-calm.C:
			if err := host.GiveBack(); err != nil {
				log.WarnContext(ctx, "cannot give memory back", "error", err)
			}
		}
	}
}

// ready tells whoever started the agent that the store is open and containerd answers.
func ready(out io.Writer, nodeID, socket string) error {
	return json.NewEncoder(out).Encode(struct {
		Ready       bool   `json:"ready"`
		NodeID      string `json:"node_id"`
		LocalSocket string `json:"local_socket"`
	}{true, nodeID, socket})
}

// facts are gathered anew for each hello, because a machine changes while its agent runs.
func (c *config) facts(rt *runtime.Runtime, log *slog.Logger) func(context.Context) *protocol.NodeFacts {
	return func(ctx context.Context) *protocol.NodeFacts {
		facts, err := host.Facts(ctx, host.Config{})
		if err != nil {
			log.WarnContext(ctx, "cannot gather all facts of this machine", "error", err)
		}
		if facts == nil {
			facts = &protocol.NodeFacts{}
		}
		if v, err := rt.Version(ctx); err == nil {
			facts.ContainerdVersion, facts.RuncVersion = v.Containerd, v.Runc
			facts.Conditions = append(facts.Conditions, host.RuncConditions(v.Runc)...)
		}
		facts.Conditions = append(facts.Conditions, rt.Conditions()...)
		return facts
	}
}

func logsOf(rt *runtime.Runtime) uplink.Logs {
	return func(ctx context.Context, runID string, tailLines int, follow bool) (io.ReadCloser, error) {
		return rt.Logs(ctx, runID, runtime.LogOptions{TailLines: tailLines, Follow: follow})
	}
}
