package sim

import (
	"crypto/sha256"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// Hub is the simulation's hub with one node and without a world: hub/internal/nodes's tests run it beside the product's
// service.
type Hub struct {
	h       *hub
	attempt int
}

// Hello is what a node says of its store.
type Hello struct {
	Incarnation                    string
	Epoch, Generation, LastSegment uint64
	Digest                         [sha256.Size]byte
}

// Welcome is the hub's answer.
type Welcome struct {
	SessionNo                    uint64
	NewIncarnation, UploadWanted bool
	Posted, Archived             uint64
	PostedSHA256                 string
}

// UsageAck is the answer to a segment. New is false for one that is refused or was posted before.
type UsageAck struct {
	Refused          protocol.Nack_Reason
	New, SetAside    bool
	Posted, Archived uint64
	PostedSHA256     string
}

// NodeRow is what the hub's tables say of its node.
type NodeRow struct {
	Incarnation                  string
	Epoch, Generation, SessionNo uint64
	// AwaitsResync: the node has not uploaded its state since the restore. OwesUsage: its silence about a member proves
	// nothing.
	AwaitsResync, OwesUsage bool
	Chains                  map[string]Chain
}

// Chain is what is posted of one store.
type Chain struct {
	usagechain.Watermark
	Archived uint64
	Ahead    map[uint64]usagechain.Link
}

// NewHub returns a hub with an enrolled node.
func NewHub(nodeID string) *Hub {
	w := &World{rng: rand.New(rand.NewPCG(1, 1)), digest: newDigest}
	w.oracle, w.hub = newOracle(w), newHub(w)
	n := newNode(w, 0)
	w.nodes, n.id, n.up.n = []*node{n}, nodeID, n
	w.hub.rows.enroll(n)
	return &Hub{h: w.hub}
}

// Hello opens a session, which replaces the one before it.
func (x *Hub) Hello(g Hello) Welcome {
	x.attempt++
	a := x.h.openSession(0, x.attempt, helloMessage{
		incarnation: g.Incarnation, bundle: x.h.rows.bundle.Version(), epoch: g.Epoch, generation: g.Generation,
		digest: g.Digest, lastSegment: g.LastSegment,
	})
	return Welcome{
		SessionNo: a.no, NewIncarnation: a.newIncarnation, UploadWanted: a.requestUpload, Posted: a.posted,
		Archived: a.archived, PostedSHA256: string(a.postedSHA256),
	}
}

// Usage posts a segment that came in the newest session.
func (x *Hub) Usage(seg *protocol.UsageSegment, payload []byte) UsageAck {
	w, before := x.h.w, x.h.w.result.Segments
	a := x.h.post(0, x.attempt, spool.Sealed{Segment: seg, Payload: payload})
	out := UsageAck{
		Refused: a.refused, New: w.result.Segments > before, SetAside: w.broken != nil, Posted: a.posted,
		Archived: a.archived, PostedSHA256: string(a.postedSHA256),
	}
	w.broken = nil // in a world it breaks a law
	return out
}

// Accepted notes that the node has accepted a state.
func (x *Hub) Accepted(epoch, generation uint64) {
	x.h.accepted(0, x.attempt, epoch, generation, [32]byte{})
}

// Backup takes a verified backup.
func (x *Hub) Backup() { x.h.takeBackup(true) }

// Restore goes back to the last backup.
func (x *Hub) Restore() { x.h.restore() }

// UploadNothing ends the state upload of a node that has accepted no state.
func (x *Hub) UploadNothing() { x.h.uploaded(0, x.attempt, stateUpload{}) }

// Row is what the tables say.
func (x *Hub) Row() NodeRow {
	row := &x.h.rows.nodes[0]
	out := NodeRow{
		Incarnation: row.incarnation, Epoch: row.acceptedEpoch, Generation: row.acceptedGeneration,
		SessionNo: row.sessionNo, AwaitsResync: row.awaitsResync, OwesUsage: row.behind(), Chains: map[string]Chain{},
	}
	for name, m := range row.marks {
		if m.Number > 0 || len(m.ahead) > 0 {
			out.Chains[name] = Chain{Watermark: m.Watermark, Archived: m.archived, Ahead: m.ahead}
		}
	}
	return out
}

// MemberRow is what the hub's tables say of a member and its instance.
type MemberRow struct {
	Instance  lifecycle.Lifecycle
	Revision  uint64
	Status    protocol.WorkloadStatus_Status
	Reason    protocol.WorkloadStatus_Reason
	Observed  int64
	Confirmed bool
	Gone      bool
	// AbsentGeneration is of the first state without the member.
	AbsentGeneration uint64
	// HoldsRoom: what it uses of its allocation is not free.
	HoldsRoom bool
}

// Launch creates an instance, whose member it returns.
func (x *Hub) Launch() (member string) {
	m := x.h.create([]int{0}, 1, plan.Need{CPUMillis: 100, MemoryBytes: 64 << 20}, 1)
	x.h.w.oracle.asked(m, 0)
	x.h.sync(0, 0)
	return m.id
}

// Decommission asks for the member's end, as a user does.
func (x *Hub) Decommission(member string) error { return x.act(member, x.h.decommission) }

// Stop ends the member's containers.
func (x *Hub) Stop(member string) error { return x.act(member, x.h.stop) }

// Start runs them again.
func (x *Hub) Start(member string) error { return x.act(member, x.h.restart) }

func (x *Hub) act(member string, do func(*memberRow) error) error {
	err := do(x.h.rows.nodes[0].member(member))
	if err == nil {
		x.h.touch(0)
		x.h.sync(0, 0)
	}
	return err
}

// Report applies a report of the newest session.
func (x *Hub) Report(counter, generation uint64, statuses []*protocol.WorkloadStatus) {
	x.h.report(0, x.attempt, statusReport{
		no: x.h.sessions[0].no, counter: counter, epoch: x.h.rows.bundle.Epoch(), generation: generation, statuses: statuses,
	})
}

// Advance lets time pass.
func (x *Hub) Advance(by time.Duration) { x.h.w.now += span(by) }

// Epoch is of the newest state.
func (x *Hub) Epoch() uint64 { return x.h.rows.nodes[0].head.epoch }

// Generation is of the newest state.
func (x *Hub) Generation() uint64 { return x.h.rows.nodes[0].head.generation }

// Member is what the tables say of a member.
func (x *Hub) Member(id string) MemberRow {
	row := &x.h.rows.nodes[0]
	m := row.member(id)
	return MemberRow{
		Instance: m.life, Revision: m.revision, Status: m.Status, Reason: m.Reason, Observed: m.ObservedRevision,
		Confirmed: m.FailureConfirmed, Gone: m.Gone, AbsentGeneration: m.AbsentGeneration, HoldsRoom: !m.Gone,
	}
}

// Upload is what a node that holds the newest state and leases uploads to a restored hub.
type Upload struct{ up stateUpload }

// Newest makes the upload of a node that lacks nothing.
func (x *Hub) Newest() (Upload, error) {
	row := &x.h.rows.nodes[0]
	up := stateUpload{digest: row.head.digest, envelope: row.head.envelope, state: &protocol.DesiredState{}}
	if err := proto.Unmarshal(up.envelope.GetPayload(), up.state); err != nil {
		return Upload{}, err
	}
	for _, raw := range row.head.parts {
		w := &protocol.Workload{}
		if err := proto.Unmarshal(raw, w); err != nil {
			return Upload{}, err
		}
		up.parts = append(up.parts, w)
	}
	for _, m := range row.members {
		if l := x.h.rows.books.Lease(m.id); l.No > 0 && x.h.rows.books.IsOpen(m.id) {
			up.leases = append(up.leases, l.Message())
		}
	}
	return Upload{up}, nil
}

// UploadState ends the state upload of a node.
func (x *Hub) UploadState(u Upload) { x.h.uploaded(0, x.attempt, u.up) }

// Knows reports whether the tables have the member.
func (x *Hub) Knows(member string) bool { return x.h.rows.nodes[0].member(member) != nil }
