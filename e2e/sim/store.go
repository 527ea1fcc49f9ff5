package sim

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// store is what a node has on disk. Each method is one synced write: it happened or it did not. It mirrors
// agent/internal/state.
type store struct {
	incarnation string
	state       *protocol.DesiredState
	envelope    *protocol.Envelope
	digest      [sha256.Size]byte
	parts       map[[sha256.Size]byte]*protocol.Workload
	leases      map[string]*protocol.Lease
	members     map[string]storedMember
	runs        map[string]storedRun
	consumed    map[string]map[string]int64
	meter       meter.State
	chain       spool.Chain
	marks       spool.Marks
	// digests are of the sealed segments that the hub has not archived, by number.
	segments map[uint64]spool.Sealed
	unsent   int64
	stamp    clock.Stamp
	// highest is what this lineage of the disk has applied; the checker's, not the agent's.
	highest appliedState
}

type appliedState struct {
	epoch, generation uint64
	digest            [sha256.Size]byte
}

type storedMember struct {
	agent.Member
	networkRevision uint64
	networkReady    bool
	reported        bool
}

type storedRun struct {
	id, memberID, instanceID, service string
	revision, leaseNo                 uint64
	openedAt, startedAt, readyAt      time.Time
	stopAsked, exitRecorded           bool
	exitedAt                          time.Time
	exitCode                          int32
}

func newStore(nodeID, incarnation string) *store {
	return &store{
		incarnation: incarnation, parts: map[[sha256.Size]byte]*protocol.Workload{}, leases: map[string]*protocol.Lease{},
		members: map[string]storedMember{}, runs: map[string]storedRun{}, consumed: map[string]map[string]int64{},
		segments: map[uint64]spool.Sealed{}, chain: spool.Chain{NodeID: nodeID, Incarnation: incarnation},
	}
}

// clone is the disk as an image of it would be. What is pointed to never changes.
func (s *store) clone() *store {
	c := *s
	c.parts, c.leases, c.members = maps.Clone(s.parts), maps.Clone(s.leases), maps.Clone(s.members)
	c.runs, c.segments, c.consumed = maps.Clone(s.runs), maps.Clone(s.segments), map[string]map[string]int64{}
	for id, totals := range s.consumed {
		c.consumed[id] = maps.Clone(totals)
	}
	return &c
}

func (s *store) accepted() (epoch, generation uint64) {
	return s.state.GetEpoch(), s.state.GetGeneration()
}

func (s *store) acceptState(v protocol.Verified[*protocol.DesiredState], rawParts [][]byte, anyOrder bool) error {
	next, digest := v.Message(), v.Digest()
	if s.state != nil && !anyOrder {
		switch {
		case next.GetEpoch() < s.state.GetEpoch():
			return protocol.Refuse(protocol.Nack_EPOCH_UNKNOWN, "epoch")
		case next.GetEpoch() > s.state.GetEpoch():
		case next.GetGeneration() < s.state.GetGeneration():
			return protocol.Refuse(protocol.Nack_GENERATION_OLDER, "generation %d", s.state.GetGeneration())
		case next.GetGeneration() == s.state.GetGeneration() && !bytes.Equal(digest[:], s.digest[:]):
			return protocol.Refuse(protocol.Nack_GENERATION_CONFLICT, "generation %d", s.state.GetGeneration())
		}
	}
	fresh := map[[sha256.Size]byte]*protocol.Workload{}
	for _, raw := range rawParts {
		w, err := protocol.VerifyPart(v, raw)
		if err != nil {
			return err
		}
		fresh[sha256.Sum256(raw)] = w
	}
	named := map[[sha256.Size]byte]bool{}
	for _, ref := range next.GetParts() {
		named[[sha256.Size]byte(ref.GetSha256())] = true
		if m, known := s.members[ref.GetId()]; !known || m.Removal != nil {
			s.members[ref.GetId()] = storedMember{Member: agent.Member{ID: ref.GetId()}}
		}
	}
	for sum, w := range fresh {
		s.parts[sum] = w
		m := s.members[w.GetId()]
		m.InstanceID, m.CorrelationID = w.GetInstanceId(), w.GetCorrelationId()
		s.members[w.GetId()] = m
	}
	maps.DeleteFunc(s.parts, func(sum [sha256.Size]byte, _ *protocol.Workload) bool { return !named[sum] })
	maps.DeleteFunc(s.leases, func(id string, _ *protocol.Lease) bool { _, known := s.members[id]; return !known })
	s.state, s.envelope, s.digest = next, v.Envelope(), digest
	return nil
}

