package state_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/accept/accepttest"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// machine is a runtime and a network that remember what they were asked for. Its images are there, its hub is away. It
// implements the interfaces itself, without embedding them: a method that is missing would panic as soon as the
// reconciler comes to call it.
type machine struct {
	mu         sync.Mutex
	containers map[string]runtime.Container
	attached   map[string]bool
	// started are the specs of all starts, stopped the members of all stops.
	started []runtime.Spec
	stopped []string
	// onStart, where it is set, is called at each start.
	onStart func(runtime.Spec)
	// idle counts the listings since the reconciler last changed something; listed is signalled at each.
	idle   int
	listed chan struct{}
}

func newMachine() *machine {
	return &machine{containers: map[string]runtime.Container{}, attached: map[string]bool{}, listed: make(chan struct{},
		1)}
}

func (m *machine) HasImage(context.Context, runtime.ImageRef) (bool, error) { return true, nil }

func (m *machine) PullProgress(string) (runtime.PullProgress, bool) {
	return runtime.PullProgress{}, false
}

func (m *machine) Prepare(_ context.Context, spec runtime.Spec) (*runtime.Pending, error) {
	return &runtime.Pending{Spec: spec}, nil
}

func (m *machine) CreateTask(context.Context, *runtime.Pending) error { return nil }

func (m *machine) StartTask(_ context.Context, p *runtime.Pending, _ string, _ []runtime.Peer) (runtime.Run, error) {
	spec := p.Spec
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = 0
	m.started = append(m.started, spec)
	if m.onStart != nil {
		m.onStart(spec)
	}
	now := time.Now()
	m.containers[spec.ID] = runtime.Container{
		ID: spec.ID, MemberID: spec.MemberID, InstanceID: spec.InstanceID, Service: spec.Service.GetName(),
		Revision:   spec.Revision,
		SpecDigest: spec.SpecDigest, State: runtime.StateRunning, StartedAt: now,
	}
	return runtime.Run{ContainerID: spec.ID, PID: 1, StartedAt: now}, nil
}

// containersAndNetworks tells the two Lists apart.
type networks struct{ *machine }

func (m networks) List() ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []string
	for id := range m.attached {
		ids = append(ids, id)
	}
	return ids, nil
}

func (networks) PortFree(string, uint16) bool { return true }

func (networks) PublishedOn(string, string, uint16) uint16 { return 0 }

func (networks) Publish(context.Context, string, []network.PortMapping) error { return nil }

func (networks) Drain(context.Context, string, time.Duration) error { return nil }

func (networks) Conditions() []string { return nil }

func (m *machine) List(context.Context) ([]runtime.Container, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle++
	select {
	case m.listed <- struct{}{}:
	default:
	}
	var list []runtime.Container
	for _, c := range m.containers {
		list = append(list, c)
	}
	return list, nil
}

func (m *machine) Events(context.Context) <-chan struct{} { return nil }

func (m *machine) DeliverConfig(context.Context, string, *protocol.Config) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = 0
	return nil
}

func (m *machine) Stop(_ context.Context, id string, _ time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = 0
	c := m.containers[id]
	c.State, c.ExitedAt = runtime.StateExited, time.Now()
	m.containers[id] = c
	m.stopped = append(m.stopped, c.MemberID)
	return nil
}

func (m *machine) remove(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = 0
	delete(m.containers, id)
	return nil
}

func (m *machine) detach(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = 0
	delete(m.attached, id)
	return nil
}

func (m *machine) Remove(_ context.Context, id string) error           { return m.remove(id) }
func (m networks) Remove(_ context.Context, id string) error           { return m.detach(id) }
func (m *machine) RemoveMember(context.Context, string) error          { return nil }
func (m *machine) Leftovers(context.Context, string) ([]string, error) { return nil, nil }
func (m *machine) UpdateHosts(runtime.Spec) error                      { return nil }
func (m networks) RemoveMember(context.Context, string) error          { return nil }
func (m *machine) RotateLogs(context.Context) error                    { return nil }
func (m *machine) Conditions() []string                                { return nil }
func (m *machine) Logs(context.Context, string, int, bool) (io.ReadCloser, error) {
	return nil, away()
}
func (m *machine) EnsureRules(context.Context) (bool, error) { return false, nil }
func (m *machine) OverLimit(context.Context) ([]runtime.Excess, time.Duration) {
	return nil, time.Hour
}
func (m *machine) Namespaces(string) network.Attachment { return network.Attachment{} }

