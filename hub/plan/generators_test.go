package plan_test

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// validSnapshot draws a node with allocations that do not overlap and members that fit into them.
func validSnapshot(t *rapid.T) plan.Snapshot {
	accelerators := make([]string, rapid.IntRange(0, 8).Draw(t, "accelerators"))
	for i := range accelerators {
		accelerators[i] = fmt.Sprintf("GPU-%02d", i)
	}
	snap := plan.Snapshot{Node: plan.Node{ID: "node-1", AcceleratorIDs: accelerators}}
	free := accelerators
	for i := range rapid.IntRange(0, 4).Draw(t, "allocations") {
		take := rapid.IntRange(0, len(free)).Draw(t, "taken")
		a := plan.Allocation{
			ID: fmt.Sprintf("allocation-%d", i), NodeID: "node-1",
			OrgID: fmt.Sprintf("org-%d", i%2), ProjectID: fmt.Sprintf("project-%d", i%3),
			CPUMillis: 8000, MemoryBytes: 32 << 30, AcceleratorIDs: free[:take],
		}
		free = free[take:]
		snap.Allocations = append(snap.Allocations, a)
		snap.Members = append(snap.Members, members(t, a)...)
	}
	return snap
}

func members(t *rapid.T, a plan.Allocation) []plan.Member {
	free := a.AcceleratorIDs
	var out []plan.Member
	for i := range rapid.IntRange(0, 4).Draw(t, "members") {
		take := rapid.IntRange(0, len(free)).Draw(t, "given")
		out = append(out, plan.Member{
			ID: fmt.Sprintf("%s-member-%d", a.ID, i), InstanceID: "instance", AllocationID: a.ID, OrgID: a.OrgID,
			OrgSlug:   "acme",
			ProjectID: a.ProjectID, AppSlug: "demo", AppVersion: "1.0.0", CorrelationID: "correlation",
			Revision:         rapid.Uint64Range(1, 9).Draw(t, "revision"),
			ManifestEnvelope: signed("manifest"), DelegationEnvelope: signed("delegation"), ParametersJSON: "{}",
			Services:         []*protocol.Service{service("app", 2000, 8<<30, free[:take])},
			Features:         rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c"}), 0, 4).Draw(t, "features"),
			Stopped:          rapid.Bool().Draw(t, "stopped"),
			ReadinessTimeout: time.Duration(rapid.IntRange(0, 90_000).Draw(t, "timeout")) * time.Millisecond,
		})
		free = free[take:]
	}
	return out
}

func service(name string, cpuMillis uint32, memoryBytes uint64, accelerators []string) *protocol.Service {
	return &protocol.Service{
		Name: name, Image: "apps/demo/runtime@sha256:" + strings.Repeat("a1", 32),
		Resources: &protocol.Resources{
			CpuMillis: cpuMillis, MemoryBytes: memoryBytes, Pids: 100,
			AcceleratorIds: accelerators,
		},
	}
}

func signed(payload string) []byte {
	data, err := proto.Marshal(&protocol.Envelope{
		PayloadType: "type", Payload: []byte(payload),
		Signatures: []*protocol.Signature{{KeyId: "key", Signature: []byte("signature")}},
	})
	if err != nil {
		panic(err)
	}
	return data
}
