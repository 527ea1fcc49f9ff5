// Package nodestore is a node's store in memory: it keeps in maps what agent/internal/state keeps in Badger, and calls
// agent/spool and agent/meter for every decision. It is the disk of the simulation's nodes; the store's own tests
// compare it with Badger. It has no full disk, no reserve file, no admission decisions and no host ports.
package nodestore

import (
	"crypto/sha256"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// Store is what a node has on disk. Each method is one synced write: it happened or it did not.
type Store struct {
	// Bundle is the newest accepted trust bundle.
	Bundle protocol.Bundle
	// State, Envelope and Digest are of the accepted desired state; zero before the first.
	State    *protocol.DesiredState
	Envelope *protocol.Envelope
	Digest   Sum
	Parts    map[Sum]Part
	Leases   map[string]*protocol.Lease
	// batches are those that leases are from, in the order of acceptance; leaseFrom says which one, by member.
	batches   []*protocol.LeaseBatch
	leaseFrom map[string]*protocol.LeaseBatch
	Members   map[string]Member
	Runs      map[string]agent.Run
	// Consumed is what members have used, in base units by meter.
	Consumed map[string]map[string]int64
	Meter    meter.State
	Chain    spool.Chain
	Marks    spool.Marks
	// Segments are those that the hub has not archived, by number; UnsentBytes is the size of those not posted.
	Segments    map[uint64]spool.Sealed
	UnsentBytes int64
	Stamp       clock.Stamp
	// MaxUnsentBytes makes the spool full.
	MaxUnsentBytes int64
	// AnyOrder accepts states out of order: a rule that a test leaves out.
	AnyOrder bool
}

// Sum names a document.
type Sum = [sha256.Size]byte

// Part is a document of the accepted state, as it was signed and as agent.Diff takes it.
type Part struct {
	Document *protocol.Workload
	workload agent.Workload
}

// Member is what the store keeps of a member.
type Member struct {
	agent.Member
	// Reported says that the hub has acknowledged the proof of removal.
	Reported bool
}

// New is an empty store.
func New(nodeID, incarnation string) *Store {
	return &Store{
		Parts: map[Sum]Part{}, Leases: map[string]*protocol.Lease{},
		Members: map[string]Member{}, Runs: map[string]agent.Run{},
		Consumed: map[string]map[string]int64{}, Segments: map[uint64]spool.Sealed{},
		leaseFrom:      map[string]*protocol.LeaseBatch{},
		Chain:          spool.Chain{NodeID: nodeID, Incarnation: incarnation},
		MaxUnsentBytes: spool.MaxUnsentBytes,
	}
}

// Clone is the disk as an image of it would be. What is pointed to never changes.
func (s *Store) Clone() *Store {
	c := *s
	c.Parts, c.Leases, c.Members = maps.Clone(s.Parts), maps.Clone(s.Leases), maps.Clone(s.Members)
	c.Runs, c.Segments, c.Consumed = maps.Clone(s.Runs), maps.Clone(s.Segments), map[string]map[string]int64{}
	c.batches, c.leaseFrom = slices.Clone(s.batches), maps.Clone(s.leaseFrom)
	for id, totals := range s.Consumed {
		c.Consumed[id] = maps.Clone(totals)
	}
	return &c
}

// Incarnation names this store's life.
func (s *Store) Incarnation() string { return s.Chain.Incarnation }

// UpdateMember changes a member, or adds an unknown one.
func (s *Store) UpdateMember(id string, change func(*Member)) {
	m := s.Members[id]
	m.ID = id
	change(&m)
	s.Members[id] = m
}

// OpenRunIfDesired stores a run and opens its usage interval, if the accepted state contains it.
func (s *Store) OpenRunIfDesired(r agent.Run) (desired bool) {
	for _, ref := range s.State.GetParts() {
		w := s.Parts[Sum(ref.GetSha256())].workload
		var back uint64
		if w.Fallback != nil {
			back = w.Fallback.Revision
		}
		desired = desired || ref.GetId() == r.MemberID && !w.Stopped &&
			s.Members[r.MemberID].MayStart(r.Revision, w.Revision, back)
	}
	if desired {
		s.Runs[r.ID] = r
		s.Meter = meter.Open(s.Meter, meter.Intent{
			RunID: r.ID, MemberID: r.MemberID, Revision: r.Revision, LeaseNo: r.LeaseNo,
		}, r.OpenedAt)
	}
	return desired
}

// JournalRun adds an existing container that the journal does not know.
func (s *Store) JournalRun(r agent.Run) {
	if _, known := s.Runs[r.ID]; !known {
		s.Runs[r.ID] = r
	}
}

// UpdateRun changes a run in the journal; an unknown id changes nothing.
func (s *Store) UpdateRun(id string, change func(*agent.Run)) {
	if r, known := s.Runs[id]; known {
		change(&r)
		s.Runs[id] = r
	}
}

// CloseRun deletes a run, and the interval of a container that never ran.
func (s *Store) CloseRun(id string) {
	s.Meter = meter.Cancel(s.Meter, id)
	delete(s.Runs, id)
}

// SetClock stores a step of the clock: it is not billed, and the times in the journal move with it.
func (s *Store) SetClock(from time.Time, to clock.Stamp) error {
	leap := to.At.Sub(from)
	for id := range s.Runs {
		s.UpdateRun(id, func(r *agent.Run) { meter.MoveTimes(leap, &r.OpenedAt, &r.StartedAt, &r.ReadyAt, &r.ExitedAt) })
	}
	for id, m := range s.Members {
		if m.Removal == nil {
			s.UpdateMember(id, func(m *Member) { m.MoveTimes(leap) })
		}
	}
	metered, records := meter.ClockStep(s.Meter, from, to.At)
	s.Meter, s.Stamp = metered, to
	return s.seal(records, to.At)
}

// Desired is the accepted state as agent.Diff takes it.
func (s *Store) Desired() agent.Desired {
	d := agent.Desired{
		Epoch: s.State.GetEpoch(), Generation: s.State.GetGeneration(), Unverified: s.State == nil,
	}
	for _, ref := range s.State.GetParts() {
		sum := Sum(ref.GetSha256())
		if p, there := s.Parts[sum]; there {
			d.Workloads = append(d.Workloads, p.workload)
		} else {
			d.Missing = append(d.Missing, agent.MissingPart{MemberID: ref.GetId(), SHA256: sum})
		}
	}
	return d
}

// AgentLeases are the leases as agent.Diff takes them. Before the first batch each member may have one.
func (s *Store) AgentLeases() agent.Leases {
	out := make(agent.Leases, len(s.Leases))
	if len(s.batches) == 0 {
		for id := range s.Members {
			out[id] = agent.Lease{MemberID: id, Unverified: true}
		}
	}
	for id, l := range s.Leases {
		out[id] = agent.NewLease(l, s.Consumed[id])
	}
	return out
}
