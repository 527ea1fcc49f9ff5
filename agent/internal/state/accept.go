package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/dgraph-io/badger/v4"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// Verdict is whether a workload document was admitted: publisher, manifest and features were checked when it came. An
// admission stands until the document leaves the state, because expiry of a signature never stops what was accepted.
type Verdict struct {
	Admitted bool `json:"admitted"`
	// Reason is a status_reason of the contract, Detail for people.
	Reason string `json:"reason,omitempty"`
	Detail string `json:"detail,omitempty"`
	// FallbackAdmitted is the same for the fallback that the document carries.
	FallbackAdmitted bool `json:"fallback_admitted,omitempty"`
	// BundleVersion is the trust bundle that it was judged by; a refusal is judged again when that changes.
	BundleVersion uint64 `json:"bundle_version"`
}

// Bundle is the trust bundle; invalid before enrolment.
func (s *Store) Bundle() protocol.Bundle {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.d.bundle
}

// InitBundle stores the first trust bundle, which was verified by a fingerprint. It refuses to replace one: later bundles
// come through AcceptBundle.
func (s *Store) InitBundle(b protocol.Bundle) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !b.Valid() {
		return protocol.Refuse(protocol.RefusalSignature, "the trust bundle was not verified")
	}
	if s.d.bundle.Valid() {
		return s.acceptBundle(b.Envelope())
	}
	return s.write(func(w *batch) { w.proto(keyBundle, b.Envelope()) }, func(d *data) { d.bundle = b })
}

// AcceptBundle stores the next trust bundle if it succeeds the present one. The same one again changes nothing.
func (s *Store) AcceptBundle(env *protocol.Envelope) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.acceptBundle(env)
}

func (s *Store) acceptBundle(env *protocol.Envelope) error {
	if s.d.bundle.Valid() && bytes.Equal(env.GetPayload(), s.d.bundle.Envelope().GetPayload()) {
		return nil
	}
	next, err := s.d.bundle.Succeed(env)
	if err != nil {
		return err
	}
	err = s.write(func(w *batch) { w.proto(keyBundle, env) }, func(d *data) { d.bundle = next })
	if err == nil {
		s.wake()
	}
	return err
}

