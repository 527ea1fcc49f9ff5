package state

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent/meter"
)

// The meter is stored in three kinds of keys: what seldom changes of each interval, the mark of each member, and one
// small sample with what each sample changes of all intervals. Together they are always exactly the meter's state.

// sample is what changes of each interval with each sample, by run id.
type sample map[string][7]int64

func sampleOf(s meter.State) sample {
	out := make(sample, len(s.Intervals))
	for _, iv := range s.Intervals {
		v := [7]int64{
			toMicros(iv.CutAt), toMicros(iv.Until), iv.CPUMicros, iv.CPUCutMicros, iv.MemoryBytes, iv.MemoryByteSeconds,
			iv.MemoryRest,
		}
		if v != [7]int64{} {
			out[iv.RunID] = v
		}
	}
	return out
}

func (v sample) apply(iv *meter.Interval) {
	x, sampled := v[iv.RunID]
	if !sampled {
		return
	}
	iv.CutAt, iv.Until = fromMicros(x[0]), fromMicros(x[1])
	iv.CPUMicros, iv.CPUCutMicros, iv.MemoryBytes, iv.MemoryByteSeconds, iv.MemoryRest = x[2], x[3], x[4], x[5], x[6]
}

// lasting is the interval without what is in the sample.
func lasting(iv meter.Interval) meter.Interval {
	return meter.Interval{
		RunID: iv.RunID, MemberID: iv.MemberID, Revision: iv.Revision, LeaseNo: iv.LeaseNo, OpenedAt: iv.OpenedAt,
		StartedAt: iv.StartedAt,
	}
}

// meter writes the difference between the meter as it is on the disk and the next one.
func (b *batch) meter(d *data, next meter.State) {
	old := d.meter
	intervals := make(map[string]meter.Interval, len(old.Intervals))
	for _, iv := range old.Intervals {
		intervals[iv.RunID] = lasting(iv)
	}
	for _, iv := range next.Intervals {
		if had, known := intervals[iv.RunID]; !known || had != lasting(iv) {
			b.json(preInterval+iv.RunID, lasting(iv))
		}
		delete(intervals, iv.RunID)
	}
	for id := range intervals {
		b.delete(preInterval + id)
	}
	members := make(map[string]meter.Member, len(old.Members))
	for _, m := range old.Members {
		members[m.ID] = m
	}
	for _, m := range next.Members {
		if had, known := members[m.ID]; !known || had != m {
			b.json(preMetered+m.ID, m)
		}
		delete(members, m.ID)
	}
	for id := range members {
		b.delete(preMetered + id)
	}
	if now := sampleOf(next); !maps.Equal(now, sampleOf(old)) {
		b.json(keySample, now)
	}
}

func (d *data) setMeter(next meter.State) { d.meter = next }

// assembleMeter completes the meter after all keys were read.
func (d *data) assembleMeter() {
	for i := range d.meter.Intervals {
		d.sample.apply(&d.meter.Intervals[i])
	}
	d.sample = nil
	slices.SortFunc(d.meter.Intervals, func(a, b meter.Interval) int { return strings.Compare(a.RunID, b.RunID) })
	slices.SortFunc(d.meter.Members, func(a, b meter.Member) int { return strings.Compare(a.ID, b.ID) })
}

func toMicros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func fromMicros(v int64) time.Time {
	if v == 0 {
		return time.Time{}
	}
	return time.UnixMicro(v).UTC()
}
