package reconcile

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// loopback is where endpoints are published: on this machine only.
const loopback = "127.0.0.1"

// making is a member's network on its way.
type making struct {
	at network.Attachment
	// namespaces is closed when these are there, done when all is or the making has failed.
	namespaces, done chan struct{}
	// ip and err are set before done is closed.
	ip  string
	err error
}

// awaitNamespaces returns once a container can be made in the network's namespaces.
func (m *making) awaitNamespaces(ctx context.Context) error {
	select {
	case <-m.namespaces:
		return nil
	case <-m.done:
		return m.err // without an error the network stood already
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitNetwork returns once a container may run in the network: with its address, behind its walls, its ports open.
func (m *making) awaitNetwork(ctx context.Context) (ip string, err error) {
	select {
	case <-m.done:
		return m.ip, m.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// launch makes a member's network and, beside it, the containers that are to run in it. Either takes about as long as
// the other, and most of it is waiting for other programs. A container is made while its network is not, but does not
// run then; what a crash leaves of both is known by itself: a container that was cut short, and a network that is not
// ready.
func (r *Reconciler) launch(ctx context.Context, a agent.SetupNetwork) error {
	starting, cancel := context.WithCancel(ctx)
	defer cancel()
	m := &making{at: r.network.Namespaces(a.MemberID), namespaces: make(chan struct{}), done: make(chan struct{})}
	errs := make([]error, len(a.Start))
	var beside sync.WaitGroup
	for i, start := range a.Start {
		beside.Go(func() { errs[i] = r.startContainer(starting, start, m) })
	}
	m.ip, m.err = r.setupNetwork(ctx, a, sync.OnceFunc(func() { close(m.namespaces) }))
	close(m.done)
	if m.err != nil {
		cancel() // what they wait for will not come
	}
	beside.Wait()
	if m.err != nil {
		return m.err
	}
	return errors.Join(errs...)
}

// setupNetwork writes the intent down before anything exists: an attachment whose making was cut short is seen as
// revision 0 and made anew. It returns the member's address.
func (r *Reconciler) setupNetwork(ctx context.Context, a agent.SetupNetwork, namespaces func()) (ip string, err error) {
	want := portsOf(a.Workload)
	keep := slices.Clone(want)
	if a.Workload.Fallback != nil {
		// A port that this revision has no more keeps its number for the one that the node may go back to.
		for _, p := range portsOf(*a.Workload.Fallback) {
			if !slices.ContainsFunc(want, func(w *protocol.Port) bool { return w.GetName() == p.GetName() }) {
				keep = append(keep, p)
			}
		}
	}
	free := func(port uint16) bool { return r.network.PortFree(a.MemberID, port) }
	ports, err := r.store.AssignPorts(a.MemberID, keep, r.cfg.PortFrom, r.cfg.PortTo, free, func(m *state.Member) {
		m.NetworkRevision, m.NetworkReady = a.Revision, false
	})
	if err != nil {
		return "", err
	}
	ports = ports[:len(want)]
	failpoint.Hit("agent/network/intended")
	mappings := make([]network.PortMapping, 0, len(ports))
	endpoints := make([]*protocol.PublishedEndpoint, 0, len(ports))
	for _, p := range ports {
		// http and tcp alike are TCP to the network.
		mappings = append(mappings, network.PortMapping{HostPort: p.Host, ContainerPort: p.Container, Protocol: "tcp"})
		endpoints = append(endpoints, &protocol.PublishedEndpoint{
			Name: p.Name, Protocol: p.Protocol, Host: loopback,
			Port: uint32(p.Host),
		})
	}
	attachment, err := r.network.Setup(ctx, a.MemberID, mappings, namespaces)
	if err != nil {
		return "", err
	}
	failpoint.Hit("agent/network/made")
	return attachment.IP, r.store.UpdateMember(a.MemberID, func(m *state.Member) {
		m.NetworkReady, m.Endpoints = true, endpoints
		m.NetNSPath, m.UserNSPath, m.IP = attachment.NetNSPath, attachment.UserNSPath, attachment.IP
	})
}

func portsOf(w agent.Workload) []*protocol.Port {
	var ports []*protocol.Port
	for _, s := range w.Services {
		ports = append(ports, s.Spec.GetPorts()...)
	}
	return ports
}

// startContainer opens run and usage interval durably before the container exists, so that nothing ever runs that the
// store does not know. beside is the network where that is being made at the same time.
func (r *Reconciler) startContainer(ctx context.Context, a agent.StartContainer, beside *making) error {
	run := state.Run{
		ID: runID(a.MemberID), MemberID: a.MemberID, InstanceID: a.Workload.InstanceID, Service: a.Service.Name,
		Revision: a.Revision,
		LeaseNo:  a.LeaseNo,
	}
	var wanted bool
	err := r.timed(ctx, func(now time.Time) (err error) {
		run.OpenedAt = now
		wanted, err = r.store.OpenWantedRun(run)
		return err
	})
	if err != nil || !wanted {
		return err
	}
	failpoint.Hit("agent/start/opened")
	r.log.InfoContext(ctx, "starting", "member", a.MemberID, "run", run.ID, "image", a.Service.Image, "correlation_id",
		a.Workload.CorrelationID)
	spec := runtime.Spec{
		ID: run.ID, MemberID: a.MemberID, InstanceID: a.Workload.InstanceID, Revision: a.Revision,
		SpecDigest: a.Service.SpecDigest,
		Service:    a.Service.Spec,
	}
	if beside != nil {
		spec.NetNSPath, spec.UserNSPath = beside.at.NetNSPath, beside.at.UserNSPath
		spec.Namespaces, spec.Network = beside.awaitNamespaces, beside.awaitNetwork
	} else {
		m := r.store.Members()[a.MemberID]
		spec.NetNSPath, spec.UserNSPath, spec.IP = m.NetNSPath, m.UserNSPath, m.IP
	}
	started, err := r.runtime.Start(ctx, spec)
	if err != nil {
		// What is half made is removed now or, if this fails too, as a container cut short.
		if removeErr := r.runtime.Remove(context.WithoutCancel(ctx), run.ID); removeErr != nil {
			return errors.Join(err, removeErr)
		}
		return errors.Join(err, r.store.CloseRun(run.ID))
	}
	failpoint.Hit("agent/start/noted")
	r.Wake() // its probe need not wait until the start is written down
	return r.timed(ctx, func(time.Time) error {
		at := r.clock.Happened(started.StartedAt, r.store.Runs()[run.ID].OpenedAt)
		return r.store.UpdateRun(run.ID, func(run *state.Run) { run.StartedAt = at })
	})
}

// runID is never used twice, and begins with the member, by which the runtime finds leftovers.
func runID(memberID string) string {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails
	return memberID + "." + hex.EncodeToString(random[:])
}
