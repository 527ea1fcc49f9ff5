// Package heard decides what a node's word is worth to the hub: whether a usage segment has its place in the chain,
// whether a store has fallen behind, whether two machines speak with one key, and whether silence about a member proves
// that it is gone. It is pure. What was heard before is kept by hub/internal/intake, fleet and instance.
package heard

import (
	"bytes"
	"fmt"

	"github.com/gpuaas/gpuaas/protocol"
)

// MaxAhead bounds how far beyond a gap segments are taken; the node sends those again when the gap is closed.
const MaxAhead = 1024

// ReasonOutOfOrder says that the segment is over MaxAhead beyond the first one that is missing.
const ReasonOutOfOrder = "out_of_order"

// Link is a segment's place in the chain.
type Link struct {
	Number uint64
	// SHA256 is of the segment's payload, Previous what it names as that of the segment before; empty for number 1.
	SHA256, Previous []byte
	// First and Last are the numbers of the segment's records; 0 where they are not known.
	First, Last uint64
}

// Mark is how far the chain of one store is posted without a gap.
type Mark struct {
	// Number is of the last segment; 0 before the first.
	Number uint64
	// SHA256 is of its payload.
	SHA256 []byte
	// Last is the highest record number up to that segment; 0 before the first segment, and where it is not known.
	Last uint64
}

// Place decides whether a segment may be taken at its place; known is true for one that was posted before. ahead are
// the segments posted beyond a gap. Every neighbour that is there must fit, whichever came first.
func (m Mark) Place(ahead map[uint64]Link, at Link) (known bool, err error) {
	broken := func(format string) error {
		return protocol.Refuse(protocol.RefusalChainBroken, format, at.Number)
	}
	const otherContent = "segment %d was posted with another content"
	if at.Number < m.Number {
		// Its digest is not kept; the node holds the mark's against its own chain (UsageAck.posted_sha256).
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
		return false, protocol.Refuse(ReasonOutOfOrder, "segment %d is too far beyond segment %d, which is the last "+
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

// CheckNumbers checks a segment that Place lets in: its records must continue those of its neighbours. near are the
// segments beyond the mark. Where the numbers of a neighbour are not known, that side is not checked. It returns the
// segment with what follows for its own numbers: an empty segment has the place after its predecessor, and no number
// counts below one that was passed.
func (m Mark) CheckNumbers(near map[uint64]Link, at Link) (Link, error) {
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

// before returns the highest record number that is known to come before a segment. due is true where it is the
// predecessor's, so that the segment begins with the one after it.
func (m Mark) before(near map[uint64]Link, number uint64) (last uint64, due bool) {
	if number == m.Number+1 {
		return m.Last, m.Number == 0 || m.Last != 0
	}
	if previous := near[number-1]; previous.First != 0 {
		return max(previous.Last, m.Last), true
	}
	return m.Last, false
}

// Past is the mark once it has passed all that follows it in ahead without a gap; what it has passed leaves ahead.
func (m Mark) Past(ahead map[uint64]Link) Mark {
	for next, ok := ahead[m.Number+1]; ok; next, ok = ahead[m.Number+1] {
		last := max(m.Last, next.Last)
		if next.First == 0 {
			last = 0
		}
		m = Mark{next.Number, next.SHA256, last}
		delete(ahead, next.Number)
	}
	return m
}
