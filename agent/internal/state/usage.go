package state

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealing is the next state of the meter and what one write adds to the spool.
type sealing struct {
	s        *Store
	metered  meter.State
	chain    spool.Chain
	segments []signed
	consumed map[string]map[string]int64
}

type signed struct {
	number uint64
	raw    []byte
}

// seal turns the meter's records into signed segments after the chain, without writing anything yet.
func (s *Store) seal(chain spool.Chain, metered meter.State, records []*protocol.UsageRecord,
	now time.Time,
) (sealing, error) {
	out := sealing{s: s, metered: metered, chain: chain, consumed: map[string]map[string]int64{}}
	for _, r := range records {
		totals, started := out.consumed[r.GetMemberId()]
		if !started {
			totals = maps.Clone(s.d.consumed[r.GetMemberId()])
			if totals == nil {
				totals = map[string]int64{}
			}
			out.consumed[r.GetMemberId()] = totals
		}
		totals[r.GetMeter()] = sum(totals[r.GetMeter()], r.GetQuantity())
	}
	for len(records) > 0 {
		var seg signed
		var err error
		if seg, out.chain, records, err = s.sealOne(out.chain, records, now); err != nil {
			return sealing{}, err
		}
		out.segments = append(out.segments, seg)
	}
	return out, nil
}

// sum adds up to the largest number: a member that holds a TiB uses more byte-seconds in a hundred days.
func sum(used, more int64) int64 {
	if more > math.MaxInt64-used {
		return math.MaxInt64
	}
	return used + more
}

// sealOne seals as many records as fit in one segment, and returns the rest.
func (s *Store) sealOne(chain spool.Chain, records []*protocol.UsageRecord, now time.Time,
) (signed, spool.Chain, []*protocol.UsageRecord, error) {
	if s.signer == nil {
		return signed{}, chain, records, errors.New("state: usage cannot be sealed before the node is identified")
	}
	sealed, next, rest, err := spool.Seal(chain, records, now)
	if err != nil {
		return signed{}, chain, records, err
	}
	env, err := protocol.Sign(protocol.PayloadSegment, sealed.Payload, s.signer)
	if err != nil {
		return signed{}, chain, records, err
	}
	raw, err := proto.Marshal(env)
	if err != nil {
		return signed{}, chain, records, err
	}
	failpoint.Hit("agent/spool/sealed")
	return signed{sealed.Segment.GetNumber(), raw}, next, rest, nil
}

func (x sealing) fill(b *batch) {
	b.meter(&x.s.d, x.metered)
	if len(x.segments) == 0 {
		return
	}
	b.json(keyChain, x.chain)
	for _, seg := range x.segments {
		b.raw(segmentKey(x.chain.Incarnation, seg.number), seg.raw)
	}
	for id, totals := range x.consumed {
		b.json(preConsumed+id, totals)
	}
}

func (x sealing) apply(d *data) {
	d.meter, d.chain = x.metered, x.chain
	for _, seg := range x.segments {
		d.sizes[seg.number] = int64(len(seg.raw))
		d.unsent += int64(len(seg.raw))
	}
	maps.Copy(d.consumed, x.consumed)
	if len(x.segments) > 0 {
		failpoint.Hit("agent/spool/synced")
		x.s.sealed.Send()
	}
}

// SaveSample passes one observation of all containers to the meter and stores the result in one transaction: open
// intervals, sealed records and the time. A sample that cannot be written changes nothing; the next one includes it.
func (s *Store) SaveSample(o meter.Observation, stamp clock.Stamp) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	metered, records := meter.Sample(s.d.meter, o)
	sealed, err := s.seal(s.d.chain, metered, records, o.At)
	if err != nil {
		return err
	}
	kind := measuring
	if slices.ContainsFunc(s.d.meter.Intervals, func(iv meter.Interval) bool {
		return !s.d.meter.Measured(iv.RunID) && metered.Measured(iv.RunID)
	}) {
		kind = releasing // an exit: nothing of the container may stay because its usage finds no space
	}
	return s.commit(kind, func(b *batch) {
		sealed.fill(b)
		b.json(keyStamp, stamp)
	}, func(d *data) {
		sealed.apply(d)
		d.stamp = stamp
	})
}

