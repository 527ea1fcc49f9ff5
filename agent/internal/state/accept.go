package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// Bundle is the present trust bundle; invalid before enrollment.
func (s *Store) Bundle() protocol.Bundle {
	return view(s, func(d *data) protocol.Bundle { return d.bundle() })
}

// Bundles are the trust bundles that were accepted, as far as they are kept; the present one is the last.
func (s *Store) Bundles() []protocol.Bundle {
	return view(s, func(d *data) []protocol.Bundle { return slices.Clone(d.bundles) })
}

func (d *data) bundle() protocol.Bundle {
	if len(d.bundles) == 0 {
		return protocol.Bundle{}
	}
	return d.bundles[len(d.bundles)-1]
}

// InitBundle stores the first trust bundle, which was verified by a fingerprint. Later bundles go through AcceptBundle.
func (s *Store) InitBundle(b protocol.Bundle) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !b.Valid() {
		return protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "the trust bundle was not verified")
	}
	if s.d.bundle().Valid() {
		return s.acceptBundle(b.Envelope())
	}
	if err := s.highest.Bundle(b.Version()); err != nil {
		return err
	}
	aside := s.d.asideKeys(BundleKey, preBundle)
	return s.write(func(w *batch) {
		w.delete(aside...)
		w.proto(bundleKey(b), b.Envelope())
	}, func(d *data) { d.bundles = []protocol.Bundle{b} })
}

// AcceptBundle stores the next trust bundle if it succeeds the present one. The same one again changes nothing.
func (s *Store) AcceptBundle(env *protocol.Envelope) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.acceptBundle(env)
}

func (s *Store) acceptBundle(env *protocol.Envelope) error {
	present := s.d.bundle()
	if present.Valid() && bytes.Equal(env.GetPayload(), present.Envelope().GetPayload()) {
		return nil
	}
	next, err := present.Succeed(env)
	if err != nil {
		return err
	}
	kept, dropped := compact(append(slices.Clone(s.d.bundles), next))
	err = s.release(func(w *batch) {
		w.proto(bundleKey(next), env)
		for _, b := range dropped {
			w.delete(bundleKey(b))
		}
	}, func(d *data) { d.bundles = kept })
	if err == nil {
		s.changed.Send()
	}
	return err
}

// compact drops the oldest bundles above MaxBundles. It keeps those that the chain from the first to the last bundle
// needs, because the root changed.
func compact(chain []protocol.Bundle) (kept, dropped []protocol.Bundle) {
	kept = chain
	for i := 1; len(kept) > MaxBundles && i < len(kept)-1; {
		if _, err := kept[i-1].Succeed(kept[i+1].Envelope()); err != nil {
			i++
			continue
		}
		dropped = append(dropped, kept[i])
		kept = slices.Delete(slices.Clone(kept), i, i+1)
	}
	return kept, dropped
}

// AcceptState stores a desired state with its documents and then wakes the subscribers. It refuses an older (epoch,
// generation), and other content under the same numbers. The same state again adds missing documents.
func (s *Store) AcceptState(v protocol.Verified[*protocol.DesiredState], rawParts [][]byte) error {
	if !v.OK() {
		return protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "the desired state was not verified")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	next := v.Message()
	if err := s.checkOrder(next, v.Envelope()); err != nil {
		return err
	}
	fresh := make(map[string]part)
	for _, raw := range rawParts {
		w, err := protocol.VerifyPart(v, raw)
		if err != nil {
			return err
		}
		fresh[hexSum(raw)] = part{raw, w}
	}
	if err := s.storeState(next, v.Envelope(), s.partsThatFit(fresh)); err != nil {
		return err
	}
	if s.unsaved || s.saved != s.highest {
		// It is in force, but a restart may lose it: the hub must not count it as stored, and sends it again.
		return protocol.Refuse(protocol.Nack_UNAVAILABLE, "the disk is full: the state is in force and could not be stored")
	}
	return nil
}

// partsThatFit drops documents that start a member when the disk is full; they count as missing and are fetched once
// there is space. The state itself and documents that stop a member are always stored.
func (s *Store) partsThatFit(fresh map[string]part) map[string]part {
	if s.checkSpace(acquiring, uint64(totalBytes(fresh))) == nil {
		return fresh
	}
	stopped := make(map[string]part)
	for sum, p := range fresh {
		if p.workload.GetStopped() {
			stopped[sum] = p
		}
	}
	return stopped
}

