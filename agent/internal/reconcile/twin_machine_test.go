package reconcile_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

// script is what chance does to both nodes, and changes while the product's loop runs.
type script struct {
	hub *hub

	mu    sync.Mutex
	takes map[string]time.Duration
	fails map[string]error
	away  bool
}

// change changes the script.
func (s *script) change(f func(*script)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

// Takes implements sim.Script.
func (s *script) Takes(kind, subject string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.takes[kind] == 0 {
		return 0
	}
	// What begins for several at once ends for one after the other, so that its order is the same for both nodes.
	return s.takes[kind] + time.Duration(crc32.ChecksumIEEE([]byte(subject))%10_000)*time.Microsecond
}

// Fails implements sim.Script.
func (s *script) Fails(kind string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fails[kind]
}

// HubAway implements sim.Script.
func (s *script) HubAway() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.away
}

// Part implements sim.Script.
func (s *script) Part(sum [32]byte) ([]byte, error) {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	return s.hub.parts[sum], nil
}

// machine stands for containerd and the kernel.
type machine struct {
	script *script
	rtc    func() time.Time
	events notify.Signal
	// moved counts how often ports were published for another copy.
	moved atomic.Int64

	mu         sync.Mutex
	containers map[string]*box
	networks   map[string]bool
	images     map[string]bool
}

// box is a container with what only the machine knows.
type box struct {
	runtime.Container
	spec *protocol.Service
	// failure is how its start ends.
	failure       error
	upAt, readyAt time.Time
}

// end ends a container's process.
func (m *machine) end(id string, state runtime.State, code uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.containers[id]
	if b == nil || b.State != runtime.StateRunning {
		return
	}
	b.State = state
	if state == runtime.StateExited {
		b.ExitedAt, b.ExitCode = m.rtc(), code
	}
	m.events.Send()
}

// powerOff leaves records without processes.
func (m *machine) powerOff() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.containers {
		if b.State != runtime.StateExited {
			b.State = runtime.StateLost
		}
	}
	clear(m.networks)
}

// agentHandle is the machine and the hub as one process of the agent reaches them: through no handle of a dead one is
// anything done.
type agentHandle struct {
	*machine
	dead chan struct{}
}

var errDead = errors.New("the process is dead")

// wait lets time pass; with an error nothing may happen any more.
func (h agentHandle) wait(ctx context.Context, kind, subject string) error {
	timer := time.NewTimer(h.script.Takes(kind, subject))
	defer timer.Stop()
	select {
	case <-h.dead:
		return errDead
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
	}
	select {
	case <-h.dead:
		return errDead
	default:
		return nil
	}
}

// memberOf is the member of a run.
func memberOf(runID string) string {
	id, _, _ := strings.Cut(runID, ".")
	return id
}

func (h agentHandle) List(context.Context) ([]runtime.Container, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []runtime.Container
	for _, id := range slices.Sorted(maps.Keys(h.containers)) {
		out = append(out, h.containers[id].Container)
	}
	return out, nil
}

func (h agentHandle) Events(context.Context) <-chan struct{} { return h.events }

func (h agentHandle) Prepare(ctx context.Context, spec runtime.Spec) (*runtime.Pending, error) {
	failure := h.script.Fails("start")
	if err := h.wait(ctx, "create", spec.MemberID); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.containers[spec.ID] = &box{spec: spec.Service, failure: failure, Container: runtime.Container{
		ID: spec.ID, MemberID: spec.MemberID, InstanceID: spec.InstanceID, Service: spec.Service.GetName(),
		Revision: spec.Revision, SpecDigest: spec.SpecDigest, Copy: spec.Copy, State: runtime.StateCreated,
		AcceleratorIDs: spec.Service.GetResources().GetAcceleratorIds(), Restart: spec.Service.GetRestartPolicy(),
		StopGrace: time.Duration(spec.Service.GetStopGraceSeconds()) * time.Second, DependsOn: dependsOn(spec.Service),
	}}
	return &runtime.Pending{Spec: spec}, nil
}

func (h agentHandle) CreateTask(context.Context, *runtime.Pending) error { return nil }

