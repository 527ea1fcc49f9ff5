package state

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/protocol"
)

// SetAdmissions sets the decisions on documents, by their digests. It skips documents that the state no longer names.
func (s *Store) SetAdmissions(admissions map[string]admission.Decision) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for sum, v := range admissions {
		if _, is := s.d.parts[sum]; is {
			s.d.admissions[sum] = v
		}
	}
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

// Part is one reference of the accepted state. Workload is nil while its document is missing.
type Part struct {
	MemberID string
	SHA256   [32]byte
	Workload *protocol.Workload
	// Admission is nil until the document was decided on.
	Admission *admission.Decision
}

// SHA256Hex is the name of the part in SetAdmissions.
func (p Part) SHA256Hex() string { return hex.EncodeToString(p.SHA256[:]) }

// Accepted returns the accepted state. Callers do not change the workloads.
func (s *Store) Accepted() Accepted {
	return view(s, (*data).accepted)
}

// Volumes are the volumes of projects that the accepted state names. Callers do not change them.
func (s *Store) Volumes() []*protocol.ProjectVolume {
	return view(s, func(d *data) []*protocol.ProjectVolume { return d.state.GetVolumes() })
}

func (d *data) accepted() Accepted {
	if d.state == nil {
		return Accepted{}
	}
	a := Accepted{
		Epoch: d.state.GetEpoch(), Generation: d.state.GetGeneration(), IssuedAt: d.state.GetIssuedAt().AsTime(),
	}
	sum := sha256.Sum256(d.stateEnv.GetPayload())
	a.SHA256 = sum[:]
	for _, ref := range d.state.GetParts() {
		p := Part{MemberID: ref.GetId()}
		copy(p.SHA256[:], ref.GetSha256())
		p.Workload = d.parts[p.SHA256Hex()].workload
		if v, decided := d.admissions[p.SHA256Hex()]; decided {
			p.Admission = &v
		}
		a.Parts = append(a.Parts, p)
	}
	return a
}

// Documents returns the stored documents that the accepted state names, byte for byte. unreadable says which of them
// the disk does not give any more; the others are whole without them.
func (s *Store) Documents() (out [][]byte, unreadable []error, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosed
	}
	for _, ref := range s.d.state.GetParts() {
		key := hex.EncodeToString(ref.GetSha256())
		if _, here := s.d.parts[key]; !here {
			continue
		}
		raw, err := s.readRaw(partKey(key))
		if err != nil {
			unreadable = append(unreadable, err)
			continue
		}
		out = append(out, raw)
	}
	return out, unreadable, nil
}

func (s *Store) readRaw(key string) (raw []byte, err error) {
	if s.closed {
		return nil, errClosed
	}
	if value, newer := s.pending.Sets[key]; newer {
		return value, nil
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

// Signed returns the envelopes of the state, which may be nil, and of every batch that a lease is from.
func (s *Store) Signed() (state *protocol.Envelope, leases []*protocol.Envelope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range slices.Compact(slices.Sorted(maps.Values(s.d.leaseFrom))) {
		leases = append(leases, s.d.batches[key])
	}
	return s.d.stateEnv, leases
}