func (s *Store) checkOrder(next *protocol.DesiredState, env *protocol.Envelope) error {
	number := agent.NumberOf(next)
	if err := number.CheckOrder(s.highest.State); err != nil {
		return err
	}
	return number.CheckContent(agent.NumberOf(s.d.state), bytes.Equal(env.GetPayload(), s.d.stateEnv.GetPayload()))
}

// membersOf returns the digests that a state names, and the members that it adds or changes. Every member is stored: a
// member that leaves before it ever ran needs a proof of removal, too.
func (d *data) membersOf(next *protocol.DesiredState, fresh map[string]part) (map[string]bool, map[string]Member) {
	named := make(map[string]bool, len(next.GetParts()))
	members := make(map[string]Member)
	for _, ref := range next.GetParts() {
		named[hex.EncodeToString(ref.GetSha256())] = true
		if m, known := d.members[ref.GetId()]; !known || m.Removal != nil {
			members[ref.GetId()] = Member{Member: agent.Member{ID: ref.GetId()}}
		}
	}
	for sum, p := range fresh {
		m, changed := members[p.workload.GetId()]
		if !changed {
			m = d.members[p.workload.GetId()]
		}
		if named[sum] {
			m.InstanceID, m.CorrelationID = p.workload.GetInstanceId(), p.workload.GetCorrelationId()
			members[m.ID] = m
		}
	}
	return named, members
}

// leasesWithoutMember are the members of leases that neither the store nor the new state knows.
func (d *data) leasesWithoutMember(added map[string]Member) []string {
	var orphans []string
	for id := range d.leases {
		_, known := d.members[id]
		if _, isNew := added[id]; !known && !isNew {
			orphans = append(orphans, id)
		}
	}
	return orphans
}

func (s *Store) storeState(next *protocol.DesiredState, env *protocol.Envelope, fresh map[string]part) error {
	named, members := s.d.membersOf(next, fresh)
	var dropped []string
	for sum := range s.d.parts {
		if !named[sum] {
			dropped = append(dropped, sum)
		}
	}
	var aside []string
	// The present bundle has verified the state, so unverified earlier bundles can go.
	for _, key := range s.d.asideKeys(prePart, preBundle) {
		if sum, isPart := strings.CutPrefix(key, prePart); !isPart || !named[sum] {
			aside = append(aside, key)
		}
	}
	orphans := s.d.leasesWithoutMember(members)
	together := fresh
	if size := totalBytes(fresh); size > chunkBytes {
		// Before the state, in bounded pieces: a document that no state names has no effect.
		if err := s.writeParts(fresh); err != nil {
			return err
		}
		together = nil
	}
	err := s.release(func(b *batch) {
		b.proto(keyState, env)
		for sum, p := range together {
			b.raw(partKey(sum), p.raw)
		}
		for _, m := range members {
			b.json(preMember+m.ID, m)
		}
		for _, sum := range dropped {
			b.delete(partKey(sum))
		}
		b.delete(aside...)
	}, func(d *data) {
		d.state, d.stateEnv = next, env
		for sum, p := range fresh {
			d.parts[sum] = part{workload: p.workload}
		}
		maps.Copy(d.members, members)
		for _, sum := range dropped {
			delete(d.parts, sum)
			delete(d.admissions, sum)
		}
		for _, id := range orphans {
			delete(d.leases, id)
			delete(d.leaseFrom, id)
		}
	})
	if err == nil {
		failpoint.Hit("agent/accept/synced")
		s.changed.Send()
	}
	return err
}

func totalBytes(parts map[string]part) int {
	total := 0
	for _, p := range parts {
		total += len(p.raw)
	}
	return total
}

func (s *Store) writeParts(fresh map[string]part) error {
	b := &batch{}
	flush := func() error {
		err := s.release(func(w *batch) { *w = *b }, func(*data) {})
		b = &batch{}
		return err
	}
	for sum, p := range fresh {
		b.raw(partKey(sum), p.raw)
		if b.bytes < chunkBytes {
			continue
		}
		if err := flush(); err != nil {
			return err
		}
	}
	if len(b.sets) == 0 {
		return nil
	}
	return flush()
}

