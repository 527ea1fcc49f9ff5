// Package heard decides what a node's word is worth to the hub: whether a usage segment has its place in the chain, whether a
// store has fallen behind, whether two machines speak with one key, and whether silence about a member proves that it is gone.
// It is pure. What was heard before is kept by hub/internal/intake, fleet and instance.
package heard

import (
	"bytes"

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
}

// Mark is how far the chain of one store is posted without a gap.
type Mark struct {
	// Number is of the last segment; 0 before the first.
	Number uint64
	// SHA256 is of its payload.
	SHA256 []byte
}

// Place decides whether a segment may be taken at its place; known is true for one that was posted before. ahead are the
// segments posted beyond a gap. Every neighbour that is there must fit, whichever came first.
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
		return false, protocol.Refuse(ReasonOutOfOrder, "segment %d is too far beyond segment %d, which is the last without a gap", at.Number, m.Number)
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

// Past is the mark once it has passed all that follows it in ahead without a gap; what it has passed leaves ahead.
func (m Mark) Past(ahead map[uint64]Link) Mark {
	for next, ok := ahead[m.Number+1]; ok; next, ok = ahead[m.Number+1] {
		m = Mark{next.Number, next.SHA256}
		delete(ahead, next.Number)
	}
	return m
}
