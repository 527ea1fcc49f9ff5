package state_test

import (
	"fmt"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
)

// compare requires that both stores say the same of everything that can be asked.
func (w *twin) compare() {
	w.t.Helper()
	accepted, desired := w.disk.Accepted(), w.model.Desired()
	require.Equal(w.t, []uint64{accepted.Epoch, accepted.Generation}, []uint64{desired.Epoch, desired.Generation})
	var workloads []agent.Workload
	var missing []agent.MissingPart
	for _, p := range accepted.Parts {
		if p.Workload == nil {
			missing = append(missing, agent.MissingPart{MemberID: p.MemberID, SHA256: p.SHA256})
			continue
		}
		workloads = append(workloads, agent.NewWorkload(p.MemberID, p.Workload))
	}
	require.Equal(w.t, workloads, desired.Workloads)
	require.Equal(w.t, missing, desired.Missing)
	if len(accepted.SHA256) > 0 {
		require.Equal(w.t, accepted.SHA256, w.model.Digest[:])
	}
	leases := w.disk.Leases()
	require.Len(w.t, leases, len(w.model.Leases))
	for id, l := range leases {
		require.True(w.t, proto.Equal(l, w.model.Leases[id]), "lease of %s: %v and %v", id, l, w.model.Leases[id])
	}
	require.Equal(w.t, w.disk.Runs(), w.model.Runs)
	require.Equal(w.t, w.disk.LastStamp(), w.model.Stamp)
	w.compareMembers()
	w.compareUsage()
}

func (w *twin) compareMembers() {
	w.t.Helper()
	members := w.disk.Members()
	require.Len(w.t, members, len(w.model.Members))
	for id, m := range members {
		other := w.model.Members[id]
		require.Equal(w.t, proofOf(m.Removal), proofOf(other.Removal))
		m.Removal, other.Removal = nil, nil
		require.Equal(w.t, nodestore.Member{Member: m.Member, Reported: m.Reported}, other)
		consumed := w.disk.Consumed(id)
		require.Len(w.t, consumed, len(w.model.Consumed[id]))
		for name, quantity := range consumed {
			require.Equal(w.t, quantity, w.model.Consumed[id][name], "%s of %s", name, id)
		}
	}
}

// compareUsage reads every segment from the disk.
func (w *twin) compareUsage() {
	w.t.Helper()
	spooled := w.disk.Spool()
	require.Equal(w.t, []any{spooled.Incarnation, spooled.LastSegment, spooled.LastSequence, spooled.Marks},
		[]any{w.model.Incarnation(), w.model.Chain.Number, w.model.Chain.Sequence, w.model.Marks})
	require.Equal(w.t, spooled.UnsentBytes > 0, w.model.UnsentBytes > 0)
	for number := uint64(1); number <= spooled.LastSegment; number++ {
		env, err := w.disk.Segment(number)
		sealed, kept := w.model.Segments[number]
		require.Equal(w.t, err == nil, kept, "segment %d: %v", number, err)
		if kept {
			require.Equal(w.t, env.GetPayload(), sealed.Payload, "segment %d", number)
		}
	}
	for id := range w.model.Runs {
		require.Equal(w.t, w.disk.Measured(id), w.model.Meter.Measured(id))
	}
	for id := range w.model.Members {
		require.Equal(w.t, w.disk.Metering(id), w.model.Meter.Metering(id), "%s has an open interval", id)
	}
}

// proofOf is a proof of removal in comparable form.
func proofOf(p *protocol.RemovalProof) string {
	if p == nil {
		return ""
	}
	return fmt.Sprint(p.GetAt().AsTime(), p.GetAbsent(), p.GetLastUsageSequence(), p.GetIncarnation())
}