// Measured reports whether the run's interval has ended and its records are sealed, or never began.
func (s *Store) Measured(runID string) bool {
	return view(s, func(d *data) bool { return d.meter.Measured(runID) })
}

// Metering reports whether the meter has an open interval of the member.
func (s *Store) Metering(memberID string) bool {
	return view(s, func(d *data) bool { return d.meter.Metering(memberID) })
}

// Consumed returns what a member has used, in base units by meter, as far as it is sealed.
func (s *Store) Consumed(memberID string) map[string]int64 {
	return view(s, func(d *data) map[string]int64 { return maps.Clone(d.consumed[memberID]) })
}

// ErrUnreadable says that the disk does not give a sealed segment any more. What follows it in its chain cannot be
// posted: TakeNewIncarnation is due, which goes on without it.
var ErrUnreadable = errors.New("cannot be read any more")

// Segment returns a signed segment of this incarnation; nil when it is not sealed yet. It fails with ErrUnreadable.
func (s *Store) Segment(number uint64) (*protocol.Envelope, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if number > s.d.chain.Number {
		return nil, nil
	}
	return s.segment(number)
}

// SubscribeUsage returns a channel that wakes after each sealed segment.
func (s *Store) SubscribeUsage() <-chan struct{} { return s.sealed.Subscribe() }

func (s *Store) segment(number uint64) (*protocol.Envelope, error) {
	if s.closed {
		return nil, errClosed
	}
	raw, err := s.readRaw(segmentKey(s.d.chain.Incarnation, number))
	env := &protocol.Envelope{}
	if err == nil {
		err = proto.Unmarshal(raw, env)
	}
	if err != nil {
		return nil, unreadableSegment(number, err)
	}
	return env, nil
}

// unsealed are the records of a segment, to be sealed again.
func (s *Store) unsealed(number uint64) ([]*protocol.UsageRecord, error) {
	env, err := s.segment(number)
	if err != nil {
		return nil, err
	}
	seg := &protocol.UsageSegment{}
	if err := proto.Unmarshal(env.GetPayload(), seg); err != nil {
		return nil, unreadableSegment(number, err)
	}
	return spool.Unsealed(seg), nil
}

func unreadableSegment(number uint64, err error) error {
	return fmt.Errorf("state: segment %d %w: %w", number, ErrUnreadable, err)
}

// SpoolState is the progress of this incarnation's usage.
type SpoolState struct {
	Incarnation  string
	LastSegment  uint64
	LastSequence uint64
	Marks        spool.Marks
	UnsentBytes  int64
}

// Spool returns the progress of this incarnation's usage.
func (s *Store) Spool() SpoolState {
	return view(s, func(d *data) SpoolState {
		return SpoolState{d.meta.Incarnation, d.chain.Number, d.chain.Sequence, d.marks, d.unsent}
	})
}

// AcknowledgeUsage applies the hub's progress and deletes archived segments. It fails with spool.ErrOtherStore, and
// changes nothing, when the hub has posted segments that this store never sealed: then TakeNewIncarnation is due.
func (s *Store) AcknowledgeUsage(said spool.HubProgress) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	own, err := s.segmentDigest(said)
	if err != nil {
		return err
	}
	marks, err := spool.Acknowledge(s.d.marks, s.d.chain, said, own)
	if err != nil {
		return err
	}
	if marks = spool.Forget(marks, s.d.sizes); marks == s.d.marks {
		return nil
	}
	var pruned []uint64
	for number := range s.d.sizes {
		if number <= spool.PruneUpTo(marks) {
			pruned = append(pruned, number)
		}
	}
	return s.release(func(b *batch) {
		b.json(keyMarks, marks)
		for _, number := range pruned {
			b.delete(segmentKey(s.d.chain.Incarnation, number))
		}
	}, func(d *data) {
		for _, number := range pruned {
			delete(d.sizes, number)
		}
		d.setMarks(marks)
	})
}