// AcceptPart stores one document that the accepted state names, and refuses any other.
func (s *Store) AcceptPart(raw []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(raw) > protocol.MaxWorkloadBytes {
		return protocol.Refuse(protocol.Nack_TOO_LARGE, "a part has over %d bytes", protocol.MaxWorkloadBytes)
	}
	sum := sha256.Sum256(raw)
	for _, ref := range s.d.state.GetParts() {
		if !bytes.Equal(ref.GetSha256(), sum[:]) {
			continue
		}
		w := &protocol.Workload{}
		if err := protocol.Unmarshal(raw, w); err != nil {
			return &protocol.RefusalError{Reason: protocol.Nack_MALFORMED, Detail: "a part cannot be read", Err: err}
		}
		if w.GetId() != ref.GetId() || w.GetFallback().GetFallback() != nil {
			return protocol.Refuse(protocol.Nack_MALFORMED, "a part is not the workload that its reference names")
		}
		m := s.d.members[w.GetId()]
		m.ID, m.InstanceID, m.CorrelationID = w.GetId(), w.GetInstanceId(), w.GetCorrelationId()
		key := hexSum(raw)
		kind := acquiring
		if w.GetStopped() {
			kind = releasing
		}
		err := s.commit(kind, func(b *batch) { b.raw(partKey(key), raw); b.json(preMember+m.ID, m) },
			func(d *data) { d.parts[key] = part{workload: w}; d.members[m.ID] = m })
		if err == nil {
			s.changed.Send()
		}
		return err
	}
	return protocol.Refuse(protocol.Nack_UNKNOWN_PART, "the accepted desired state names no such part")
}

// AcceptLeases stores the leases of a batch that are newer than the stored ones. A full spool refuses the batch: usage
// under a new lease might not fit. A full disk refuses first leases alone: a renewal counts, or what runs would end.
func (s *Store) AcceptLeases(v protocol.Verified[*protocol.LeaseBatch]) error {
	if !v.OK() {
		return protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "the leases were not verified")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.Message().GetIncarnation() != s.d.meta.Incarnation {
		return protocol.Refuse(protocol.Nack_WRONG_NODE, "the leases are for another incarnation of this node")
	}
	if spool.Full(s.d.unsent, s.maxUnsent) {
		return protocol.Refuse(protocol.Nack_UNAVAILABLE, "the usage spool is full; %d MiB wait for the hub",
			s.d.unsent>>20)
	}
	higher := make(map[string]*protocol.Lease)
	for _, l := range v.Message().GetLeases() {
		if l.GetMemberId() == "" || l.GetLeaseNo() == 0 || l.GetExpiresAt() == nil {
			return protocol.Refuse(protocol.Nack_MALFORMED, "a lease has no member, number or end")
		}
		best := s.d.leases[l.GetMemberId()]
		if b := higher[l.GetMemberId()]; b != nil {
			best = b
		}
		if l.GetLeaseNo() > best.GetLeaseNo() {
			higher[l.GetMemberId()] = l
		}
	}
	if len(higher) == 0 {
		return nil
	}
	from := maps.Clone(s.d.leaseFrom)
	for _, l := range v.Message().GetLeases() {
		if higher[l.GetMemberId()] != nil || proto.Equal(l, s.d.leases[l.GetMemberId()]) {
			from[l.GetMemberId()] = batchKey(v.Envelope())
		}
	}
	drop := append(idleBatches(s.d.batches, from), s.d.asideKeys(preBatch)...)
	err := s.commit(s.d.needOf(higher), func(b *batch) {
		b.delete(drop...)
		b.proto(batchKey(v.Envelope()), v.Envelope())
		for id := range higher {
			if s.d.consumedAside(id) {
				b.json(preConsumed+id, map[string]int64{})
			}
		}
	}, func(d *data) {
		d.addBatch(v)
		for _, key := range drop {
			delete(d.batches, key)
		}
	})
	if err != nil {
		return err
	}
	failpoint.Hit("agent/leases/synced")
	s.changed.Send()
	if s.unsaved {
		// They are in force, but a restart may lose them: the hub sends them again.
		return protocol.Refuse(protocol.Nack_UNAVAILABLE, "the disk is full: the leases are in force and could not be "+
			"stored")
	}
	return nil
}

// needOf is the space that leases need: a renewal keeps a member running, a first lease alone starts one.
func (d *data) needOf(leases map[string]*protocol.Lease) need {
	for id := range leases {
		if d.leases[id] != nil {
			return releasing
		}
	}
	return acquiring
}

func hexSum(raw []byte) string {
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}
