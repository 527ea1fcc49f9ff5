package sim

import (
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// takeBackup is a verified backup: what was posted before is archived. The rows themselves are copied only when they
// will be needed.
func (h *hub) takeBackup(keep bool) {
	for i := range h.rows.nodes {
		for _, m := range h.rows.nodes[i].marks {
			m.archived = m.Number
		}
	}
	if keep {
		h.backup = h.rows.clone()
	}
}

// restore replaces the database by its backup. The hub compiles nothing for a node before the node has uploaded its
// state (docs/design/recovery.md).
func (h *hub) restore() {
	h.crash()
	h.restores++
	h.rows = *h.backup.clone()
	for i := range h.rows.nodes {
		row := &h.rows.nodes[i]
		row.awaitsResync, row.usageOwed, row.usageOwedIn = !h.w.breaks(BreakAdopt), 0, ""
	}
	h.start()
}

// uploaded adopts the state that a restored hub has asked for, then reads the usage that came before it.
func (h *hub) uploaded(i, attempt int, up stateUpload) {
	row, s := &h.rows.nodes[i], h.sessions[i]
	if s == nil || s.attempt != attempt || !row.awaitsResync {
		return
	}
	row.awaitsResync = false
	h.adopt(row, up)
	for _, read := range s.unread {
		read()
	}
	s.unread = nil
	h.sync(i, 0)
}

// adopt applies what a node uploads: newer signed states and leases supersede older rows.
func (h *hub) adopt(row *nodeRow, up stateUpload) {
	epoch, generation := up.state.GetEpoch(), up.state.GetGeneration()
	newer := epoch > row.head.epoch || epoch == row.head.epoch && generation > row.head.generation
	if newer && len(up.parts) == len(up.state.GetParts()) {
		h.adoptState(row, up)
	}
	for _, l := range up.leases {
		m := row.member(l.GetMemberId())
		if m == nil || m.Gone {
			continue
		}
		_, recovered, err := h.rows.books.RecoverLease(l)
		h.booked(err)
		if !recovered {
			continue
		}
		m.audit.lostLeases = true
		h.planRenewal(m)
	}
}

func (h *hub) adoptState(row *nodeRow, up stateUpload) {
	next := head{
		epoch: up.state.GetEpoch(), generation: up.state.GetGeneration(), digest: up.digest, envelope: up.envelope,
		refs: up.state.GetParts(), rev: -1,
	}
	named := map[string]*protocol.Workload{}
	for _, w := range up.parts {
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(w)
		if err != nil {
			h.w.fail(16, "part of %s: %v", row.id, err)
			return
		}
		next.parts = append(next.parts, raw)
		named[w.GetId()] = w
	}
	row.head = next
	var known []plan.RecordedMember
	for _, m := range row.members {
		known = append(known, plan.RecordedMember{
			ID: m.id, AllocationID: m.allocation, Revision: m.revision, Stopped: m.stopped(),
			Desired: m.Desired, Gone: m.Gone,
		})
	}
	var claims []plan.RecordedClaim
	for _, id := range row.accelerators {
		if owner := row.member(row.claims[id]); owner != nil {
			claims = append(claims, plan.RecordedClaim{AcceleratorID: id, AllocationID: owner.allocation})
		}
	}
	upload := plan.Upload{Newer: true, Workloads: up.parts}
	for id := range named {
		upload.Named = append(upload.Named, id)
	}
	h.apply(row, plan.Adopt(known, claims, upload), up)
}

// apply makes the rows say what plan.Adopt found, as package recovery does.
func (h *hub) apply(row *nodeRow, todo plan.Adoption, up stateUpload) {
	for _, id := range todo.Ended {
		// The newer state does not name it: it was decommissioned after the backup.
		m := row.member(id)
		h.decommission(m)
	}
	for _, id := range todo.Left {
		m := row.member(id)
		// The newer state does not name it: a report without it proves that it is gone.
		m.ObservedRevision, m.Status = 0, protocol.WorkloadStatus_PENDING
		m.AbsentEpoch, m.AbsentGeneration = up.state.GetEpoch(), up.state.GetGeneration()
	}
	for _, c := range todo.Superseded {
		if owner := row.member(row.claims[c.AcceleratorID]); owner != nil {
			h.removed(row, owner, h.w.now)
		}
	}
	for _, w := range todo.Made {
		row.members = append(row.members, h.memberOf(row, w))
	}
	for _, w := range todo.Changed {
		m := row.member(w.GetId())
		m.revision, m.life, m.services = w.GetRevision(), lifecycle.Adopted(w), w.GetServices()
	}
	for _, w := range up.parts {
		m := row.member(w.GetId())
		for _, id := range m.accelerators {
			row.claims[id] = m.id
		}
	}
}

// memberOf makes the rows of a member anew from its signed document.
func (h *hub) memberOf(row *nodeRow, w *protocol.Workload) *memberRow {
	m := &memberRow{
		node: row.i, id: w.GetId(), instance: w.GetInstanceId(), allocation: w.GetAllocationId(), revision: w.GetRevision(),
		services: w.GetServices(),
	}
	m.begin(lifecycle.Adopted(w))
	m.org, _ = strconv.Atoi(w.GetOrgId())
	for _, s := range w.GetServices() {
		m.cpuMillis += int64(s.GetResources().GetCpuMillis())
		m.memoryBytes += int64(s.GetResources().GetMemoryBytes())
		m.accelerators = append(m.accelerators, s.GetResources().GetAcceleratorIds()...)
	}
	h.openMember(m, h.w.now.time())
	return m
}