// RewindUsage moves the posted mark back to a restored hub's, so that later segments are sent again. It fails, and
// changes nothing, when some of them are deleted: then TakeNewIncarnation is due.
func (s *Store) RewindUsage(posted uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	marks, err := spool.Rewind(s.d.marks, posted)
	if err != nil || marks == s.d.marks {
		return err
	}
	return s.release(func(b *batch) { b.json(keyMarks, marks) }, func(d *data) { d.setMarks(marks) })
}

// setMarks sets the hub's progress and counts what is unsent from then on.
func (d *data) setMarks(marks spool.Marks) {
	d.marks, d.unsent = marks, 0
	for number, size := range d.sizes {
		if number > marks.Posted {
			d.unsent += size
		}
	}
}

// segmentDigest is the digest of this store's segment number hub.Posted; nil where the store does not have it.
func (s *Store) segmentDigest(said spool.HubProgress) ([]byte, error) {
	if _, kept := s.d.sizes[said.Posted]; !kept || said.Incarnation != s.d.chain.Incarnation ||
		len(said.PostedSHA256) == 0 {
		return nil, nil
	}
	env, err := s.segment(said.Posted)
	if errors.Is(err, ErrUnreadable) {
		return nil, nil // as where it is deleted
	}
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(env.GetPayload())
	return sum[:], nil
}

// TakeNewIncarnation gives the store a new random name, because the hub knows more of the old one than this disk does.
// Usage that is not archived is sealed again under the new name, a segment at a time, since all of it may not fit in
// memory; the hub bills it once. Leases and containers stay. It returns the numbers of the segments that the disk does
// not give any more: their usage is lost.
func (s *Store) TakeNewIncarnation(now time.Time) (lost []uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.d.meta
	m.Incarnation = uuid.NewString()
	chain, sizes := spool.Reincarnate(s.d.chain, m.Incarnation), map[uint64]int64{}
	var records []*protocol.UsageRecord
	// The new segments count only once meta names their incarnation.
	sealUpTo := func(most int) error {
		for len(records) > most {
			var seg signed
			var err error
			if seg, chain, records, err = s.sealOne(chain, records, now); err != nil {
				return err
			}
			sizes[seg.number] = int64(len(seg.raw))
			put := func(b *batch) { b.raw(segmentKey(m.Incarnation, seg.number), seg.raw) }
			if err := s.write(put, func(*data) {}); err != nil {
				return err
			}
		}
		return nil
	}
	for number := s.d.marks.Archived + 1; number <= s.d.chain.Number; number++ {
		again, err := s.unsealed(number)
		if errors.Is(err, ErrUnreadable) {
			lost = append(lost, number)
			continue
		}
		if err != nil {
			return nil, err
		}
		records = append(records, again...)
		if err := sealUpTo(spool.MaxSegmentRecords); err != nil {
			return nil, err
		}
	}
	if err := sealUpTo(0); err != nil {
		return nil, err
	}
	err = s.write(func(b *batch) {
		b.json(keyMeta, m)
		b.json(keyChain, chain)
		b.json(keyMarks, spool.Marks{})
	}, func(d *data) {
		d.meta, d.chain, d.sizes = m, chain, sizes
		d.setMarks(spool.Marks{}) // no totals of members: they have these records already
	})
	if err != nil {
		return nil, err
	}
	return lost, s.gcSegments()
}

// gcSegments removes the segments of incarnations that this store no longer has.
func (s *Store) gcSegments() error {
	var stale []string
	err := s.db.View(func(tx *badger.Txn) error {
		it := tx.NewIterator(badger.IteratorOptions{Prefix: []byte(preSegment)})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			if key := string(it.Item().KeyCopy(nil)); !strings.HasPrefix(key, preSegment+s.d.meta.Incarnation+"/") {
				stale = append(stale, key)
			}
		}
		return nil
	})
	if err != nil || len(stale) == 0 {
		return err
	}
	const atOnce = 1000
	for chunk := range slices.Chunk(stale, atOnce) {
		if err := s.release(func(b *batch) { b.delete(chunk...) }, func(*data) {}); err != nil {
			return err
		}
	}
	return nil
}
