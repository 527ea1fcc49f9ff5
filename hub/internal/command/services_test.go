package command_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// ofServices is the demo as an app of a main service and a database.
func ofServices(version string) string {
	return strings.Replace(manifesttest.Services("demo", commandtest.Image), "version: 1.0.0", "version: "+version, 1)
}

func TestAnAppOfSeveralServicesUsesAndPaysForTheirSum(t *testing.T) {
	w := newWorld(t)
	w.priceMemory()
	w.Allocation()
	for _, version := range []string{"4.0.0", "4.1.0"} {
		verified, env := w.Sign(ofServices(version))
		w.PublishVersion(version, verified, env)
	}
	in := w.InstanceInput()
	in.Version, in.Resources = "4.0.0", manifest.Choice{MemoryMiB: 449}
	before := w.Contents()
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta("too large"), in)
	require.Equal(t, fault.Conflict, fault.As(err).Kind, "449 and 64 MiB are more than the 512 of the allocation: %v", err)
	require.Equal(t, before, w.Contents())
	in.Resources.MemoryMiB = 256
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("services"), in)
	require.NoError(t, err)
	a, services := w.free(i)
	require.Len(t, services, 2)
	require.EqualValues(t, 300, a.FreeCPUMillis)
	require.EqualValues(t, (512-256-64)<<20, a.FreeMemoryBytes)
	require.EqualValues(t, 64<<20, services[0].GetResources().GetMemoryBytes())
	require.EqualValues(t, 256<<20, services[1].GetResources().GetMemoryBytes())
	cpu, memory, _ := w.limits(i)
	require.Equal(t, 700, cpu)
	require.Equal(t, 320<<20, memory)
	require.EqualValues(t, 256, w.Get(i.ID).Resources.MemoryMiB, "what was chosen is of the main service")
	w.consistent()

	i, err = w.upgrade(w.ready(i), command.UpgradeInstanceInput{
		Version: "4.1.0", Resources: manifest.Choice{MemoryMiB: 448},
	})
	require.NoError(t, err)
	w.consistent()
	i = w.ready(i)
	a, services = w.free(i)
	require.EqualValues(t, 448<<20, services[1].GetResources().GetMemoryBytes())
	require.Zero(t, a.FreeMemoryBytes)
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "4.1.0", Resources: manifest.Choice{MemoryMiB: 449}})
	require.Equal(t, "/resources/memory_mib", fault.As(err).Fields[0].Pointer)
}

func TestTheServicesOfAMemberAreReadAndEventsNameTheOneThatFails(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	verified, env := w.Sign(ofServices("4.0.0"))
	w.PublishVersion("4.0.0", verified, env)
	in := w.InstanceInput()
	in.Version, in.Resources = "4.0.0", manifest.Choice{CPUMillis: 100, MemoryMiB: 16}
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("services"), in)
	require.NoError(t, err)
	w.ready(i)
	status := w.Says(i, protocol.WorkloadStatus_STARTING)
	status.Services = []*protocol.ServiceStatus{
		{Name: "db", Status: protocol.ServiceStatus_READY, Restarts: 1},
		{Name: "server", Status: protocol.ServiceStatus_WAITING},
		{Name: strings.Repeat("x", 300), Status: 99, Detail: strings.Repeat("y", 9999)},
	}
	w.Report(1, status)
	services := w.Get(i.ID).Members[0].Services
	require.Equal(t, instance.ServiceStatus{Name: "db", Status: "ready", Restarts: 1}, services[0])
	require.Equal(t, "waiting", services[2].Status, "of a newer node")
	require.LessOrEqual(t, len(services[2].Name)+len(services[2].Detail), 255+512)

	status = w.Says(i, protocol.WorkloadStatus_FAILED)
	status.Reason = protocol.WorkloadStatus_CRASH_LOOP
	status.Services = []*protocol.ServiceStatus{
		{Name: "db", Status: protocol.ServiceStatus_FAILED, Reason: protocol.WorkloadStatus_CRASH_LOOP, ExitCode: 3},
		{Name: "server", Status: protocol.ServiceStatus_WAITING},
	}
	fresh, err := w.Commands().CreateInstance(t.Context(), w.Meta("another"), in)
	require.NoError(t, err)
	status.MemberId, status.InstanceId = fresh.Members[0].ID, fresh.ID
	w.Report(1, status)
	w.Now = w.Now.Add(time.Minute)
	w.Report(1, status)
	require.Equal(t, lifecycle.Failed, w.Get(fresh.ID).Lifecycle.Status)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		list, err := event.BySubject(ctx, tx, event.SubjectQuery{Subject: fresh.ID})
		require.NoError(t, err)
		last, err := list[len(list)-1].CloudEvent()
		require.Contains(t, string(last.Data), `"service":"db"`)
		return err
	})
}
