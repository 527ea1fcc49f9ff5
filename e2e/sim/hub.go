package sim

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/e2e/sim/books"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// hub is one hub process and its database.
type hub struct {
	w *World
	// rows survive everything but a restore.
	rows rows
	// backup is the database that a restore returns to.
	backup *rows
	// backupAt is when it was taken.
	backupAt instant

	up   bool
	life int
	// sessions are in memory only.
	sessions            []*session
	signer, leaseSigner protocol.Signer
	made                int
	// restores counts them. lost are the states that a lost hub signed last, by node: they are still under way when the
	// node meets the restored hub.
	restores int
	lost     map[int]head
}

// session is what this process knows of a connection.
type session struct {
	no                uint64
	attempt           int
	incarnation       string
	epoch, generation uint64
	digest            [sha256.Size]byte
	// bundle is the version of the trust bundle that the node has.
	bundle uint64
	// leases names what was sent: members and lease numbers.
	leases string
	// unread is usage that arrived before the state upload that a restored hub has asked for.
	unread []func()
}

// rows are the database.
type rows struct {
	// bundle is the newest trust bundle. A backup has it, too.
	bundle   protocol.Bundle
	nodes    []nodeRow
	books    *books.Books
	reserved []reservation
}

type nodeRow struct {
	i                      int
	id                     string
	self                   protocol.NodeIdentity
	accelerators           []string
	cpuMillis, memoryBytes int64
	gpus, claims           map[string]string
	members                []*memberRow
	rev                    int64
	head                   head

	incarnation                       string
	acceptedEpoch, acceptedGeneration uint64
	sessionNo                         uint64
	newestReport                      lifecycle.ReportNo
	marks                             map[string]*mark
	// awaitsResync is set from a restore until the node has uploaded its state.
	awaitsResync bool
	// usageOwed is the segment of usageOwedIn up to which a restored hub must post usage before the node's silence about
	// a member proves anything.
	usageOwed   uint64
	usageOwedIn string
}

// head is the newest signed state of a node.
type head struct {
	epoch, generation uint64
	keyID             string
	rev               int64
	digest            [sha256.Size]byte
	envelope          *protocol.Envelope
	refs              []*protocol.PartRef
	parts             [][]byte
}

func (h *head) version() plan.StateVersion {
	return plan.StateVersion{Epoch: h.epoch, Generation: h.generation, SHA256: h.digest[:]}
}

// held is the state that the node has said that it holds.
func (s *session) held() plan.StateVersion {
	return plan.StateVersion{Epoch: s.epoch, Generation: s.generation, SHA256: s.digest[:]}
}

// memberRow is an instance with its one member, its allocation and what the oracle has checked of its bill.
type memberRow struct {
	node                     int
	id, instance, allocation string
	org                      int
	services                 []*protocol.Service
	cpuMillis, memoryBytes   int64
	accelerators             []string
	revision                 uint64
	lifecycle.Placed
	life lifecycle.Lifecycle
	// worked: some revision was running once.
	worked bool
	// renewFailures counts renewals in a row that the wallet did not cover.
	renewFailures int64
	settled       bool
	audit         audit
	// versions are nil in worlds without them.
	versions *versions
}

const (
	largeWallet = 1_000_000_000_000_000
	smallWallet = 30_000_000_000
	orgs        = 8
)

func newHub(w *World) *hub {
	h := &hub{
		w: w, up: true, signer: protocol.NewEd25519Signer(keyOf(protocol.RoleState)),
		leaseSigner: protocol.NewEd25519Signer(keyOf(protocol.RoleLease)), lost: map[int]head{},
	}
	h.rows.books, h.rows.bundle = newBooks(w), newBundle()
	for o := range orgs {
		nanos := int64(largeWallet)
		if lowFunds(o) {
			nanos = smallWallet
		}
		h.booked(h.rows.books.Grant(strconv.Itoa(o), nanos))
	}
	return h
}

// lowFunds reports whether an org runs out of money now and then.
func lowFunds(org int) bool { return org == 0 }

func (r *rows) enroll(n *node) {
	n.store.Bundle = r.bundle
	r.nodes = append(r.nodes, nodeRow{
		i: n.i, id: n.id, self: n.self, accelerators: n.accelerators, cpuMillis: 16_000, memoryBytes: 64 << 30,
		claims: map[string]string{}, gpus: n.gpus,
		marks: map[string]*mark{}, rev: 1,
	})
	n.w.hub.sessions = append(n.w.hub.sessions, nil)
}

