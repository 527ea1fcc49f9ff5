package nodestore

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// seal puts records into the chain and adds them to what members have consumed.
func (s *Store) seal(records []*protocol.UsageRecord, now time.Time) error {
	for _, r := range records {
		totals := s.Consumed[r.GetMemberId()]
		if totals == nil {
			totals = map[string]int64{}
			s.Consumed[r.GetMemberId()] = totals
		}
		totals[r.GetMeter()] += r.GetQuantity()
	}
	return s.sealOnly(records, now)
}

func (s *Store) sealOnly(records []*protocol.UsageRecord, now time.Time) error {
	for len(records) > 0 {
		sealed, chain, rest, err := spool.Seal(s.Chain, records, now)
		if err != nil {
			return err
		}
		s.Segments[sealed.Segment.GetNumber()] = sealed
		s.UnsentBytes += int64(len(sealed.Payload))
		s.Chain, records = chain, rest
	}
	return nil
}

// SaveSample passes one observation of all containers to the meter and stores the result.
func (s *Store) SaveSample(o meter.Observation, at clock.Stamp) error {
	next, records := meter.Sample(s.Meter, o)
	s.Meter, s.Stamp = next, at
	return s.seal(records, o.At)
}

// Retire seals a removed member's last usage record and stores its proof. A member in the accepted state does not
// change, nor does one that is unknown or removed.
func (s *Store) Retire(memberID string, now time.Time) error {
	old, known := s.Members[memberID]
	named := slices.ContainsFunc(s.State.GetParts(), func(p *protocol.PartRef) bool { return p.GetId() == memberID })
	if !known || old.Removal != nil || named {
		return nil
	}
	next, records := meter.Close(s.Meter, memberID, now)
	s.Meter = next
	if err := s.seal(records, now); err != nil {
		return err
	}
	s.Members[memberID] = Member{Member: agent.Member{
		ID: memberID, InstanceID: old.InstanceID, CorrelationID: old.CorrelationID, ExitedAt: old.ExitedAt,
		ExitCode: old.ExitCode,
		Removal: &protocol.RemovalProof{
			At: timestamppb.New(now), Absent: protocol.RemovalKinds(), LastUsageSequence: s.Chain.Sequence,
			Incarnation: s.Incarnation(),
		},
	}}
	s.dropLease(memberID)
	return nil
}

// AcknowledgeRemovals marks the proofs of these members as reported.
func (s *Store) AcknowledgeRemovals(ids []string) {
	for _, id := range ids {
		if m, known := s.Members[id]; known && m.Removal != nil {
			m.Reported = true
			s.Members[id] = m
		}
	}
}

// AcknowledgeUsage applies the hub's progress and deletes archived segments.
func (s *Store) AcknowledgeUsage(said spool.HubProgress) error {
	var own []byte
	if sealed, kept := s.Segments[said.Posted]; kept {
		sum := sha256.Sum256(sealed.Payload)
		own = sum[:]
	}
	marks, err := spool.Acknowledge(s.Marks, s.Chain, said, own)
	if err != nil {
		return err
	}
	for number := s.Marks.Posted + 1; number <= marks.Posted; number++ {
		s.UnsentBytes -= int64(len(s.Segments[number].Payload))
	}
	for number := s.Marks.Archived + 1; number <= spool.PruneUpTo(marks); number++ {
		delete(s.Segments, number)
	}
	s.Marks = marks
	return nil
}

// RewindUsage goes back to where a restored hub is: later segments are sent again. It fails when some are deleted.
func (s *Store) RewindUsage(posted uint64) error {
	marks, err := spool.Rewind(s.Marks, posted)
	if err != nil {
		return err
	}
	s.Marks = marks
	s.UnsentBytes = 0
	for number := s.Marks.Posted + 1; number <= s.Chain.Number; number++ {
		s.UnsentBytes += int64(len(s.Segments[number].Payload))
	}
	return nil
}

// TakeNewIncarnation gives the store a new name. What is not archived is sealed again: the hub bills each stretch of
// time once.
func (s *Store) TakeNewIncarnation(incarnation string, now time.Time) error {
	var again []*protocol.UsageRecord
	for number := s.Marks.Archived + 1; number <= s.Chain.Number; number++ {
		sealed, there := s.Segments[number]
		if !there {
			return fmt.Errorf("segment %d is neither archived nor there", number)
		}
		again = append(again, spool.Unsealed(sealed.Segment)...)
	}
	s.Chain, s.Marks = spool.Reincarnate(s.Chain, incarnation), spool.Marks{}
	s.Segments, s.UnsentBytes = map[uint64]spool.Sealed{}, 0
	return s.sealOnly(again, now)
}