func (s *store) acceptPart(raw []byte) bool {
	sum := sha256.Sum256(raw)
	for _, ref := range s.state.GetParts() {
		if [sha256.Size]byte(ref.GetSha256()) != sum {
			continue
		}
		w := &protocol.Workload{}
		if proto.Unmarshal(raw, w) != nil {
			return false
		}
		s.parts[sum] = w
		m := s.members[w.GetId()]
		m.ID, m.InstanceID = w.GetId(), w.GetInstanceId()
		s.members[w.GetId()] = m
		return true
	}
	return false
}

func (s *store) acceptLeases(batch *protocol.LeaseBatch) error {
	if batch.GetIncarnation() != s.incarnation {
		return protocol.Refuse(protocol.Nack_WRONG_NODE, "incarnation")
	}
	if spool.Full(s.unsent, spool.MaxUnsentBytes) {
		return protocol.Refuse(protocol.Nack_UNAVAILABLE, "spool full")
	}
	for _, l := range batch.GetLeases() {
		if l.GetLeaseNo() > s.leases[l.GetMemberId()].GetLeaseNo() {
			s.leases[l.GetMemberId()] = l
		}
	}
	return nil
}

// wants reports whether the accepted state wants the run at this very moment.
func (s *store) wants(memberID string, revision uint64) bool {
	for _, ref := range s.state.GetParts() {
		w := s.parts[[sha256.Size]byte(ref.GetSha256())]
		if ref.GetId() == memberID && w.GetRevision() == revision && !w.GetStopped() {
			return true
		}
	}
	return false
}

func (s *store) openRun(r storedRun, now time.Time) {
	r.openedAt = now
	s.runs[r.id] = r
	s.meter = meter.Open(s.meter, meter.Intent{
		RunID: r.id, MemberID: r.memberID, Revision: r.revision,
		LeaseNo: r.leaseNo,
	}, now)
}

func (s *store) updateRun(id string, change func(*storedRun)) {
	if r, known := s.runs[id]; known {
		change(&r)
		s.runs[id] = r
	}
}

func (s *store) closeRun(id string) {
	s.meter = meter.Cancel(s.meter, id)
	delete(s.runs, id)
}

func (s *store) updateMember(id string, change func(*storedMember)) {
	m := s.members[id]
	m.ID = id
	change(&m)
	s.members[id] = m
}

// seal puts records into the chain; it returns the numbers of the new segments.
func (s *store) seal(records []*protocol.UsageRecord, now time.Time) error {
	for _, r := range records {
		totals := s.consumed[r.GetMemberId()]
		if totals == nil {
			totals = map[string]int64{}
			s.consumed[r.GetMemberId()] = totals
		}
		totals[r.GetMeter()] += r.GetQuantity()
	}
	return s.sealOnly(records, now)
}

func (s *store) sealOnly(records []*protocol.UsageRecord, now time.Time) error {
	for len(records) > 0 {
		sealed, chain, rest, err := spool.Seal(s.chain, records, now)
		if err != nil {
			return err
		}
		s.segments[sealed.Segment.GetNumber()] = sealed
		s.unsent += int64(len(sealed.Payload))
		s.chain, records = chain, rest
	}
	return nil
}

func (s *store) saveSample(o meter.Observation, at clock.Stamp) error {
	next, records := meter.Sample(s.meter, o)
	s.meter, s.stamp = next, at
	return s.seal(records, o.At)
}

