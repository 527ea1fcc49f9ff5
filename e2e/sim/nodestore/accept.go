package nodestore

import (
	"bytes"
	"crypto/sha256"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// AcceptState stores a desired state with its documents. It refuses an older (epoch, generation), and other content
// under the same numbers.
func (s *Store) AcceptState(v protocol.Verified[*protocol.DesiredState], rawParts [][]byte) error {
	next, digest := v.Message(), v.Digest()
	if err := s.checkOrder(next, digest); err != nil && !s.AnyOrder {
		return err
	}
	fresh := map[Sum]*protocol.Workload{}
	for _, raw := range rawParts {
		w, err := protocol.VerifyPart(v, raw)
		if err != nil {
			return err
		}
		fresh[sha256.Sum256(raw)] = w
	}
	named := map[Sum]bool{}
	for _, ref := range next.GetParts() {
		named[Sum(ref.GetSha256())] = true
		if m, known := s.Members[ref.GetId()]; !known || m.Removal != nil {
			s.Members[ref.GetId()] = Member{Member: agent.Member{ID: ref.GetId()}}
		}
	}
	for sum, w := range fresh {
		s.keepPart(sum, w)
	}
	maps.DeleteFunc(s.Parts, func(sum Sum, _ Part) bool { return !named[sum] })
	for id := range s.Leases {
		if _, known := s.Members[id]; !known {
			s.dropLease(id)
		}
	}
	s.State, s.Envelope, s.Digest = next, v.Envelope(), digest
	return nil
}

func (s *Store) checkOrder(next *protocol.DesiredState, digest Sum) error {
	number, accepted := agent.NumberOf(next), agent.NumberOf(s.State)
	if err := number.CheckOrder(accepted); err != nil {
		return err
	}
	return number.CheckContent(accepted, digest == s.Digest)
}

// AcceptBundle stores the next trust bundle. The same bundle again changes nothing.
func (s *Store) AcceptBundle(env *protocol.Envelope) error {
	if bytes.Equal(env.GetPayload(), s.Bundle.Envelope().GetPayload()) {
		return nil
	}
	next, err := s.Bundle.Succeed(env)
	if err == nil {
		s.Bundle = next
	}
	return err
}

func (s *Store) keepPart(sum Sum, w *protocol.Workload) {
	p := Part{w, agent.NewWorkload(w.GetId(), w)}
	if back := w.GetFallback(); back != nil {
		fallback := agent.NewWorkload(w.GetId(), back)
		p.workload.Fallback = &fallback
	}
	s.Parts[sum] = p
	s.UpdateMember(w.GetId(), func(m *Member) {
		m.InstanceID, m.CorrelationID = w.GetInstanceId(), w.GetCorrelationId()
	})
}

// AcceptPart stores one document that the accepted state names, and refuses any other.
func (s *Store) AcceptPart(raw []byte) error {
	sum := Sum(sha256.Sum256(raw))
	for _, ref := range s.State.GetParts() {
		if Sum(ref.GetSha256()) != sum {
			continue
		}
		w := &protocol.Workload{}
		if protocol.Unmarshal(raw, w) != nil || w.GetId() != ref.GetId() {
			return protocol.Refuse(protocol.Nack_MALFORMED, "not the workload that its reference names")
		}
		s.keepPart(sum, w)
		return nil
	}
	return protocol.Refuse(protocol.Nack_UNKNOWN_PART, "the accepted state names no such part")
}

// AcceptLeases stores the leases of a batch that are newer than the stored ones. A full spool refuses the batch.
func (s *Store) AcceptLeases(batch *protocol.LeaseBatch) error {
	if batch.GetIncarnation() != s.Incarnation() {
		return protocol.Refuse(protocol.Nack_WRONG_NODE, "incarnation")
	}
	if spool.Full(s.UnsentBytes, s.MaxUnsentBytes) {
		return protocol.Refuse(protocol.Nack_UNAVAILABLE, "spool full")
	}
	if slices.ContainsFunc(batch.GetLeases(), func(l *protocol.Lease) bool {
		return l.GetLeaseNo() > s.Leases[l.GetMemberId()].GetLeaseNo()
	}) {
		s.addBatch(batch)
		s.batches = slices.DeleteFunc(append(s.batches, batch), s.isIdle)
	}
	return nil
}

// addBatch adds the leases of a batch that are newer than the stored ones. Equal leases count as from this batch, too.
func (s *Store) addBatch(batch *protocol.LeaseBatch) {
	for _, l := range batch.GetLeases() {
		held := s.Leases[l.GetMemberId()]
		if l.GetLeaseNo() > held.GetLeaseNo() || proto.Equal(l, held) {
			s.Leases[l.GetMemberId()], s.leaseFrom[l.GetMemberId()] = l, batch
		}
	}
}

func (s *Store) isIdle(batch *protocol.LeaseBatch) bool {
	return !slices.Contains(slices.Collect(maps.Values(s.leaseFrom)), batch)
}

func (s *Store) dropLease(memberID string) {
	delete(s.Leases, memberID)
	delete(s.leaseFrom, memberID)
}

// Reopen is what a start of the agent does: it derives the leases from their batches again. A lease that was dropped
// with its member is back while another lease of its batch is needed.
func (s *Store) Reopen() {
	s.Leases, s.leaseFrom = map[string]*protocol.Lease{}, map[string]*protocol.LeaseBatch{}
	for _, batch := range s.batches {
		s.addBatch(batch)
	}
	maps.DeleteFunc(s.Leases, func(id string, _ *protocol.Lease) bool { return s.Members[id].Removal != nil })
}