func (m *machine) EnsureImage(context.Context, runtime.ImageRef, runtime.Credentials, *tls.Config) error {
	return away()
}

func (m *machine) CollectImages(context.Context, int64, ...runtime.ImageRef) error { return nil }

func (m *machine) Exec(context.Context, string, []string, time.Duration) (int, error) { return 0, nil }

func (m *machine) Stats(string) (runtime.Stats, error) { return runtime.Stats{}, nil }

func (m networks) Setup(_ context.Context, id string, _ []network.PortMapping,
	namespaces func(),
) (network.Attachment, error) {
	m.mu.Lock()
	m.idle = 0
	m.attached[id] = true
	m.mu.Unlock()
	if namespaces != nil {
		namespaces()
	}
	return network.Attachment{}, nil
}

func away() error { return fault.New(fault.Unavailable, "hub_away", "There is no hub.", nil) }

func (m *machine) PullCredential(context.Context, string) (*protocol.PullCredential, error) {
	return nil, away()
}
func (m *machine) RegistryTLS() (*tls.Config, error)              { return nil, away() }
func (m *machine) Part(context.Context, [32]byte) ([]byte, error) { return nil, away() }

// node is a store with what a node in use holds, as keys and values.
type usedNode struct {
	mesh   *accepttest.Mesh
	values map[string][]byte
	// highest is the file beside the database.
	highest []byte
	// wanted are the workloads of the signed state that may run, running the containers.
	wanted  map[string]*protocol.Workload
	machine *machine
}

// newUsedNode has two trust bundles, a state with a running, a stopped and an upgraded workload, leases from two
// batches, and usage.
func newUsedNode(t *testing.T) *usedNode {
	t.Helper()
	m := accepttest.New(t, time.Now().Add(-time.Minute))
	n := &usedNode{mesh: m, values: map[string][]byte{}, wanted: map[string]*protocol.Workload{}, machine: newMachine()}
	dir := filepath.Join(t.TempDir(), "state")
	s := n.open(t, dir)
	require.NoError(t, s.InitBundle(m.Bundles[0]))
	require.NoError(t, s.AcceptBundle(m.NextBundle(m.Now.Add(time.Second)).Envelope()))
	web, rest, up := m.Workload("web", 1), m.Workload("rest", 2), m.Workload("up", 3)
	rest.Stopped, up.Fallback = true, m.Workload("up", 2)
	acceptor := accept.New(accept.Config{Store: s, Node: m.Node})
	env, parts := m.Desired(1, web, m.Workload("left", 1))
	_, err := acceptor.State(context.Background(), env, parts)
	require.NoError(t, err)
	env, parts = m.Desired(2, web, rest, up)
	_, err = acceptor.State(context.Background(), env, parts)
	require.NoError(t, err)
	for no, members := range [][]string{{"web"}, {"rest", "up"}} {
		_, err = acceptor.Leases(m.Leases(s.Incarnation(), uint64(no+1), members...))
		require.NoError(t, err)
	}
	n.wanted["web"], n.wanted["up"] = web, up
	n.run(t, s, n.machine)
	require.Len(t, n.machine.started, 2)
	require.NoError(t, s.Close())
	n.values = dump(t, dir)
	n.highest, err = os.ReadFile(filepath.Join(dir, "highest"))
	require.NoError(t, err)
	return n
}

func (n *usedNode) open(t testing.TB, dir string) *state.Store {
	t.Helper()
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, accept.Resume(s, n.mesh.Pin(), "", n.mesh.Node()))
	require.NoError(t, s.Identify(accepttest.NodeID, protocol.NewEd25519Signer(n.mesh.NodeKey)))
	return s
}

// idleListings is how often the reconciler lists the containers, without a change of anything, until what has not
// started is no danger: it waits for something that altered values have moved away. An action needs the store between
// two passes, so that none is overtaken by many.
const idleListings = 50

