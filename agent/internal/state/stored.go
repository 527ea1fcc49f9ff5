package state

import (
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// Document is a signed document as the disk holds it. Key names it.
type Document struct {
	Key string
	Raw []byte
}

// Stored are the signed documents that the disk holds when it is opened. None of them counts before Resume.
type Stored struct {
	// Bundles are in the order of their versions.
	Bundles []Document
	// State has at most one element.
	State  []Document
	Parts  []Document
	Leases []Document
	// Highest is what was accepted, as the file beside the database says. HighestAltered says that the store had that
	// file, and that it is missing or altered.
	Highest        Highest
	HighestAltered bool
}

// StateKey and BundleKey name in Resumed.Unverified what the store ought to hold and does not.
const (
	StateKey  = keyState
	BundleKey = "bundle"
)

// Resumed are those of the stored documents that were verified.
type Resumed struct {
	// Bundles lead from the pinned root to the present one, which is the last.
	Bundles []protocol.Bundle
	State   protocol.Verified[*protocol.DesiredState]
	Parts   [][]byte
	Leases  []protocol.Verified[*protocol.LeaseBatch]
	// Unverified says, by key, why a document is set aside.
	Unverified map[string]string
}

// Stored returns the documents to verify.
func (s *Store) Stored() Stored {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Stored{Highest: s.saved, HighestAltered: s.d.meta.Highest && s.highestFile.number == 0}
	for _, key := range slices.Sorted(maps.Keys(s.d.stored)) {
		doc := Document{key, s.d.stored[key]}
		switch {
		case strings.HasPrefix(key, preBundle):
			out.Bundles = append(out.Bundles, doc)
		case key == keyState:
			out.State = append(out.State, doc)
		case strings.HasPrefix(key, prePart):
			out.Parts = append(out.Parts, doc)
		default:
			out.Leases = append(out.Leases, doc)
		}
	}
	return out
}

// Resume accepts the stored documents that were verified and sets the others aside: those stay on the disk, without
// effect, until their replacement is accepted.
func (s *Store) Resume(r Resumed) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range r.Bundles {
		if !b.Valid() {
			return protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "the trust bundle was not verified")
		}
	}
	s.d.bundles = r.Bundles
	if r.State.OK() {
		s.d.state, s.d.stateEnv = r.State.Message(), r.State.Envelope()
		for _, raw := range r.Parts {
			w, err := protocol.VerifyPart(r.State, raw)
			if err != nil {
				return err
			}
			s.d.parts[hexSum(raw)] = part{workload: w}
		}
	}
	earlier := func(a, b protocol.Verified[*protocol.LeaseBatch]) int {
		return a.Message().GetIssuedAt().AsTime().Compare(b.Message().GetIssuedAt().AsTime())
	}
	for _, v := range slices.SortedStableFunc(slices.Values(r.Leases), earlier) {
		if !v.OK() {
			return protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "the leases were not verified")
		}
		s.d.addBatch(v)
	}
	maps.Copy(s.d.unverified, r.Unverified)
	maps.DeleteFunc(s.d.leases, func(id string, _ *protocol.Lease) bool { return s.d.members[id].Removal != nil })
	for _, key := range slices.Collect(maps.Keys(s.d.stored)) {
		if _, aside := s.d.unverified[key]; !aside && !s.d.holds(key) {
			s.d.unnamed = append(s.d.unnamed, key)
		}
	}
	s.d.stored = nil
	s.changed.Send()
	return s.resumeHighest()
}

// holds reports whether the document of the key is part of the mirror.
func (d *data) holds(key string) bool {
	sum, isPart := strings.CutPrefix(key, prePart)
	_, held := d.parts[sum]
	return !isPart || held
}

// Unverified says, by key, why stored documents and records are set aside.
func (s *Store) Unverified() map[string]string {
	return view(s, func(d *data) map[string]string { return maps.Clone(d.unverified) })
}

// LeasesUnverified reports whether the node may have leases that it cannot verify: some are set aside, or none were
// ever accepted.
func (s *Store) LeasesUnverified() bool {
	return view(s, func(d *data) bool { return len(d.batches) == 0 || len(d.asideKeys(preBatch)) > 0 })
}

// asideKeys are the keys with one of these prefixes that are set aside or unnamed.
func (d *data) asideKeys(prefixes ...string) []string {
	all := slices.AppendSeq(slices.Clone(d.unnamed), maps.Keys(d.unverified))
	return slices.DeleteFunc(all, func(key string) bool {
		return !slices.ContainsFunc(prefixes, func(p string) bool {
			return key == p || strings.HasSuffix(p, "/") && strings.HasPrefix(key, p)
		})
	})
}

// clearSetAside removes keys that a batch has written or deleted from those that are set aside.
func (d *data) clearSetAside(b *batch) {
	if len(d.unverified) == 0 && len(d.unnamed) == 0 {
		return
	}
	written := make(map[string]bool, len(b.sets)+len(b.deletes))
	for _, e := range b.sets {
		written[e.key] = true
	}
	for _, key := range b.deletes {
		written[key] = true
	}
	maps.DeleteFunc(d.unverified, func(key, _ string) bool { return written[key] })
	d.unnamed = slices.DeleteFunc(d.unnamed, func(key string) bool { return written[key] })
}

// addBatch adds the leases of a batch that are newer than the stored ones. Equal leases count as from this batch, too:
// a hub's batch has all leases of the node, so that earlier batches become idle.
func (d *data) addBatch(v protocol.Verified[*protocol.LeaseBatch]) {
	key := batchKey(v.Envelope())
	for _, l := range v.Message().GetLeases() {
		if held := d.leases[l.GetMemberId()]; l.GetLeaseNo() > held.GetLeaseNo() || proto.Equal(l, held) {
			d.leases[l.GetMemberId()], d.leaseFrom[l.GetMemberId()] = l, key
		}
	}
	d.batches[key] = v.Envelope()
}

// idleBatches are the batches that no lease is from any more.
func idleBatches(batches map[string]*protocol.Envelope, leaseFrom map[string]string) []string {
	needed := slices.Sorted(maps.Values(leaseFrom))
	return slices.DeleteFunc(slices.Collect(maps.Keys(batches)), func(key string) bool {
		_, found := slices.BinarySearch(needed, key)
		return found
	})
}

func batchKey(env *protocol.Envelope) string { return preBatch + hexSum(env.GetPayload()) }

// Envelope decodes a stored envelope; what it holds counts only once it is verified.
func (x Document) Envelope() (*protocol.Envelope, error) {
	env := &protocol.Envelope{}
	if err := proto.Unmarshal(x.Raw, env); err != nil {
		return nil, protocol.Refuse(protocol.Nack_MALFORMED, "the stored document cannot be read")
	}
	return env, nil
}
