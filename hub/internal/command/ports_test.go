package command_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// allowPorts makes the node's owner one who lets tenants choose these ports; nil for none.
func (w *world) allowPorts(ports *protocol.PortRange) {
	w.T.Helper()
	facts, err := protojson.Marshal(&protocol.NodeFacts{Hostname: "n1", HostPorts: ports})
	require.NoError(w.T, err)
	w.Exec(`UPDATE nodes SET facts = $2 WHERE id = $1`, w.Node, string(facts))
}

// onPort is a small instance on a port of the node.
func onPort(port uint32) manifest.Choice {
	return manifest.Choice{CPUMillis: 100, MemoryMiB: 16, Ports: []manifest.PortChoice{{Name: "http", HostPort: port}}}
}

func (w *world) upgradeTo(i instance.Instance, port uint32) (instance.Instance, error) {
	return w.upgrade(i, command.UpgradeInstanceInput{
		Version: i.Version, Resources: manifest.Choice{Ports: []manifest.PortChoice{{Name: "http", HostPort: port}}},
	})
}

// refused requires that a port of the node was refused, for a reason, and that nothing has changed.
func (w *world) refused(err error, reason string) {
	w.T.Helper()
	require.EqualValues(w.T, "port_unavailable", fault.As(err).Code, "%v", err)
	require.Equal(w.T, []fault.Field{{Pointer: "/ports/0/host_port", Reason: reason}}, fault.As(err).Fields)
}

func TestATenantChoosesAPortThatTheOwnerAllows(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	before := w.Contents()
	_, err := w.sized(onPort(30001))
	w.refused(err, "the owner of the node lets nobody choose a port")
	require.Equal(t, before, w.Contents())
	w.allowPorts(&protocol.PortRange{First: 30001, Last: 30002})
	before = w.Contents()
	_, err = w.sized(onPort(30003))
	w.refused(err, "must lie between 30001 and 30002 on this node")
	_, err = w.sized(manifest.Choice{Ports: []manifest.PortChoice{{Name: "telepathy", HostPort: 30001}}})
	require.Equal(t, []fault.Field{{Pointer: "/ports/0/name", Reason: "the version has no port of this name"}},
		fault.As(err).Fields)
	require.Equal(t, before, w.Contents())

	i, err := w.sized(onPort(30001))
	require.NoError(t, err)
	_, services := w.free(i)
	require.EqualValues(t, 30001, services[0].GetPorts()[0].GetHostPort())
	require.Equal(t, onPort(30001).Ports, w.Get(i.ID).Resources.Ports)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		members, err := instance.SnapshotFor(ctx, tx, w.Node)
		require.Contains(t, members[0].Features, manifest.FeatureHostPorts)
		return err
	})
	before = w.Contents()
	_, err = w.sized(onPort(30001))
	w.refused(err, "is in use on this node")
	require.Equal(t, before, w.Contents())
	w.consistent()

	w.SetFeatures(manifest.SchemaV1)
	_, err = w.sized(onPort(30002))
	require.EqualValues(t, "feature_missing", fault.As(err).Code, "the node's agent is older")
	_, err = w.sized(onPort(0))
	require.NoError(t, err, "it is not asked for that")
}

// A node may go back: until an upgrade is over, the instance has the ports of both revisions.
func TestAnUpgradeMovesThePortAndFreesItWhenItIsOver(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.allowPorts(&protocol.PortRange{First: 30001, Last: 30003})
	i, err := w.sized(onPort(30001))
	require.NoError(t, err)
	i = w.ready(i)
	neighbour, err := w.sized(onPort(30003))
	require.NoError(t, err)
	_, err = w.upgradeTo(i, 30003)
	w.refused(err, "is in use on this node")
	_, err = w.upgradeTo(i, 30004)
	w.refused(err, "must lie between 30001 and 30003 on this node")

	w.allowPorts(&protocol.PortRange{First: 30002, Last: 30003})
	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "1.0.0", Resources: manifest.Choice{MemoryMiB: 32}})
	require.NoError(t, err, "what it has stays allowed")
	require.Equal(t, onPort(30001).Ports, i.Resources.Ports)
	i = w.ready(i)
	w.allowPorts(&protocol.PortRange{First: 30001, Last: 30003})

	i, err = w.upgradeTo(i, 30002)
	require.NoError(t, err)
	for _, port := range []uint32{30001, 30002} {
		_, err = w.sized(onPort(port))
		w.refused(err, "is in use on this node")
	}
	w.consistent()
	back := w.Says(i, protocol.WorkloadStatus_READY)
	back.Revision, back.FallbackFromRevision = uint64(i.Revision-1), uint64(i.Revision)
	back.Reason = protocol.WorkloadStatus_CRASH_LOOP
	w.Report(uint64(i.Revision), back)
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Running, i.Lifecycle.Status)
	require.Equal(t, onPort(30001).Ports, i.Resources.Ports)

	i, err = w.upgradeTo(i, 30002)
	require.NoError(t, err, "the failed upgrade has left it")
	i = w.ready(i)
	other, err := w.sized(onPort(30001))
	require.NoError(t, err, "the finished one has left the other")
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.EqualValues(t, "port_unavailable", fault.As(err).Code)
	w.consistent()

	i, err = w.upgradeTo(i, 0)
	require.NoError(t, err)
	i = w.ready(i)
	require.Empty(t, i.Resources.Ports, "the node chooses again")
	require.Equal(t, 2, w.Count(`SELECT count(*) FROM reserved_ports`))
	for _, gone := range []instance.Instance{other, neighbour} {
		ended, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"+gone.ID), w.Project.ID, gone.ID)
		require.NoError(t, err)
		w.Report(uint64(ended.Revision), w.Removed(ended))
	}
	require.Zero(t, w.Count(`SELECT count(*) FROM reserved_ports`))
}

func TestConcurrentRequestsNeverShareAPort(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.allowPorts(&protocol.PortRange{First: 30001, Last: 30001})
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for n := range errs {
		wg.Go(func() { _, errs[n] = w.sized(onPort(30001)) })
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
			continue
		}
		require.EqualValues(t, "port_unavailable", fault.As(err).Code, "%v", err)
	}
	require.Equal(t, 1, made)
	w.consistent()
}