// clone copies the rows; the copy shares nothing that changes.
func (r *rows) clone() *rows {
	c := *r
	c.books, c.nodes = r.books.Clone(), slices.Clone(r.nodes)
	c.reserved = slices.Clone(r.reserved)
	for i := range c.nodes {
		n := &c.nodes[i]
		n.claims = maps.Clone(n.claims)
		n.members = slices.Clone(n.members)
		for j, m := range n.members {
			copied := *m
			copied.audit.seen = slices.Clone(m.audit.seen)
			copied.versions = m.versions.clone()
			n.members[j] = &copied
		}
		marks := make(map[string]*mark, len(n.marks))
		for name, m := range n.marks {
			copied := *m
			copied.ahead = maps.Clone(m.ahead)
			marks[name] = &copied
		}
		n.marks = marks
	}
	return &c
}

func (r *nodeRow) mark(incarnation string) *mark {
	m := r.marks[incarnation]
	if m == nil {
		m = &mark{ahead: map[uint64]usagechain.Link{}}
		r.marks[incarnation] = m
	}
	return m
}

func (r *nodeRow) member(id string) *memberRow {
	if i := slices.IndexFunc(r.members, func(m *memberRow) bool { return m.id == id }); i >= 0 {
		return r.members[i]
	}
	return nil
}

// behind reports whether a restored hub still lacks state or usage of the node.
func (r *nodeRow) behind() bool {
	return r.awaitsResync || r.usageOwedIn != "" && r.mark(r.usageOwedIn).Number < r.usageOwed
}

func (r *nodeRow) part(sum [sha256.Size]byte) []byte {
	for i, ref := range r.head.refs {
		if bytes.Equal(ref.GetSha256(), sum[:]) {
			return r.head.parts[i]
		}
	}
	return nil
}

func (r *nodeRow) free(m *memberRow) {
	maps.DeleteFunc(r.claims, func(_, member string) bool { return member == m.id })
}

// candidate returns the node with its free capacity.
func (r *nodeRow) candidate(usable bool, accelerators []plan.Accelerator) plan.Candidate {
	candidate := plan.Candidate{
		ID: strconv.Itoa(r.i), Usable: usable && !r.awaitsResync, CPUMillis: r.cpuMillis,
		MemoryBytes: r.memoryBytes, Accelerators: accelerators,
	}
	for _, m := range r.members {
		if !m.Gone {
			candidate.CPUMillis -= m.cpuMillis
			candidate.MemoryBytes -= m.memoryBytes
		}
	}
	return candidate
}

// create places an instance on the candidate that fits best, and opens its lease.
func (h *hub) create(candidates []int, org int, need plan.Need, services int) *memberRow {
	var free []plan.Candidate
	for _, i := range candidates {
		row := &h.rows.nodes[i]
		free = append(free, row.candidate(h.sessions[i] != nil, row.unclaimed(org, h.w.breaks(BreakOrgs))))
	}
	choices := plan.Fitting(need, free)
	if len(choices) == 0 {
		return nil
	}
	i, _ := strconv.Atoi(choices[0].ID)
	row := &h.rows.nodes[i]
	h.made++
	m := &memberRow{
		node: i, id: fmt.Sprintf("member-%06d", h.made), instance: fmt.Sprintf("instance-%06d", h.made),
		allocation: fmt.Sprintf("allocation-%06d", h.made),
		org:        org, cpuMillis: need.CPUMillis, memoryBytes: need.MemoryBytes, accelerators: choices[0].AcceleratorIDs,
		revision: 1,
	}
	m.begin(lifecycle.Lifecycle{Status: lifecycle.Requested, Health: lifecycle.HealthUnknown})
	m.services = servicesOf(m, services)
	h.openMember(m, h.w.now.time())
	if !h.issueLease(m) {
		h.rows.books.Discard(m.id)
		return nil
	}
	for _, id := range m.accelerators {
		h.w.oracle.claimed(h.w.nodes[i], m, id)
		row.claims[id] = m.id
	}
	row.members = append(row.members, m)
	h.touch(i)
	return m
}

