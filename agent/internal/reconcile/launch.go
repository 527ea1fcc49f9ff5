package reconcile

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// loopback is where endpoints are published: on this machine only.
const loopback = "127.0.0.1"

// pendingNetwork is a member's network while it is being set up.
type pendingNetwork struct {
	paths network.Attachment
	// namespaces is closed when the namespaces exist, complete when the setup has ended, with ip or err set.
	namespaces, complete chan struct{}
	ip                   string
	err                  error
}

// existingNetwork is the network that the store remembers of a member.
func existingNetwork(m state.Member) *pendingNetwork {
	n := &pendingNetwork{
		paths:      network.Attachment{NetNSPath: m.NetNSPath, UserNSPath: m.UserNSPath},
		namespaces: make(chan struct{}),
		complete:   make(chan struct{}),
		ip:         m.IP,
	}
	close(n.complete)
	return n
}

// awaitNamespaces returns once a task can be created in the network's namespaces.
func (n *pendingNetwork) awaitNamespaces(ctx context.Context) error {
	select {
	case <-n.namespaces:
		return nil
	case <-n.complete:
		return n.err // without an error the network existed before
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitComplete returns once a container may run in the network: with its address, isolation rules and ports.
func (n *pendingNetwork) awaitComplete(ctx context.Context) (ip string, err error) {
	select {
	case <-n.complete:
		return n.ip, n.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// launch sets up a member's network and, in parallel, creates the containers that will run in it; each takes about as
// long as the other. A crash leaves what the next pass recognises: a container in state created, a network not ready.
func (r *Reconciler) launch(ctx context.Context, a agent.SetupNetwork) error {
	launching, cancel := context.WithCancel(ctx)
	defer cancel()
	n := &pendingNetwork{
		paths:      r.machine.Network.Namespaces(a.MemberID),
		namespaces: make(chan struct{}),
		complete:   make(chan struct{}),
	}
	errs := make([]error, len(a.Start))
	var containers sync.WaitGroup
	for i, start := range a.Start {
		containers.Go(func() { errs[i] = r.startContainer(launching, start, n) })
	}
	n.ip, n.err = r.setupNetwork(ctx, a, sync.OnceFunc(func() { close(n.namespaces) }))
	close(n.complete)
	if n.err != nil {
		cancel() // the containers wait for it in vain
	}
	containers.Wait()
	if n.err != nil {
		return n.err
	}
	return errors.Join(errs...)
}

// startContainer makes and starts one container: run and usage interval are durable before the container exists, so
// that nothing runs that the store does not know.
func (r *Reconciler) startContainer(ctx context.Context, a agent.StartContainer, n *pendingNetwork) error {
	devices, err := r.machine.Accelerators.Edits(ctx, a.Service.AcceleratorIDs)
	if err != nil {
		return err
	}
	var run state.Run
	var desired bool
	err = r.withClock(func(now time.Time) (err error) {
		run = agent.NewRun(a, r.newRunID(a.MemberID), now)
		desired, err = r.store.OpenRunIfDesired(run)
		return err
	})
	if err != nil || !desired {
		return err
	}
	failpoint.Hit("agent/start/run_opened")
	r.log.InfoContext(ctx, "starting a container", slog.String("member_id", a.MemberID), slog.String("run_id", run.ID),
		slog.String("image", a.Service.Image), slog.String("correlation_id", a.Workload.CorrelationID))
	started, err := r.runContainer(ctx, runtime.Spec{
		ID:         run.ID,
		MemberID:   a.MemberID,
		InstanceID: a.Workload.InstanceID,
		Revision:   a.Revision,
		SpecDigest: a.Service.SpecDigest,
		Service:    a.Service.Spec,
		Devices:    devices,
		NetNSPath:  n.paths.NetNSPath,
		UserNSPath: n.paths.UserNSPath,
	}, n)
	if err != nil {
		// Should the removal fail too, the next pass finds a container in state created.
		if removeErr := r.machine.Containers.Remove(context.WithoutCancel(ctx), run.ID); removeErr != nil {
			return errors.Join(err, removeErr)
		}
		return errors.Join(err, r.store.CloseRun(run.ID))
	}
	failpoint.Hit("agent/start/observed")
	r.Wake() // the probe need not wait until the start is written
	return r.withClock(func(time.Time) error {
		at := r.clock.FromMachineTime(started.StartedAt, r.store.Runs()[run.ID].OpenedAt)
		return r.store.UpdateRun(run.ID, func(run *state.Run) { run.StartedAt = at })
	})
}

// runContainer is the order of a start: the container's files and record need no network, its task needs the
// namespaces, and the workload runs only in a complete network.
func (r *Reconciler) runContainer(ctx context.Context, spec runtime.Spec, n *pendingNetwork) (runtime.Run, error) {
	pending, err := r.machine.Containers.Prepare(ctx, spec)
	if err != nil {
		return runtime.Run{}, err
	}
	defer pending.Close()
	if err := n.awaitNamespaces(ctx); err != nil {
		return runtime.Run{}, err
	}
	if err := r.machine.Containers.CreateTask(ctx, pending); err != nil {
		return runtime.Run{}, err
	}
	ip, err := n.awaitComplete(ctx)
	if err != nil {
		return runtime.Run{}, err
	}
	return r.machine.Containers.StartTask(ctx, pending, ip)
}

// setupNetwork stores the intent first: the next pass sees an attachment that a crash interrupted as revision 0 and
// makes it again. It returns the member's address.
func (r *Reconciler) setupNetwork(ctx context.Context, a agent.SetupNetwork, namespaces func()) (ip string, err error) {
	ports, err := r.assignPorts(a)
	if err != nil {
		return "", err
	}
	failpoint.Hit("agent/network/ports_assigned")
	mappings := make([]network.PortMapping, 0, len(ports))
	endpoints := make([]*protocol.PublishedEndpoint, 0, len(ports))
	for _, p := range ports {
		// http and tcp alike are TCP to the network.
		mappings = append(mappings, network.PortMapping{HostPort: p.Host, ContainerPort: p.Container, Protocol: "tcp"})
		endpoints = append(endpoints, &protocol.PublishedEndpoint{
			Name: p.Name, Protocol: p.Protocol, Host: loopback, Port: uint32(p.Host),
		})
	}
	attachment, err := r.machine.Network.Setup(ctx, a.MemberID, mappings, namespaces)
	if err != nil {
		return "", err
	}
	failpoint.Hit("agent/network/complete")
	return attachment.IP, r.store.UpdateMember(a.MemberID, func(m *state.Member) {
		a.Record(&m.Member)
		m.Endpoints = endpoints
		m.NetNSPath, m.UserNSPath, m.IP = attachment.NetNSPath, attachment.UserNSPath, attachment.IP
	})
}

// assignPorts returns the host ports of the revision. A port that only its fallback has keeps its number too, unless
// the revision needs that.
func (r *Reconciler) assignPorts(a agent.SetupNetwork) ([]state.HostPort, error) {
	desired := portsOf(a.Workload)
	keep := slices.Clone(desired)
	if a.Workload.Fallback != nil {
		for _, p := range portsOf(*a.Workload.Fallback) {
			if !slices.ContainsFunc(desired, func(d *protocol.Port) bool { return d.GetName() == p.GetName() }) {
				p = proto.CloneOf(p)
				p.HostPort = 0
				keep = append(keep, p)
			}
		}
	}
	owner, _ := r.cfg.Policy() // each pass reports an error in the file
	ports, err := r.store.AssignPorts(a.MemberID, keep, state.PortPool{
		From:    r.cfg.PortFrom,
		To:      r.cfg.PortTo,
		Tenants: owner.HostPorts.Contains,
		Free:    func(port uint16) bool { return r.machine.Network.PortFree(a.MemberID, port) },
	}, func(m *state.Member) { a.RecordIntent(&m.Member) })
	if err != nil {
		return nil, err
	}
	return ports[:len(desired)], nil
}

func portsOf(w agent.Workload) []*protocol.Port {
	var ports []*protocol.Port
	for _, s := range w.Services {
		ports = append(ports, s.Spec.GetPorts()...)
	}
	return ports
}

// newRunID returns an id that is never used twice. It begins with the member's, by which the runtime finds leftovers.
func newRunID(memberID string) string {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails
	return memberID + "." + hex.EncodeToString(random[:])
}