func (s *store) retire(memberID string, now time.Time) error {
	next, records := meter.Close(s.meter, memberID, now)
	s.meter = next
	if err := s.seal(records, now); err != nil {
		return err
	}
	old := s.members[memberID]
	s.members[memberID] = storedMember{Member: agent.Member{
		ID: memberID, InstanceID: old.InstanceID, CorrelationID: old.CorrelationID, ExitedAt: old.ExitedAt,
		ExitCode: old.ExitCode,
		Removal: &protocol.RemovalProof{
			At: timestamppb.New(now), Absent: protocol.RemovalKinds(), LastUsageSequence: s.chain.Sequence,
			Incarnation: s.incarnation,
		},
	}}
	delete(s.leases, memberID)
	return nil
}

// acknowledge takes in how far the hub has come and forgets what is archived.
func (s *store) acknowledge(said spool.HubProgress) error {
	var own []byte
	if sealed, kept := s.segments[said.Posted]; kept {
		sum := sha256.Sum256(sealed.Payload)
		own = sum[:]
	}
	marks, err := spool.Acknowledge(s.marks, s.chain, said, own)
	if err != nil {
		return err
	}
	for number := s.marks.Posted + 1; number <= marks.Posted; number++ {
		s.unsent -= int64(len(s.segments[number].Payload))
	}
	for number := s.marks.Archived + 1; number <= spool.PruneUpTo(marks); number++ {
		delete(s.segments, number)
	}
	s.marks = marks
	return nil
}

// rewind goes back to where a restored hub is: what it has forgotten is sent again. It fails when that was archived.
func (s *store) rewind(posted uint64) error {
	marks, err := spool.Rewind(s.marks, posted)
	if err != nil {
		return err
	}
	s.marks = marks
	s.unsent = 0
	for number := s.marks.Posted + 1; number <= s.chain.Number; number++ {
		s.unsent += int64(len(s.segments[number].Payload))
	}
	return nil
}

// reincarnate gives the store a new name. What is not archived is sealed again: the hub bills each stretch of time
// once.
func (s *store) reincarnate(incarnation string, now time.Time) error {
	var kept []*protocol.UsageSegment
	for number := s.marks.Archived + 1; number <= s.chain.Number; number++ {
		sealed, there := s.segments[number]
		if !there {
			return fmt.Errorf("segment %d is neither archived nor there", number)
		}
		kept = append(kept, sealed.Segment)
	}
	chain, records := spool.Reincarnate(s.chain, incarnation, s.marks, kept, nil)
	s.incarnation, s.chain, s.marks = incarnation, chain, spool.Marks{}
	s.segments, s.unsent = map[uint64]spool.Sealed{}, 0
	return s.sealOnly(records, now)
}

// agentLeases are the leases as Diff takes them.
func (s *store) agentLeases() agent.Leases {
	out := make(agent.Leases, len(s.leases))
	for id, l := range s.leases {
		out[id] = agent.NewLease(l, s.consumed[id])
	}
	return out
}

// desired is the accepted state as Diff takes it.
func (s *store) desired() agent.Desired {
	d := agent.Desired{Epoch: s.state.GetEpoch(), Generation: s.state.GetGeneration()}
	for _, ref := range s.state.GetParts() {
		sum := [sha256.Size]byte(ref.GetSha256())
		w, there := s.parts[sum]
		if !there {
			d.Missing = append(d.Missing, agent.MissingPart{MemberID: ref.GetId(), SHA256: sum})
			continue
		}
		out := agent.Workload{
			MemberID: ref.GetId(), InstanceID: w.GetInstanceId(), Revision: w.GetRevision(), CorrelationID: w.GetCorrelationId(),
			Stopped:          w.GetStopped(),
			ReadinessTimeout: time.Duration(w.GetReadinessTimeoutSeconds()) * time.Second,
		}
		for _, svc := range w.GetServices() {
			out.Services = append(out.Services, agent.Service{
				Name: svc.GetName(), Image: svc.GetImage(), SpecDigest: svc.GetImageVariant(), Spec: svc,
				StopGrace:      time.Duration(svc.GetStopGraceSeconds()) * time.Second,
				AcceleratorIDs: svc.GetResources().GetAcceleratorIds(),
			})
		}
		d.Workloads = append(d.Workloads, out)
	}
	return d
}
