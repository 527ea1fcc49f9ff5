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
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// loopback is where endpoints are published: on this machine only.
const loopback = "127.0.0.1"

// pendingNetworks are a member's networks while they are being set up.
type pendingNetworks struct {
	// namespaces has a channel for each service that is being attached, closed when its namespaces exist. complete is
	// closed when all is done, with err set where that failed.
	namespaces map[string]chan struct{}
	complete   chan struct{}
	err        error
}

// existingNetworks are those that were set up before.
func existingNetworks() *pendingNetworks {
	n := &pendingNetworks{complete: make(chan struct{})}
	close(n.complete)
	return n
}

// awaitNamespaces returns once a task can be created in the service's namespaces.
func (n *pendingNetworks) awaitNamespaces(ctx context.Context, service string) error {
	made, pending := n.namespaces[service]
	if !pending {
		return nil // they existed before
	}
	select {
	case <-made:
		return nil
	case <-n.complete:
		return n.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitComplete returns once a container may run: with its address, isolation rules, ports and peers.
func (n *pendingNetworks) awaitComplete(ctx context.Context) error {
	select {
	case <-n.complete:
		return n.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// launch sets up the networks of a member's services and, in parallel, creates the containers that will run in them;
// each takes about as long as the other. A crash leaves what the next pass recognises: a container in state created, a
// network not ready. A container that fails is a failed try of its service alone.
func (r *Reconciler) launch(ctx context.Context, a agent.SetupNetwork) error {
	launching, cancel := context.WithCancel(ctx)
	defer cancel()
	n := &pendingNetworks{namespaces: map[string]chan struct{}{}, complete: make(chan struct{})}
	for _, service := range a.Services {
		n.namespaces[service] = make(chan struct{})
	}
	errs := make([]error, len(a.Start))
	var containers sync.WaitGroup
	for i, start := range a.Start {
		containers.Go(func() {
			errs[i] = traced(launching, start, func(ctx context.Context) error { return r.startContainer(ctx, start, n) })
		})
	}
	n.err = r.setupNetworks(ctx, a, n)
	close(n.complete)
	if n.err != nil {
		cancel() // the containers wait for it in vain
	}
	containers.Wait()
	if n.err != nil || ctx.Err() != nil {
		return n.err
	}
	for i, err := range errs {
		if err != nil {
			r.failed(ctx, a.Start[i], err)
		}
	}
	return nil
}

// startContainer makes and starts one container: run and usage interval are durable before the container exists, so
// that nothing runs that the store does not know.
func (r *Reconciler) startContainer(ctx context.Context, a agent.StartContainer, n *pendingNetworks) error {
	devices, err := r.machine.Accelerators.Edits(ctx, a.Service.AcceleratorIDs, a.Workload.OrgID)
	if err != nil {
		return err
	}
	volumes, err := r.prepareVolumes(ctx, a)
	if err != nil {
		return err
	}
	secrets, err := r.secrets(a.Workload, a.Service)
	if err != nil {
		return err
	}
	if r.ownerRefuses(a) {
		return nil // the next pass says so
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
		slog.String("image", a.Service.Spec.GetImage()))
	paths := r.machine.Network.Namespaces(network.ID(a.MemberID, a.Service.Attachment()))
	spec := runtime.Spec{
		ID:         run.ID,
		MemberID:   a.MemberID,
		InstanceID: a.Workload.InstanceID,
		OrgID:      a.Workload.OrgID,
		Revision:   a.Revision,
		SpecDigest: a.Service.SpecDigest,
		Copy:       a.Service.Copy,
		Service:    a.Service.Spec,
		Devices:    devices,
		Volumes:    volumes,
		Secrets:    secrets,
		NetNSPath:  paths.NetNSPath,
		UserNSPath: paths.UserNSPath,
	}
	started, err := r.runContainer(ctx, a, spec, n)
	if err != nil {
		// Should the removal fail too, the next pass finds a container in state created.
		if removeErr := r.remove(context.WithoutCancel(ctx), run.ID); removeErr != nil {
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

// secrets opens the secret parameters of a workload for its containers; the one that installs an environment gets the
// package index alone. One that does not open was sealed for another member or node.
func (r *Reconciler) secrets(w agent.Workload, s agent.Service) (map[string][]byte, error) {
	if s.BuildsEnvironment {
		index, err := r.index(w)
		return index.files(), err
	}
	var opened map[string][]byte
	for name, sealed := range w.Sealed {
		secret, err := r.cfg.Unseal(w.MemberID, name, sealed)
		if err != nil {
			return nil, fault.New(fault.Unprocessable, agent.CodeSecretUnreadable, "The secret parameter "+name+
				" was not sealed for this workload and node; set it anew in an upgrade.", err).Permanent()
		}
		if opened == nil {
			opened = map[string][]byte{}
		}
		opened[name] = secret
	}
	return opened, nil
}

// runContainer is the order of a start: the container's files and record need no network, its task needs the
// namespaces, and the workload runs only when all networks of its member are complete.
func (r *Reconciler) runContainer(ctx context.Context, a agent.StartContainer, spec runtime.Spec,
	n *pendingNetworks,
) (runtime.Run, error) {
	if err := r.prepareEnvironment(ctx, a, &spec); err != nil {
		return runtime.Run{}, err
	}
	pending, err := r.machine.Containers.Prepare(ctx, spec)
	if err != nil {
		return runtime.Run{}, err
	}
	defer pending.Close()
	if err := n.awaitNamespaces(ctx, spec.Service.GetName()); err != nil {
		return runtime.Run{}, err
	}
	if err := r.machine.Containers.CreateTask(ctx, pending); err != nil {
		return runtime.Run{}, err
	}
	if err := n.awaitComplete(ctx); err != nil {
		return runtime.Run{}, err
	}
	ip, peers := r.peers(a.Workload, spec.Service.GetName())
	return r.machine.Containers.StartTask(ctx, pending, ip, peers)
}

// peers returns the address of a service, and the other services of its member.
func (r *Reconciler) peers(w agent.Workload, service string) (ip string, peers []runtime.Peer) {
	m, _ := r.store.Member(w.MemberID)
	for _, s := range w.Services {
		if address := m.Services[s.Attachment()].IP; s.Name == service {
			ip = address
		} else if address != "" {
			peers = append(peers, runtime.Peer{IP: address, Names: runtime.NamesOf(s.Spec)})
		}
	}
	return ip, peers
}

// updateHosts tells the running containers of a workload the new addresses of their peers. Where other copies serve
// beside it, those that run under the version before learn them once the ports have moved.
func (r *Reconciler) updateHosts(w agent.Workload, beside bool) error {
	for id, run := range r.store.Runs() {
		i := slices.IndexFunc(w.Services, func(s agent.Service) bool { return s.Name == run.Service && s.Copy == run.Copy })
		if run.MemberID != w.MemberID || run.ExitRecorded || i < 0 || beside && run.Revision != w.Revision {
			continue
		}
		ip, peers := r.peers(w, run.Service)
		if err := r.machine.Containers.UpdateHosts(runtime.Spec{
			ID: id, MemberID: w.MemberID, Service: w.Services[i].Spec, IP: ip, Peers: peers,
		}); err != nil {
			return err
		}
	}
	return nil
}

// setupNetworks stores the intent first: the next pass sees an attachment that a crash interrupted as not ready and
// makes it again. The containers that already run learn the addresses before the setup counts as done.
func (r *Reconciler) setupNetworks(ctx context.Context, a agent.SetupNetwork, n *pendingNetworks) error {
	var ports []state.HostPort
	var err error
	if len(a.Unpublished) == len(a.Services) {
		err = r.store.UpdateMember(a.MemberID, func(m *state.Member) { a.RecordIntent(&m.Member) })
	} else {
		ports, err = r.assignPorts(a.Workload, func(m *state.Member) { a.RecordIntent(&m.Member) })
	}
	if err != nil {
		return err
	}
	failpoint.Hit("agent/network/ports_assigned")
	addresses, errs := make([]string, len(a.Services)), make([]error, len(a.Services))
	var attaching sync.WaitGroup
	for i, service := range a.Services {
		attaching.Go(func() {
			made := sync.OnceFunc(func() { close(n.namespaces[service]) })
			id := network.ID(a.MemberID, a.Attachment(service))
			mappings := mappingsOf(ports, service)
			if slices.Contains(a.Unpublished, service) {
				mappings = nil
			}
			attachment, err := r.machine.Network.Setup(ctx, id, mappings, made)
			addresses[i], errs[i] = attachment.IP, err
		})
	}
	attaching.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	failpoint.Hit("agent/network/complete")
	record := func(m *state.Member) {
		for i, service := range a.Services {
			a.RecordAddress(&m.Member, service, addresses[i])
		}
		if len(a.Unpublished) == 0 {
			m.Endpoints = endpointsOf(ports)
		}
	}
	if len(a.Workload.Services) > len(a.Services) {
		if err := r.store.UpdateMember(a.MemberID, record); err != nil {
			return err
		}
		if err := r.updateHosts(a.Workload, len(a.Unpublished) > 0); err != nil {
			return err
		}
	}
	return r.store.UpdateMember(a.MemberID, func(m *state.Member) {
		record(m)
		a.Record(&m.Member)
	})
}

// publishPorts stores where the ports lead once the network leads them there: after a crash in between, the next pass
// does it again.
func (r *Reconciler) publishPorts(ctx context.Context, a agent.PublishPorts) error {
	r.log.InfoContext(ctx, "publishing ports", slog.String("member_id", a.MemberID),
		slog.Uint64("revision", a.Revision))
	ports, err := r.assignPorts(a.Workload, func(m *state.Member) { a.RecordIntent(&m.Member) })
	if err != nil {
		return err
	}
	failpoint.Hit("agent/publish/assigned")
	id := network.ID(a.MemberID, a.Service.Attachment())
	if err := r.machine.Network.Publish(ctx, id, mappingsOf(ports, a.Service.Name)); err != nil {
		return err
	}
	failpoint.Hit("agent/publish/done")
	if len(a.Workload.Services) > 1 {
		if err := r.updateHosts(a.Workload, false); err != nil {
			return err
		}
	}
	return r.store.UpdateMember(a.MemberID, func(m *state.Member) {
		m.Endpoints = endpointsOf(ports)
		a.Record(&m.Member)
	})
}

// mappingsOf are the published ports of a service. http and tcp alike are TCP to the network.
func mappingsOf(ports []state.HostPort, service string) []network.PortMapping {
	var mappings []network.PortMapping
	for _, p := range ports {
		if p.Service == service {
			mappings = append(mappings, network.PortMapping{HostPort: p.Host, ContainerPort: p.Container, Protocol: "tcp"})
		}
	}
	return mappings
}

func endpointsOf(ports []state.HostPort) []*protocol.PublishedEndpoint {
	endpoints := make([]*protocol.PublishedEndpoint, 0, len(ports))
	for _, p := range ports {
		endpoints = append(endpoints, &protocol.PublishedEndpoint{
			Name: p.Name, Protocol: p.Protocol, Host: loopback, Port: uint32(p.Host),
		})
	}
	return endpoints
}

// assignPorts returns the host ports of the revision. A port that only its fallback has keeps its number too, unless
// the revision needs that.
func (r *Reconciler) assignPorts(w agent.Workload, change func(*state.Member)) ([]state.HostPort, error) {
	desired := portsOf(w)
	keep := slices.Clone(desired)
	if w.Fallback != nil {
		for _, p := range portsOf(*w.Fallback) {
			if !slices.ContainsFunc(desired, func(d state.ServicePort) bool { return d.Port.GetName() == p.Port.GetName() }) {
				p.Port = proto.CloneOf(p.Port)
				p.Port.HostPort, p.Fallback = 0, true
				keep = append(keep, p)
			}
		}
	}
	owner, _ := r.cfg.Policy() // each pass reports an error in the file
	ports, err := r.store.AssignPorts(w.MemberID, keep, state.PortPool{
		From:    r.cfg.PortFrom,
		To:      r.cfg.PortTo,
		Tenants: owner.HostPorts.Contains,
		Free:    func(port uint16) bool { return r.machine.Network.PortFree(w.MemberID, port) },
		Published: func(service string, container uint16) uint16 {
			return r.machine.Network.PublishedOn(w.MemberID, service, container)
		},
	}, change)
	if err != nil {
		return nil, err
	}
	return ports[:len(desired)], nil
}

func portsOf(w agent.Workload) []state.ServicePort {
	var ports []state.ServicePort
	for _, s := range w.Services {
		for _, p := range s.Spec.GetPorts() {
			ports = append(ports, state.ServicePort{Service: s.Name, Port: p})
		}
	}
	return ports
}

// newRunID returns an id that is never used twice. It begins with the member's, by which the runtime finds leftovers.
func newRunID(memberID string) string {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails
	return memberID + "." + hex.EncodeToString(random[:])
}
