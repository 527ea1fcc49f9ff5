package meter

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/protocol"
)

// cutMembers cuts all intervals of the given members, earliest first. Cutting a member's intervals together makes its
// running time one line without gap or overlap, however its containers' lives cross.
func (s *State) cutMembers(ids []string) []*protocol.UsageRecord {
	var due []*Interval
	for i := range s.Intervals {
		if slices.Contains(ids, s.Intervals[i].MemberID) {
			due = append(due, &s.Intervals[i])
		}
	}
	slices.SortStableFunc(due, func(a, b *Interval) int { return a.CutAt.Compare(b.CutAt) })
	var records []*protocol.UsageRecord
	for _, iv := range due {
		records = append(records, s.cut(iv)...)
	}
	return records
}

func (s *State) cut(iv *Interval) []*protocol.UsageRecord {
	if !iv.Until.After(iv.CutAt) {
		return nil
	}
	record := func(meter string, from, to time.Time, quantity int64) *protocol.UsageRecord {
		return &protocol.UsageRecord{
			MemberId: iv.MemberID, Revision: iv.Revision, LeaseNo: iv.LeaseNo, RunId: iv.RunID, Meter: meter, Quantity: quantity,
			StartedAt: timestamppb.New(from), EndedAt: timestamppb.New(to),
		}
	}
	records := make([]*protocol.UsageRecord, 0, 4)
	m := s.memberRecord(iv)
	if from, to := clock.Later(iv.CutAt, m.Until), s.sessionUntil(iv); to.After(from) {
		records = append(records, record(protocol.MeterSessionSeconds, from, to, to.Sub(from).Microseconds()))
		m.Until = to
	}
	if from := clock.Later(iv.CutAt, m.AcceleratorsUntil); iv.Accelerators > 0 && iv.Until.After(from) {
		records = append(records, record(protocol.MeterAcceleratorSeconds, from, iv.Until,
			iv.Accelerators*iv.Until.Sub(from).Microseconds()))
		m.AcceleratorsUntil = iv.Until
	}
	records = append(records,
		record(protocol.MeterCPUSeconds, iv.CutAt, iv.Until, iv.CPUMicros-iv.CPUCutMicros),
		record(protocol.MeterMemoryByteSeconds, iv.CutAt, iv.Until, iv.MemoryByteSeconds))
	iv.CutAt, iv.CPUCutMicros, iv.MemoryByteSeconds = iv.Until, iv.CPUMicros, 0
	return records
}

// sessionUntil is up to when a container's interval counts as running time of its member. A record may not come before
// one that is made already; so what another container ran beside one that has ended, and no scan has confirmed yet, is
// left to the other's record.
func (s *State) sessionUntil(iv *Interval) time.Time {
	until := iv.Until
	for _, o := range s.Intervals {
		beside := iv.ended && o.MemberID == iv.MemberID && !o.ended && !o.SeenAt.Before(iv.Until)
		if beside && !o.Unconfirmed.At.IsZero() && o.Until.Before(until) {
			until = o.Until
		}
	}
	return until
}

func (s *State) memberRecord(iv *Interval) *Member {
	m := s.member(iv.MemberID)
	if m == nil {
		at, _ := slices.BinarySearchFunc(s.Members, iv.MemberID, Member.compare)
		s.Members = slices.Insert(s.Members, at, Member{ID: iv.MemberID})
		m = &s.Members[at]
	}
	m.Revision, m.LeaseNo = max(m.Revision, iv.Revision), max(m.LeaseNo, iv.LeaseNo)
	return m
}
