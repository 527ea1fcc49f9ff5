package sim

import (
	"strconv"

	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// takeBackup is a verified backup: what it holds is archived from then on. So its own rows say only what an earlier
// backup holds. They are copied only when they will be needed.
func (h *hub) takeBackup(keep bool) {
	if keep {
		h.backup, h.backupAt = h.rows.clone(), h.w.now
	}
	for i := range h.rows.nodes {
		for _, m := range h.rows.nodes[i].marks {
			m.archived = m.Number
		}
	}
}

// crash kills the hub. What was committed stays, what was on the wire is lost.
func (h *hub) crash() {
	if !h.up {
		return
	}
	h.up = false
	h.life++
	clear(h.sessions)
	for _, n := range h.w.nodes {
		if n.agentUp {
			n.up.lose()
		}
	}
}

func (h *hub) start() {
	if h.up {
		return
	}
	h.up = true
	h.life++
	h.planAccrual(0)
	for i := range h.rows.nodes {
		for _, m := range h.rows.nodes[i].members {
			if h.rows.books.IsOpen(m.id) {
				h.planRenewal(m)
			}
		}
		h.w.nodes[i].up.resumeDial()
	}
}

// restore replaces the database by its backup and begins an epoch. The hub compiles nothing for a node before the node
// has uploaded its state (docs/design/recovery.md).
func (h *hub) restore() {
	h.crash()
	h.restores++
	for i := range h.rows.nodes {
		if row := &h.rows.nodes[i]; !row.awaitsResync {
			h.lost[i] = row.head
		}
	}
	h.w.oracle.forgotten = append(h.w.oracle.forgotten, window{h.backupAt, h.w.now})
	h.rows = *h.backup.clone()
	for i := range h.rows.nodes {
		row := &h.rows.nodes[i]
		row.awaitsResync, row.usageOwed, row.usageOwedIn = !h.w.breaks(BreakAdopt), 0, ""
	}
	h.beginEpoch()
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
	h.w.deliverLate(h.w.nodes[i], h.lost[i], h.w.long(day/2))
}

// adopt applies what a node uploads: a newer signed state and leases supersede older rows.
func (h *hub) adopt(row *nodeRow, up stateUpload) {
	uploaded := plan.StateVersion{
		Epoch: up.state.GetEpoch(), Generation: up.state.GetGeneration(), SHA256: up.digest[:],
	}
	upload := plan.Upload{Newer: uploaded.Supersedes(row.head.version()), Workloads: up.parts}
	for _, ref := range up.state.GetParts() {
		upload.Named = append(upload.Named, ref.GetId())
	}
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
			claims = append(claims, plan.RecordedClaim{
				AcceleratorID: id, AllocationID: owner.allocation, OrgID: strconv.Itoa(owner.org),
			})
		}
	}
	gpus := row.gpus
	if h.w.breaks(BreakTakeover) {
		gpus = nil
	}
	h.apply(row, plan.Adopt(known, claims, gpus, upload), up)
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
		m.audit.lostLeases = append(m.audit.lostLeases, window{h.backupAt, h.w.now})
		h.planRenewal(m)
	}
	row.rev++
}

// apply makes the rows say what plan.Adopt found, as package recovery does.
func (h *hub) apply(row *nodeRow, todo plan.Adoption, up stateUpload) {
	for _, id := range todo.Ended {
		// The newer state does not name it: it was decommissioned after the backup.
		m := row.member(id)
		_ = h.decommission(m) // it may have begun before the backup
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
		m := h.memberOf(row, w)
		row.members = append(row.members, m)
		for _, id := range m.accelerators {
			row.claims[id] = m.id
		}
	}
	for _, w := range todo.Changed {
		m := row.member(w.GetId())
		m.revision, m.life, m.services = w.GetRevision(), lifecycle.Adopted(w), w.GetServices()
		h.adoptVersion(m, w)
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
	h.adoptVersion(m, w)
	h.openMember(m, h.w.now.time())
	return m
}