func (h agentHandle) StartTask(ctx context.Context, p *runtime.Pending, _ string,
	_ []runtime.Peer,
) (runtime.Run, error) {
	if err := h.wait(ctx, "start", p.Spec.MemberID); err != nil {
		return runtime.Run{}, err
	}
	h.mu.Lock()
	b := h.containers[p.Spec.ID]
	if b.failure != nil {
		h.mu.Unlock()
		return runtime.Run{}, b.failure
	}
	b.State, b.StartedAt, b.upAt = runtime.StateRunning, h.rtc(), time.Now()
	b.readyAt = b.upAt.Add(h.script.Takes("ready", b.MemberID))
	run := runtime.Run{ContainerID: b.ID, StartedAt: b.StartedAt}
	h.mu.Unlock()
	return run, h.wait(ctx, "answer", b.MemberID)
}

func (h agentHandle) UpdateHosts(runtime.Spec) error { return nil }

func (h agentHandle) DeliverConfig(context.Context, string, *protocol.Config) error {
	return errors.New("no container of the simulation takes a config")
}

func (h agentHandle) DeliverSecrets(context.Context, string, map[string][]byte, *protocol.Secrets) error {
	return errors.New("no container of the simulation takes secrets")
}

// Stop sends the signal: the process ends even if the agent does not live to see it.
func (h agentHandle) Stop(ctx context.Context, id string, _ time.Duration) error {
	time.AfterFunc(h.script.Takes("stop", memberOf(id)), func() { h.end(id, runtime.StateExited, 143) })
	if err := h.wait(ctx, "stop", memberOf(id)); err != nil {
		return err
	}
	return h.wait(ctx, "answer", memberOf(id))
}

func (h agentHandle) Remove(ctx context.Context, id string) error {
	if err := h.wait(ctx, "remove", memberOf(id)); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.containers, id)
	h.mu.Unlock()
	h.events.Send()
	return h.wait(ctx, "answer", memberOf(id))
}

func (h agentHandle) RemoveMember(context.Context, string) error { return nil }

func (h agentHandle) Leftovers(ctx context.Context, memberID string) ([]string, error) {
	return nil, h.wait(ctx, "retire", memberID)
}

// Exec is the readiness probe: it answers once the service is ready.
func (h agentHandle) Exec(ctx context.Context, id string, _ []string, _ time.Duration) (int, error) {
	h.mu.Lock()
	b := h.containers[id]
	if b == nil || b.State != runtime.StateRunning {
		h.mu.Unlock()
		return 1, nil
	}
	ready := time.Until(b.readyAt)
	h.mu.Unlock()
	select {
	case <-time.After(ready):
		return 0, nil
	case <-h.dead:
		return 0, errDead
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func (h agentHandle) EnsureImage(ctx context.Context, ref runtime.ImageRef, _ runtime.Credentials,
	_ *tls.Config,
) error {
	err := h.script.Fails("pull")
	kind := "pull"
	if own := kind + " " + ref.Repository; h.script.Takes(own, "") > 0 {
		kind = own
	}
	if waited := h.wait(ctx, kind, ref.Repository+"@"+ref.Digest); waited != nil {
		return waited
	}
	if err != nil && fault.As(err).Code == agent.CodeContainerdUnavailable {
		return fmt.Errorf("pull: %w", errdefs.ErrUnavailable)
	}
	if err == nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.images[ref.Repository+ref.Digest] = true
	}
	return err
}

func (h agentHandle) PullProgress(string) (runtime.PullProgress, bool) {
	return runtime.PullProgress{}, false
}

func (h agentHandle) HasImage(_ context.Context, ref runtime.ImageRef) (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.images[ref.Repository+ref.Digest], nil
}

func (h agentHandle) CollectImages(context.Context, int64, ...runtime.ImageRef) error { return nil }

func (h agentHandle) Stats(id string) (runtime.Stats, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.containers[id]
	if b == nil || b.State != runtime.StateRunning {
		return runtime.Stats{}, fs.ErrNotExist
	}
	return runtime.Stats{
		CPUUsageMicros: uint64(time.Since(b.upAt).Microseconds() * int64(b.spec.GetResources().GetCpuMillis()) / 2000),
		MemoryBytes:    b.spec.GetResources().GetMemoryBytes(),
	}, nil
}

func (h agentHandle) PullCredential(context.Context, string) (*protocol.PullCredential, error) {
	return &protocol.PullCredential{}, h.hubAway()
}

func (h agentHandle) RegistryTLS() (*tls.Config, error) { return &tls.Config{}, h.hubAway() }

func (h agentHandle) Part(ctx context.Context, sum [32]byte) ([]byte, error) {
	if err := h.hubAway(); err != nil {
		return nil, err
	}
	raw, err := h.script.Part(sum)
	document := &protocol.Workload{}
	if err := errors.Join(err, proto.Unmarshal(raw, document)); err != nil {
		return nil, err
	}
	return raw, h.wait(ctx, "fetch", document.GetId())
}

func (h agentHandle) hubAway() error {
	if h.script.HubAway() {
		return fault.New(fault.Unavailable, agent.CodeHubAway, "There is no session.", nil)
	}
	return nil
}

// netHandle is the network of a handle.
type netHandle struct{ agentHandle }

func (h netHandle) Setup(ctx context.Context, id string, _ []network.PortMapping,
	namespaces func(),
) (network.Attachment, error) {
	h.mu.Lock()
	h.networks[id] = true
	h.mu.Unlock()
	namespaces()
	memberID, _ := network.ParseID(id)
	return network.Attachment{}, h.wait(ctx, "network", memberID)
}

func (h netHandle) Conditions() []string { return nil }

func (h netHandle) Namespaces(string) network.Attachment { return network.Attachment{} }

func (h netHandle) Publish(ctx context.Context, id string, _ []network.PortMapping) error {
	memberID, _ := network.ParseID(id)
	h.moved.Add(1)
	return h.wait(ctx, "publish", memberID)
}

func (h netHandle) Drain(context.Context, string, time.Duration) error { return nil }

func (h netHandle) Remove(ctx context.Context, id string) error {
	memberID, _ := network.ParseID(id)
	if err := h.wait(ctx, "remove network", memberID); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.networks, id)
	h.mu.Unlock()
	return h.wait(ctx, "answer", memberID)
}