// run reconciles until each member has been started or is not going to be, and returns the last report.
func (n *usedNode) run(t testing.TB, s *state.Store, m *machine) agent.Report {
	t.Helper()
	source, err := state.MachineTime()
	require.NoError(t, err)
	re := reconcile.New(reconcile.Config{
		MeteringInterval: 20 * time.Millisecond, UsageInterval: 100 * time.Millisecond, Resync: 10 * time.Millisecond,
		PortFrom: 40000,
		PortTo:   40099,
	}, s, state.NewClock(s, source, time.Time{}), reconcile.Machine{
		Containers: m, Images: m, Stats: m, Logs: m, Disk: m, Exec: m, Host: m, Network: networks{m},
		Accelerators: accelerator.New(accelerator.Config{}), Volumes: noVolumes{}, Environments: noEnvironments{},
	}, m)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- re.Run(ctx) }()
	for !m.settled(re.Report()) {
		<-m.listed
	}
	cancel()
	require.NoError(t, <-done)
	return re.Report()
}

func (m *machine) settled(r agent.Report) bool {
	m.mu.Lock()
	idle := m.idle
	m.mu.Unlock()
	return idle >= idleListings || r.Passes >= 2 && !m.undecided(r)
}

func (m *machine) undecided(r agent.Report) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(r.Workloads, func(w *protocol.WorkloadStatus) bool {
		up := slices.ContainsFunc(m.started, func(s runtime.Spec) bool { return s.MemberID == w.GetMemberId() })
		for _, c := range m.containers {
			up = up || c.MemberID == w.GetMemberId() && c.State == runtime.StateRunning
		}
		return !up && (w.GetStatus() == protocol.WorkloadStatus_STARTING || w.GetStatus() == protocol.WorkloadStatus_STOPPING)
	})
}

// onlySigned fails when something was started that the signed state does not want.
func (n *usedNode) onlySigned(t testing.TB, m *machine, what string) {
	t.Helper()
	for _, spec := range m.started {
		w := n.wanted[spec.MemberID]
		require.NotNil(t, w, "%s: %s was started", what, spec.MemberID)
		if back := w.GetFallback(); back != nil && back.GetRevision() == spec.Revision {
			w = back
		}
		require.Equal(t, w.GetRevision(), spec.Revision, what)
		require.True(t, proto.Equal(w.GetServices()[0], spec.Service), what)
	}
}

func dump(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	db, err := badger.Open(badger.DefaultOptions(dir).WithLogger(nil))
	require.NoError(t, err)
	values := map[string][]byte{}
	require.NoError(t, db.View(func(tx *badger.Txn) error {
		it := tx.NewIterator(badger.DefaultIteratorOptions)
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			value, err := it.Item().ValueCopy(nil)
			require.NoError(t, err)
			values[string(it.Item().KeyCopy(nil))] = value
		}
		return nil
	}))
	require.NoError(t, db.Close())
	return values
}

// disk makes a store of the node's values with one of them altered.
func (n *usedNode) disk(t testing.TB, key string, alter func([]byte)) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	db, err := badger.Open(badger.DefaultOptions(dir).WithLogger(nil).WithMemTableSize(8 << 20).WithValueLogFileSize(
		16 << 20).WithNumCompactors(0))
	require.NoError(t, err)
	require.NoError(t, db.Update(func(tx *badger.Txn) error {
		for k, v := range n.values {
			v = slices.Clone(v)
			if k == key {
				alter(v)
			}
			if err := tx.Set([]byte(k), v); err != nil {
				return err
			}
		}
		return nil
	}))
	require.NoError(t, db.Close())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "highest"), n.highest, 0o600))
	return dir
}

// signedKey reports whether what the key holds is a signed document.
func signedKey(key string) bool {
	prefix, _, _ := strings.Cut(key, "/")
	return slices.Contains([]string{"bundle", "state", "part", "batch"}, prefix)
}