// servicesOf lowers a member at its revision: the variant stands for the digest of the whole spec.
func servicesOf(m *memberRow, count int) []*protocol.Service {
	var out []*protocol.Service
	for k := range count {
		image := sha256.Sum256(fmt.Appendf(nil, "image %d", int(m.revision)%3))
		s := &protocol.Service{
			Name: fmt.Sprintf("service-%d", k), Image: fmt.Sprintf("apps/app/image@sha256:%x", image),
			ImageVariant: fmt.Sprintf("%s/%d/%d", m.id, m.revision, k),
			Resources: &protocol.Resources{
				CpuMillis:   uint32(m.cpuMillis) / uint32(count),
				MemoryBytes: uint64(m.memoryBytes) / uint64(count),
			}, StopGraceSeconds: 5,
		}
		if k == 0 {
			s.Resources.AcceleratorIds, s.Resources.AcceleratorSharing = m.accelerators, sharingOf(m.accelerators)
		}
		s.StartFirst = len(s.Resources.AcceleratorIds) == 0 && m.revision%3 != 0
		s.Recreate = s.StartFirst && m.revision%5 == 0
		out = append(out, s)
	}
	return out
}

// begin sets the lifecycle of a member that no node has reported.
func (m *memberRow) begin(l lifecycle.Lifecycle) {
	m.life, m.Desired, m.Status = l, true, protocol.WorkloadStatus_PENDING
}

// decommission asks for the member's end.
func (h *hub) decommission(m *memberRow) error {
	next, _, err := lifecycle.Decommission(m.life)
	if err == nil {
		m.life = next
	}
	m.Desired, _ = m.life.Status.Desired()
	return err
}

// stop ends the member's containers.
func (h *hub) stop(m *memberRow) error {
	next, _, err := lifecycle.Stop(m.life)
	if err == nil {
		m.life = next
	}
	return err
}

// restart runs a stopped or failed member again, under another revision: its earlier failures do not count.
func (h *hub) restart(m *memberRow) error {
	next, _, err := lifecycle.Start(m.life, m.history())
	if err == nil {
		m.life = next
		m.nextRevision(h.w.now.time())
	}
	return err
}

// stopped reports whether the node is to hold the member without its containers.
func (m *memberRow) stopped() bool {
	_, stopped := m.life.Status.Desired()
	return stopped
}

// touch notes that the intent of a node has changed and schedules its sync.
func (h *hub) touch(i int) {
	h.rows.nodes[i].rev++
	h.w.after(h.w.upTo(second/50), -1, "poke", func() { h.sync(i, 0) })
}

// sync compiles a node's newest state and sends the documents that the node lacks.
func (h *hub) sync(i int, floor uint64) {
	row := &h.rows.nodes[i]
	if !h.up || row.awaitsResync {
		return
	}
	s := h.sessions[i]
	held := plan.StateVersion{}
	if s != nil {
		held = s.held()
	}
	accepted := plan.StateVersion{Epoch: row.acceptedEpoch, Generation: row.acceptedGeneration}
	floor = row.head.version().LowestGeneration(h.rows.bundle.Epoch(), accepted, held, floor)
	if row.head.rev != row.rev || row.head.generation < floor || h.outdated(row.head) {
		h.publish(row, floor)
	}
	if s == nil {
		return
	}
	h.push(row, s)
}

// outdated reports whether there is no state, or one that the newest bundle no longer vouches for.
func (h *hub) outdated(s head) bool {
	return s.generation == 0 || s.epoch != h.rows.bundle.Epoch() || s.keyID != h.signer.KeyID()
}

