// Package spooltest verifies chains of usage segments in tests.
package spooltest

import (
	"bytes"
	"crypto/sha256"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// VerifyNext checks that payload is the segment right after the chain, and returns the chain after it. It checks no
// signature.
func VerifyNext(c spool.Chain, payload []byte) (*protocol.UsageSegment, spool.Chain, error) {
	seg := &protocol.UsageSegment{}
	if err := proto.Unmarshal(payload, seg); err != nil {
		return nil, c, fmt.Errorf("segment after %d: %w", c.Number, err)
	}
	switch {
	case seg.GetNodeId() != c.NodeID || seg.GetIncarnation() != c.Incarnation:
		return nil, c, fmt.Errorf("segment %d is of another node or incarnation", seg.GetNumber())
	case seg.GetNumber() != c.Number+1:
		return nil, c, fmt.Errorf("segment %d does not follow %d", seg.GetNumber(), c.Number)
	case !bytes.Equal(seg.GetPreviousSha256(), c.SHA256):
		return nil, c, fmt.Errorf("segment %d names another predecessor", seg.GetNumber())
	case len(seg.GetRecords()) == 0 || len(seg.GetRecords()) > spool.MaxSegmentRecords:
		return nil, c, fmt.Errorf("segment %d has %d records", seg.GetNumber(), len(seg.GetRecords()))
	}
	for _, r := range seg.GetRecords() {
		c.Sequence++
		if r.GetSequence() != c.Sequence {
			return nil, c, fmt.Errorf("segment %d: record %d where %d was due", seg.GetNumber(), r.GetSequence(), c.Sequence)
		}
	}
	sum := sha256.Sum256(payload)
	c.Number, c.SHA256 = seg.GetNumber(), sum[:]
	return seg, c, nil
}
