// Package usagechain checks that a node's usage segments form one chain: each names the digest of the one before it and
// continues its record numbers. It mirrors agent/spool, is pure, and is the only place that tells new usage from usage
// that was posted before. hub/internal/ledger keeps the watermarks.
package usagechain

import (
	"bytes"
	"fmt"

	"github.com/gpuaas/gpuaas/protocol"
)

// MaxAhead bounds how far beyond a gap segments are accepted; the node sends later ones again when the gap is closed.
const MaxAhead = 1024

// Link is a segment's position in the chain.
type Link struct {
	Number uint64
	// SHA256 is of the segment's payload, Previous of the payload before it; Previous is empty for number 1.
	SHA256, Previous []byte
	// First and Last are the numbers of the segment's records; 0 for a segment without records whose predecessor is
	// missing.
	First, Last uint64
}

// Watermark is how far the chain of one store is posted without a gap.
type Watermark struct {
	// Number is of the last segment; 0 before the first.
	Number uint64
	// SHA256 is of its payload.
	SHA256 []byte
	// LastRecord is the highest record number up to that segment; 0 before the first record.
	LastRecord uint64
}

// Check decides whether a segment may be posted; known is true for one that was posted before. ahead holds the segments
// posted beyond a gap. The segment must fit each neighbour that is there, whichever came first.
func (m Watermark) Check(ahead map[uint64]Link, at Link) (known bool, err error) {
	broken := func(format string) error {
		return protocol.Refuse(protocol.Nack_CHAIN_BROKEN, format, at.Number)
	}
	const otherContent = "segment %d was posted with another content"
	if at.Number < m.Number {
		// Its digest is not kept; the node compares the watermark's with its own chain (UsageAck.posted_sha256).
		return true, nil
	}
	if at.Number == m.Number {
		if !bytes.Equal(at.SHA256, m.SHA256) {
			return false, broken(otherContent)
		}
		return true, nil
	}
	if there, ok := ahead[at.Number]; ok {
		if !bytes.Equal(at.SHA256, there.SHA256) {
			return false, broken(otherContent)
		}
		return true, nil
	}
	if at.Number-m.Number > MaxAhead {
		return false, protocol.Refuse(protocol.Nack_OUT_OF_ORDER, "segment %d is too far beyond segment %d, which is the "+
			"last "+
			"without a gap", at.Number, m.Number)
	}
	before, ok := ahead[at.Number-1]
	if at.Number == m.Number+1 {
		before, ok = Link{SHA256: m.SHA256}, true
	}
	if ok && !bytes.Equal(at.Previous, before.SHA256) {
		return false, broken("segment %d does not follow the one that was posted before it")
	}
	if after, ok := ahead[at.Number+1]; ok && !bytes.Equal(after.Previous, at.SHA256) {
		return false, broken("segment %d is not the one that the next was sealed after")
	}
	return false, nil
}

// CheckRecords checks the record numbers of a segment that passed Check: they must continue those of its neighbours.
// near holds the segments beyond the watermark; a neighbour without known numbers is not compared. The returned link
// has the segment's own numbers filled in: an empty segment takes the position after its predecessor, and Last never
// falls below a number that was passed.
func (m Watermark) CheckRecords(near map[uint64]Link, at Link) (Link, error) {
	last, due := m.before(near, at.Number)
	if at.First == 0 && due {
		at.First, at.Last = last+1, last
	}
	if at.First == 0 {
		return at, nil
	}
	first := at.First
	at.Last = max(at.Last, last)
	switch after := near[at.Number+1]; {
	case due && first != last+1:
		return at, fmt.Errorf("segment %d begins with record %d where record %d is due", at.Number, first, last+1)
	case first <= last:
		return at, fmt.Errorf("segment %d begins with record %d, and record %d was passed before", at.Number, first, last)
	case after.First != 0 && after.First != at.Last+1:
		return at, fmt.Errorf("segment %d ends with record %d, and the next one begins with record %d", at.Number, at.Last,
			after.First)
	}
	return at, nil
}

// before returns the highest record number known to precede a segment. due is true if it is the predecessor's, so that
// the segment must begin with the next number.
func (m Watermark) before(near map[uint64]Link, number uint64) (last uint64, due bool) {
	if number == m.Number+1 {
		return m.LastRecord, true
	}
	if previous := near[number-1]; previous.First != 0 {
		return max(previous.Last, m.LastRecord), true
	}
	return m.LastRecord, false
}

// Advance returns the watermark after all segments that follow it in ahead without a gap, and removes them from ahead.
func (m Watermark) Advance(ahead map[uint64]Link) Watermark {
	for next, ok := ahead[m.Number+1]; ok; next, ok = ahead[m.Number+1] {
		m = Watermark{Number: next.Number, SHA256: next.SHA256, LastRecord: max(m.LastRecord, next.Last)}
		delete(ahead, next.Number)
	}
	return m
}