// publish compiles, checks, signs and saves the newest state of a node.
func (h *hub) publish(row *nodeRow, floor uint64) {
	snap := row.snapshot()
	state, err := plan.Compile(snap)
	if err != nil {
		h.w.fail(14, "compile %s: %v", row.id, err)
		return
	}
	if err := plan.Check(snap, state); err != nil {
		h.w.fail(14, "check %s: %v", row.id, err)
		return
	}
	refs := state.Refs()
	same := slices.EqualFunc(refs, row.head.refs, func(a, b *protocol.PartRef) bool { return proto.Equal(a, b) })
	if !same || row.head.generation < floor || h.outdated(row.head) {
		epoch := h.rows.bundle.Epoch()
		next := head{
			epoch: epoch, generation: row.head.version().NextGeneration(epoch, floor), keyID: h.signer.KeyID(), refs: refs,
		}
		for _, p := range state.Parts {
			next.parts = append(next.parts, p.Bytes)
		}
		next.envelope, err = protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
			NodeId: row.id, NodeKeySha256: row.self.KeySHA256[:], Epoch: epoch, Generation: next.generation,
			IssuedAt:         timestamppb.New(h.w.now.time()),
			MinBundleVersion: h.rows.bundle.Version(), Parts: refs,
		}, h.signer)
		if err != nil {
			h.w.fail(2, "sign: %v", err)
			return
		}
		next.digest = sha256.Sum256(next.envelope.GetPayload())
		row.head = next
		h.w.oracle.signed(next)
		h.w.result.States++
		h.w.trace("signed", row.i, int64(next.generation), "")
	}
	row.head.rev = row.rev
	for _, m := range row.members {
		if !m.Desired && !m.Gone && m.AbsentGeneration == 0 {
			m.AbsentEpoch, m.AbsentGeneration = row.head.epoch, row.head.generation
		}
	}
}

func (r *nodeRow) snapshot() plan.Snapshot {
	snap := plan.Snapshot{Node: plan.Node{ID: r.id, AcceleratorIDs: r.accelerators, OneOrg: r.gpus}}
	for _, m := range r.members {
		if m.Gone {
			continue
		}
		claimed := slices.DeleteFunc(slices.Clone(m.accelerators), func(id string) bool { return r.claims[id] != m.id })
		snap.Allocations = append(snap.Allocations, plan.Allocation{
			ID: m.allocation, NodeID: r.id, OrgID: strconv.Itoa(m.org), ProjectID: "project", CPUMillis: m.cpuMillis,
			MemoryBytes: m.memoryBytes, AcceleratorIDs: claimed,
		})
		if m.Desired {
			snap.Members = append(snap.Members, m.compile(plan.Member{
				ID: m.id, InstanceID: m.instance, AllocationID: m.allocation, OrgID: strconv.Itoa(m.org), ProjectID: "project",
				Revision:         m.revision,
				ManifestEnvelope: manifestEnvelope(), Services: m.services, Stopped: m.stopped(),
			}))
		}
	}
	return snap
}

func manifestEnvelope() []byte {
	raw, _ := proto.Marshal(&protocol.Envelope{
		PayloadType: protocol.PayloadManifest, Payload: []byte("m"),
		Signatures: []*protocol.Signature{{KeyId: "k", Signature: []byte("s")}},
	})
	return raw
}

// push sends the state and the leases that the node does not hold, after the trust bundle that vouches for them.
func (h *hub) push(row *nodeRow, s *session) {
	u, attempt := &h.w.nodes[row.i].up, s.attempt
	var bundle *protocol.Envelope
	if s.bundle < h.rows.bundle.Version() {
		bundle = h.rows.bundle.Envelope()
	}
	if !row.head.version().Equal(s.held()) {
		env, parts := row.head.envelope, row.head.parts
		if h.w.chance(0.1) {
			parts = nil // as if too large: the node fetches them
		}
		u.carry(false, "state", func() {
			u.pushedBundle(attempt, bundle)
			u.pushedState(attempt, env, parts)
		})
	}
	var content []byte
	for _, m := range row.members {
		if l := h.rows.books.Lease(m.id); l.No > 0 && h.rows.books.IsOpen(m.id) {
			content = append(append(content, m.id...), '/')
			content = append(strconv.AppendInt(content, l.No, 10), ' ')
		}
	}
	if len(content) == 0 || string(content) == s.leases {
		return
	}
	s.leases = string(content)
	batch := &protocol.LeaseBatch{
		NodeId: row.id, Incarnation: s.incarnation, Epoch: h.rows.bundle.Epoch(),
		IssuedAt: timestamppb.New(h.w.now.time()),
	}
	for _, m := range row.members {
		if l := h.rows.books.Lease(m.id); l.No > 0 && h.rows.books.IsOpen(m.id) {
			batch.Leases = append(batch.Leases, l.Message())
		}
	}
	env, err := protocol.SignMessage(protocol.PayloadLeases, batch, h.leaseSigner)
	if err != nil {
		h.w.fail(3, "sign leases: %v", err)
		return
	}
	u.carry(false, "leases", func() {
		u.pushedBundle(attempt, bundle)
		u.pushedLeases(env)
	})
}
