// Package spool queues usage for the hub: it packs records into numbered segments, chained by hash and bounded, and
// derives from acknowledgements what to prune. It is pure. It does not measure (agent/meter), sign (protocol), store
// (agent/internal/state) or choose what to send (agent/hubsession).
//
// Numbers and chain belong to one incarnation of the node's store. What the hub has not acknowledged is never
// forgotten: a full spool refuses new work (Full), it does not drop.
package spool

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// MaxSegmentRecords bounds one segment; more records go into the next.
	MaxSegmentRecords = protocol.MaxSegmentRecords
	// MaxPayloadBytes bounds one segment's payload, with room for what fields around the records take.
	MaxPayloadBytes = protocol.MaxSegmentBytes - 4096
	// MaxUnsentBytes is how much unacknowledged usage a node keeps before it refuses new leases: about a year of one
	// member's records, a month of a busy node's.
	MaxUnsentBytes = 512 << 20
	// MaxKeptBytes is how much posted usage a node keeps for a hub that may be restored; the oldest goes first. It is
	// billed, after all.
	MaxKeptBytes = 128 << 20
)

// Chain is the end of what has been sealed. It is plain data: store it as JSON, in the same write as the segment.
type Chain struct {
	NodeID      string `json:"node_id"`
	Incarnation string `json:"incarnation"`
	// Number is the last segment's; 0 before the first.
	Number uint64 `json:"number"`
	// Sequence is the last record's; 0 before the first.
	Sequence uint64 `json:"sequence"`
	// SHA256 is of the last segment's payload; empty before the first.
	SHA256 []byte `json:"sha256,omitempty"`
}

// Sealed is one segment and the very bytes that are signed, kept and sent. They are never encoded again: the chain is
// over bytes, and an encoder may change its mind.
type Sealed struct {
	Segment *protocol.UsageSegment
	Payload []byte
}

// Seal packs as many waiting records as fit into the next segment and numbers them, in place. It returns the segment,
// the chain after it, and the records that still wait. Without records it returns the chain unchanged.
func Seal(c Chain, waiting []*protocol.UsageRecord, now time.Time) (Sealed, Chain, []*protocol.UsageRecord, error) {
	if len(waiting) == 0 {
		return Sealed{}, c, nil, nil
	}
	if c.NodeID == "" || c.Incarnation == "" {
		return Sealed{}, c, waiting, fmt.Errorf("seal: the chain has no node or no incarnation")
	}
	seg := &protocol.UsageSegment{
		NodeId: c.NodeID, Incarnation: c.Incarnation, Number: c.Number + 1, PreviousSha256: c.SHA256,
		SealedAt: timestamppb.New(now),
	}
	next := c
	size := proto.Size(seg)
	for _, r := range waiting {
		r.Sequence = next.Sequence + 1
		// Tag and length of one record take at most four bytes at this size limit.
		size += proto.Size(r) + 4
		if len(seg.Records) == MaxSegmentRecords || size > MaxPayloadBytes {
			break
		}
		seg.Records = append(seg.Records, r)
		next.Sequence++
	}
	if len(seg.Records) == 0 {
		return Sealed{}, c, waiting, fmt.Errorf("seal: one record has over %d bytes", MaxPayloadBytes)
	}
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(seg)
	if err != nil {
		return Sealed{}, c, waiting, fmt.Errorf("seal segment %d: %w", seg.GetNumber(), err)
	}
	next.Number, next.SHA256 = seg.GetNumber(), digest(payload)
	return Sealed{Segment: seg, Payload: payload}, next, waiting[len(seg.Records):], nil
}

// Marks are the hub's progress with this incarnation's segments. Plain data, stored as JSON.
type Marks struct {
	// Posted: the hub has billed all segments up to here.
	Posted uint64 `json:"posted"`
	// Archived: they are in a verified backup of the hub, too. Never above Posted.
	Archived uint64 `json:"archived"`
}

// HubProgress is the progress that the hub reports.
type HubProgress struct {
	Incarnation      string
	Posted, Archived uint64
	// PostedSHA256 is of the payload of segment Posted; empty where the hub does not say.
	PostedSHA256 []byte
}

// ErrOtherStore says that the hub has other segments of this incarnation than this store has sealed: an older copy of
// the store was restored, or a second copy exists. The store must take a new incarnation (Reincarnate) before it seals.
var ErrOtherStore = errors.New("the hub knows this incarnation from another store")

// Acknowledge applies the hub's progress, which only raises marks; progress of another incarnation changes nothing. own
// is the digest of this store's segment number hub.Posted, nil if the store has deleted it. Acknowledge fails with
// ErrOtherStore when the hub has other segments than this store has sealed: then the store must not delete any.
func Acknowledge(m Marks, c Chain, hub HubProgress, own []byte) (Marks, error) {
	if hub.Incarnation != c.Incarnation {
		return m, nil
	}
	if hub.Posted == c.Number {
		own = c.SHA256
	}
	switch {
	case hub.Posted > c.Number:
		return m, fmt.Errorf("%w: it has posted segment %d, this store has sealed %d", ErrOtherStore, hub.Posted, c.Number)
	case len(own) > 0 && len(hub.PostedSHA256) > 0 && !bytes.Equal(own, hub.PostedSHA256):
		return m, fmt.Errorf("%w: its segment %d is not the one that was sealed here", ErrOtherStore, hub.Posted)
	}
	m.Posted = max(m.Posted, hub.Posted)
	m.Archived = max(m.Archived, min(hub.Archived, m.Posted))
	return m, nil
}

// Rewind moves the posted mark back to what a restored hub has, so that later segments are sent again. It fails for
// archived segments, which the store may have deleted: it must take a new incarnation (Reincarnate).
func Rewind(m Marks, posted uint64) (Marks, error) {
	if posted < m.Archived {
		return m, fmt.Errorf("the hub is back at segment %d, this store has kept what is above %d only", posted, m.Archived)
	}
	m.Posted = min(m.Posted, posted)
	return m, nil
}

// Forget raises the archived mark so that posted segments take at most MaxKeptBytes. sizes has the size of each stored
// segment.
func Forget(m Marks, sizes map[uint64]int64) Marks {
	var kept int64
	for number := m.Posted; number > m.Archived; number-- {
		if kept += sizes[number]; kept > MaxKeptBytes {
			m.Archived = number
			break
		}
	}
	return m
}

// PruneUpTo is the last segment that may be forgotten; 0 for none.
func PruneUpTo(m Marks) uint64 { return m.Archived }

// Full reports whether unsent usage has reached the limit, MaxUnsentBytes on a node: usage under a new lease might not
// fit.
func Full(unsentBytes, mostBytes int64) bool { return unsentBytes >= mostBytes }

// Reincarnate starts a new chain under a fresh random incarnation. What Unsealed returns of the old chain's segments
// that are not archived is sealed again on it; the hub bills that time once.
func Reincarnate(c Chain, incarnation string) Chain {
	return Chain{NodeID: c.NodeID, Incarnation: incarnation}
}

// Unsealed are the records of a segment, to be sealed on another chain. The segment is not touched.
func Unsealed(seg *protocol.UsageSegment) []*protocol.UsageRecord {
	again := make([]*protocol.UsageRecord, len(seg.GetRecords()))
	for i, r := range seg.GetRecords() {
		again[i] = proto.CloneOf(r)
		again[i].Sequence = 0
	}
	return again
}

func digest(payload []byte) []byte {
	sum := sha256.Sum256(payload)
	return sum[:]
}