func (h netHandle) RemoveMember(context.Context, string) error { return nil }

// dependsOn are the services that the service depends on.
func dependsOn(s *protocol.Service) []string {
	var names []string
	for _, d := range s.GetDependsOn() {
		names = append(names, d.GetService())
	}
	return names
}

func (h netHandle) List() ([]string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.networks)), nil
}

func (h netHandle) Leftovers(context.Context, string) ([]string, error) { return nil, nil }
func (h netHandle) EnsureRules(context.Context) (bool, error)           { return false, nil }
func (h netHandle) PortFree(string, uint16) bool                        { return true }
func (h netHandle) PublishedOn(string, string, uint16) uint16           { return 0 }

// idle is what neither node has.
type idle struct{}

func (idle) RotateLogs(context.Context) error { return nil }
func (idle) Logs(context.Context, string, int, bool) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("")), nil
}

func (idle) OverLimit(context.Context) ([]runtime.Excess, time.Duration) {
	return nil, 24 * time.Hour
}
func (idle) Conditions() []string          { return nil }
func (idle) List() []*protocol.Accelerator { return nil }
func (idle) Subscribe() <-chan struct{}    { return nil }

func (idle) ScannedAt() time.Time { return time.Now() }

func (idle) State(string) agent.AcceleratorState { return 0 }

func (idle) SetUsed([]string) {}

func (idle) LostDevices(context.Context, string) (string, error) { return "", nil }

func (idle) Edits(context.Context, []string, string) (cdi.Edits, error) { return cdi.Edits{}, nil }

// noVolumes is a machine on which no member of the simulation has a volume. A script may say how long the work on one
// takes.
type noVolumes struct {
	reconcile.Volumes

	handle agentHandle
}

func (v noVolumes) Detach(ctx context.Context, memberID string) error {
	if v.handle.script.Takes("detach", memberID) == 0 {
		return nil
	}
	return v.handle.wait(ctx, "detach", memberID)
}

func (v noVolumes) Apply(ctx context.Context, desired *protocol.ProjectVolume, _ func(string) bool,
) *protocol.VolumeStatus {
	status := &protocol.VolumeStatus{Id: desired.GetId(), Status: protocol.VolumeStatus_READY}
	if v.handle.wait(ctx, "apply "+desired.GetProjectId(), desired.GetId()) != nil {
		status.Status = protocol.VolumeStatus_PENDING
	}
	return status
}

func (noVolumes) RemoveMember(context.Context, string) error { return nil }
func (noVolumes) Leftovers(string) ([]string, error)         { return nil, nil }
func (noVolumes) Conditions() []string                       { return nil }

// noEnvironments is a machine on which nothing is installed.
type noEnvironments struct{ reconcile.Environments }

func (noEnvironments) List() ([]volume.Environment, error)        { return nil, nil }
func (noEnvironments) Discard(context.Context, string) error      { return nil }
func (noEnvironments) RemoveMember(context.Context, string) error { return nil }

func (noEnvironments) Collect(context.Context, map[string]string, func(string) bool) error {
	return nil
}
