package billing

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxNameBytes bounds ids and names in a record; a longer one is cut, so that it can be stored at all.
const maxNameBytes = 128

// ReadRecords reads the records of a segment. Their numbers must be one run without a gap; others are an error.
func ReadRecords(nodeID, incarnation string, seg *protocol.UsageSegment) ([]Record, error) {
	out := make([]Record, len(seg.GetRecords()))
	for i, r := range seg.GetRecords() {
		out[i] = Record{
			Store: Store{nodeID, incarnation}, Sequence: int64(r.GetSequence()), MemberID: name(r.GetMemberId()),
			Meter: name(r.GetMeter()), Quantity: r.GetQuantity(), RunID: name(r.GetRunId()), LeaseNo: int64(r.GetLeaseNo()),
			Final: r.GetFinal(), Span: rating.Interval{From: moment(r.GetStartedAt()), To: moment(r.GetEndedAt())},
		}
		if out[i].Sequence <= 0 || i > 0 && out[i].Sequence != out[i-1].Sequence+1 {
			return nil, fmt.Errorf("segment %d, record %d", seg.GetNumber(), i)
		}
	}
	return out, nil
}

// name makes a node's text fit for the database, which takes no NUL.
func name(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, ""), "\x00", "")
	if len(s) > maxNameBytes {
		s = strings.ToValidUTF8(s[:maxNameBytes], "")
	}
	return s
}

// moment reads a wire time; what cannot be a time of usage becomes the zero time, which is malformed.
func moment(ts interface {
	IsValid() bool
	AsTime() time.Time
},
) time.Time {
	if !ts.IsValid() {
		return time.Time{}
	}
	t := ts.AsTime().Truncate(time.Microsecond)
	if t.Year() < 2000 || t.Year() > 9000 {
		return time.Time{}
	}
	return t
}