// The nodes of this test have just booted: nothing runs, and whatever starts was started from the disk.
func TestLaw01AnAlteredByteOfTheStoreStartsNothing(t *testing.T) {
	n := newUsedNode(t)
	whole := newMachine()
	s := n.open(t, n.disk(t, "", nil))
	report := n.run(t, s, whole)
	require.NoError(t, s.Close())
	require.Len(t, whole.started, 2, "what verifies starts without a hub")
	require.NotContains(t, report.Conditions, "state_unverified")
	n.onlySigned(t, whole, "untouched")

	for key, value := range n.values {
		for _, at := range positions(len(value)) {
			what := fmt.Sprintf("%q, byte %d of %d", key, at, len(value))
			dir := n.disk(t, key, func(v []byte) { v[at] ^= 0x01 })
			s, err := state.Open(dir, state.Options{MinFreeBytes: 1})
			if err != nil {
				require.False(t, signedKey(key), "%s: %v", what, err)
				continue // a store that cannot be read starts nothing
			}
			require.NoError(t, accept.Resume(s, n.mesh.Pin(), "", n.mesh.Node()), what)
			if err := s.Identify(accepttest.NodeID, protocol.NewEd25519Signer(n.mesh.NodeKey)); err != nil {
				require.NoError(t, s.Close())
				continue
			}
			if !strings.HasPrefix(key, "segment/") { // usage is signed by the node and verified by the hub
				require.Contains(t, s.Unverified(), key, what)
			}
			m := newMachine()
			report := n.run(t, s, m)
			n.onlySigned(t, m, what)
			if member, isConsumed := strings.CutPrefix(key, "consumed/"); isConsumed {
				for _, spec := range m.started {
					require.NotEqual(t, member, spec.MemberID, "%s: its cap may be spent", what)
				}
			}
			if signedKey(key) {
				require.Contains(t, report.Conditions, "state_unverified", what)
				for _, spec := range m.started {
					require.NotContains(t, n.about(t, key), spec.MemberID, what)
				}
			}
			require.NoError(t, s.Close())
		}
	}
}

// about are the members that cannot start without the document.
func (n *usedNode) about(t *testing.T, key string) []string {
	t.Helper()
	env, w, batch := &protocol.Envelope{}, &protocol.Workload{}, &protocol.LeaseBatch{}
	switch prefix, _, _ := strings.Cut(key, "/"); {
	case prefix == "part":
		require.NoError(t, proto.Unmarshal(n.values[key], w))
		return []string{w.GetId()}
	case prefix == "batch":
		require.NoError(t, proto.Unmarshal(n.values[key], env))
		require.NoError(t, proto.Unmarshal(env.GetPayload(), batch))
		var ids []string
		for _, l := range batch.GetLeases() {
			ids = append(ids, l.GetMemberId())
		}
		return ids
	case prefix == "bundle" && strings.HasSuffix(key, "1"):
		return nil // the pinned root signed the second one, too
	}
	return []string{"web", "up"}
}

// positions are some bytes of a value: both ends and some between.
func positions(length int) []int {
	var out []int
	for _, at := range []int{0, 1, length / 4, length / 2, 3 * length / 4, length - 1} {
		if at >= 0 && at < length && !slices.Contains(out, at) {
			out = append(out, at)
		}
	}
	return out
}

func TestLaw03WhatRunsGoesOnWhenItsStoredStateDoesNotVerify(t *testing.T) {
	n := newUsedNode(t)
	for key, value := range n.values {
		if !signedKey(key) {
			continue
		}
		s := n.open(t, n.disk(t, key, func(v []byte) { v[len(v)/2] ^= 0x01 }))
		m := newMachine()
		for id, c := range n.machine.containers {
			m.containers[id], m.attached[network.ID(c.MemberID, c.Service)] = c, true
		}
		n.run(t, s, m)
		require.Empty(t, m.stopped, "%q of %d bytes", key, len(value))
		require.Empty(t, m.started, key)

		// The hub sends again what is missing.
		if !s.Bundle().Valid() {
			require.NoError(t, s.InitBundle(n.mesh.Bundle()))
		}
		acceptor := accept.New(accept.Config{Store: s, Node: n.mesh.Node})
		env, parts := n.mesh.Desired(3, n.wanted["web"], n.wanted["up"])
		_, err := acceptor.State(context.Background(), env, parts)
		require.NoError(t, err, key)
		_, err = acceptor.Leases(n.mesh.Leases(s.Incarnation(), 9, "web", "up"))
		require.NoError(t, err, key)
		require.NotContains(t, n.run(t, s, m).Conditions, "state_unverified", key)
		require.Empty(t, m.stopped, key)
		require.Empty(t, s.Unverified(), key)
		require.NoError(t, s.Close())
	}
}

// noVolumes is a machine on which no member has a volume.
type noVolumes struct{ reconcile.Volumes }

func (noVolumes) Detach(context.Context, string) error       { return nil }
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