// AcceptState stores a desired state and the documents that came with it, and wakes the subscribers once it is on disk. It
// never goes backwards: an older (epoch, generation) is refused, and so is other content under the same number. The same
// state again adds the documents that were missing.
func (s *Store) AcceptState(v protocol.Verified[*protocol.DesiredState], rawParts [][]byte) error {
	if !v.OK() {
		return protocol.Refuse(protocol.RefusalSignature, "the desired state was not verified")
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
	return s.storeState(next, v.Envelope(), fresh)
}

func (s *Store) checkOrder(next *protocol.DesiredState, env *protocol.Envelope) error {
	have := s.d.state
	switch {
	case have == nil || next.GetEpoch() > have.GetEpoch():
		return nil
	case next.GetEpoch() < have.GetEpoch():
		return protocol.Refuse(protocol.RefusalEpoch, "the desired state is of epoch %d, this node has accepted epoch %d", next.GetEpoch(), have.GetEpoch())
	case next.GetGeneration() < have.GetGeneration():
		return protocol.Refuse(protocol.RefusalOlder, "generation %d is older than generation %d, which this node has accepted", next.GetGeneration(), have.GetGeneration())
	case next.GetGeneration() == have.GetGeneration() && !bytes.Equal(env.GetPayload(), s.d.stateEnv.GetPayload()):
		return protocol.Refuse(protocol.RefusalConflict, "this node has accepted other content under generation %d", have.GetGeneration())
	}
	return nil
}

func (s *Store) storeState(next *protocol.DesiredState, env *protocol.Envelope, fresh map[string]part) error {
	named := make(map[string]bool, len(next.GetParts()))
	members := make(map[string]Member)
	for _, ref := range next.GetParts() {
		named[hex.EncodeToString(ref.GetSha256())] = true
		// Remembered from now on: a member that leaves before it ever ran needs its proof of removal too.
		if m, known := s.d.members[ref.GetId()]; !known || m.Removal != nil {
			members[ref.GetId()] = Member{Member: agent.Member{ID: ref.GetId()}}
		}
	}
	for sum, p := range fresh {
		m, changed := members[p.workload.GetId()]
		if !changed {
			m = s.d.members[p.workload.GetId()]
		}
		if named[sum] {
			m.InstanceID, m.CorrelationID = p.workload.GetInstanceId(), p.workload.GetCorrelationId()
			members[m.ID] = m
		}
	}
	var dropped []string
	for sum := range s.d.parts {
		if !named[sum] {
			dropped = append(dropped, sum)
		}
	}
	var orphans []string
	for id := range s.d.leases {
		_, known := s.d.members[id]
		if _, fresh := members[id]; !known && !fresh {
			orphans = append(orphans, id)
		}
	}
	together := fresh
	if size := totalBytes(fresh); size > chunkBytes {
		// Ahead of the state, in bounded pieces: a document that no state names is nothing to anyone.
		if err := s.writeParts(fresh); err != nil {
			return err
		}
		together = nil
	}
	err := s.write(func(b *batch) {
		b.proto(keyState, env)
		for sum, p := range together {
			b.raw(partKey(sum), p.raw)
		}
		for _, m := range members {
			b.json(preMember+m.ID, m)
		}
		for _, sum := range dropped {
			b.delete(partKey(sum))
			b.delete(preVerdict + sum)
		}
		for _, id := range orphans {
			b.delete(preLease + id)
		}
	}, func(d *data) {
		d.state, d.stateEnv = next, env
		for sum, p := range fresh {
			d.parts[sum] = part{workload: p.workload}
		}
		maps.Copy(d.members, members)
		for _, sum := range dropped {
			delete(d.parts, sum)
			delete(d.verdicts, sum)
		}
		for _, id := range orphans {
			delete(d.leases, id)
		}
	})
	if err == nil {
		failpoint.Hit("agent/accept/synced")
		s.wake()
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
		err := s.write(func(w *batch) { *w = *b }, func(*data) {})
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

// AcceptPart stores one document that the accepted state names. One that it does not name any more is refused.
func (s *Store) AcceptPart(raw []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(raw) > protocol.MaxWorkloadBytes {
		return protocol.Refuse(protocol.RefusalTooLarge, "a part has over %d bytes", protocol.MaxWorkloadBytes)
	}
	sum := sha256.Sum256(raw)
	for _, ref := range s.d.state.GetParts() {
		if !bytes.Equal(ref.GetSha256(), sum[:]) {
			continue
		}
		w := &protocol.Workload{}
		if err := proto.Unmarshal(raw, w); err != nil {
			return &protocol.RefusalError{Reason: protocol.RefusalMalformed, Detail: "a part cannot be read", Err: err}
		}
		if w.GetId() != ref.GetId() || w.GetFallback().GetFallback() != nil {
			return protocol.Refuse(protocol.RefusalMalformed, "a part is not the workload that its reference names")
		}
		m := s.d.members[w.GetId()]
		m.ID, m.InstanceID, m.CorrelationID = w.GetId(), w.GetInstanceId(), w.GetCorrelationId()
		key := hexSum(raw)
		err := s.write(func(b *batch) { b.raw(partKey(key), raw); b.json(preMember+m.ID, m) },
			func(d *data) { d.parts[key] = part{workload: w}; d.members[m.ID] = m })
		if err == nil {
			s.wake()
		}
		return err
	}
	return protocol.Refuse(protocol.RefusalUnknownPart, "the accepted desired state names no such part")
}

// SetVerdicts remembers whether documents were admitted, by their digests. What the state no longer names is left out.
func (s *Store) SetVerdicts(verdicts map[string]Verdict) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := make(map[string]Verdict, len(verdicts))
	for sum, v := range verdicts {
		if _, is := s.d.parts[sum]; is {
			held[sum] = v
		}
	}
	if len(held) == 0 {
		return nil
	}
	return s.write(func(b *batch) {
		for sum, v := range held {
			b.json(preVerdict+sum, v)
		}
	}, func(d *data) { maps.Copy(d.verdicts, held) })
}

// AcceptLeases stores the leases of a batch that are higher than what is stored; the others are old news and change nothing.
// A full spool refuses the batch: usage under a new lease might find no room.
func (s *Store) AcceptLeases(v protocol.Verified[*protocol.LeaseBatch]) error {
	if !v.OK() {
		return protocol.Refuse(protocol.RefusalSignature, "the leases were not verified")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if inc := v.Message().GetIncarnation(); inc != "" && inc != s.d.meta.Incarnation {
		return protocol.Refuse(protocol.RefusalWrongNode, "the leases are for another incarnation of this node")
	}
	if spool.Full(s.d.unsent, s.maxUnsent) {
		return protocol.Refuse(protocol.RefusalUnavailable, "the usage spool is full; %d MiB wait for the hub", s.d.unsent>>20)
	}
	higher := make(map[string]*protocol.Lease)
	for _, l := range v.Message().GetLeases() {
		if l.GetMemberId() == "" || l.GetLeaseNo() == 0 || l.GetExpiresAt() == nil {
			return protocol.Refuse(protocol.RefusalMalformed, "a lease has no member, number or end")
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
	err := s.write(func(b *batch) {
		b.proto(keyBatch, v.Envelope())
		for id, l := range higher {
			b.proto(preLease+id, l)
		}
	}, func(d *data) { d.batchEnv = v.Envelope(); maps.Copy(d.leases, higher) })
	if err == nil {
		failpoint.Hit("agent/leases/synced")
		s.wake()
	}
	return err
}

// Accepted is what the store holds of the desired state.
type Accepted struct {
	Epoch      uint64
	Generation uint64
	// SHA256 is of the signed payload; empty before the first state.
	SHA256   []byte
	IssuedAt time.Time
	Parts    []Part
}

// Part is one reference of the accepted state. Workload is nil while its document has not come.
type Part struct {
	MemberID string
	SHA256   [32]byte
	Workload *protocol.Workload
	// Verdict is nil while nobody has judged the document.
	Verdict *Verdict
}

// SHA256Hex is the name of the part in SetVerdicts.
func (p Part) SHA256Hex() string { return hex.EncodeToString(p.SHA256[:]) }

// Accepted returns the accepted state. Callers do not change the workloads.
func (s *Store) Accepted() Accepted {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accepted()
}

func (s *Store) accepted() Accepted {
	if s.d.state == nil {
		return Accepted{}
	}
	a := Accepted{
		Epoch: s.d.state.GetEpoch(), Generation: s.d.state.GetGeneration(), IssuedAt: s.d.state.GetIssuedAt().AsTime(),
	}
	sum := sha256.Sum256(s.d.stateEnv.GetPayload())
	a.SHA256 = sum[:]
	for _, ref := range s.d.state.GetParts() {
		p := Part{MemberID: ref.GetId()}
		copy(p.SHA256[:], ref.GetSha256())
		p.Workload = s.d.parts[p.SHA256Hex()].workload
		if v, judged := s.d.verdicts[p.SHA256Hex()]; judged {
			p.Verdict = &v
		}
		a.Parts = append(a.Parts, p)
	}
	return a
}

// Documents returns the documents that the accepted state names, as they were signed for, as far as they are here.
func (s *Store) Documents() ([][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out [][]byte
	for _, ref := range s.d.state.GetParts() {
		key := hex.EncodeToString(ref.GetSha256())
		if _, here := s.d.parts[key]; !here {
			continue
		}
		raw, err := s.readRaw(partKey(key))
		if err != nil {
			return nil, err
		}
		out = append(out, raw)
	}
	return out, nil
}

func (s *Store) readRaw(key string) (raw []byte, err error) {
	if s.closed {
		return nil, errors.New("state: closed")
	}
	err = s.db.View(func(tx *badger.Txn) error {
		item, err := tx.Get([]byte(key))
		if err != nil {
			return err
		}
		raw, err = item.ValueCopy(nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("state: %s: %w", key, err)
	}
	return raw, nil
}

// Envelopes returns the signed documents, for showing and for a hub that was restored; nil where there is none.
func (s *Store) Envelopes() (state, leases *protocol.Envelope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.d.stateEnv, s.d.batchEnv
}

func hexSum(raw []byte) string {
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}
