package hubsession

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// ReportAckTimeout bounds how long a change waits for the acknowledgement of the report before it.
const ReportAckTimeout = time.Second

// removalReports bounds how long the first report of a session repeats a removal proof that the hub has acknowledged.
const removalReports = 24 * time.Hour

// Reports numbers the reports of one session and chooses their content. The zero value is a session before its first.
type Reports struct {
	counter uint64
	// acked is the newest report that the hub has acknowledged.
	acked uint64
	// sent are the removed members in each report that the hub has not acknowledged.
	sent map[uint64][]string
}

// Waiting reports whether the newest report has no acknowledgement yet. A change then waits for it, ReportAckTimeout at
// most, so that changes in quick succession become one report.
func (r *Reports) Waiting() bool { return r.acked < r.counter }

// Next makes the next report of the observed workloads. The proof of a removed member is left out once it is
// acknowledged; the first report of a session repeats those of the last day, because the hub may have been restored.
func (r *Reports) Next(observed []*protocol.WorkloadStatus, now time.Time,
	acknowledged func(memberID string) bool,
) (counter uint64, workloads []*protocol.WorkloadStatus) {
	first := r.counter == 0
	r.counter++
	var removed []string
	for _, w := range observed {
		if w.GetRemoval() != nil {
			old := now.Sub(w.GetRemoval().GetAt().AsTime()) > removalReports
			if acknowledged(w.GetMemberId()) && (!first || old) {
				continue
			}
			removed = append(removed, w.GetMemberId())
		}
		workloads = append(workloads, w)
	}
	if len(removed) > 0 {
		if r.sent == nil {
			r.sent = map[uint64][]string{}
		}
		r.sent[r.counter] = removed
	}
	return r.counter, workloads
}

// Acknowledge notes that the hub has stored a report and returns the removed members whose proofs it holds.
func (r *Reports) Acknowledge(counter uint64) (removed []string) {
	r.acked = max(r.acked, counter)
	removed = r.sent[counter]
	for c := range r.sent {
		if c <= counter {
			delete(r.sent, c)
		}
	}
	return removed
}
