package state

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent/meter"
)

// The meter is stored in three kinds of keys: the fields of each interval that seldom change, the mark of each member,
// and one small sample with the fields of all intervals that change with each sample.

// sample holds, by run id, the fields of an interval that change with each sample. An older release reads the first of
// them.
type sample map[string][13]int64

func sampleOf(s meter.State) sample {
	out := make(sample, len(s.Intervals))
	for _, iv := range s.Intervals {
		v := [...]int64{
			toMicros(iv.CutAt), toMicros(iv.Until), iv.CPUMicros, iv.CPUCutMicros, iv.MemoryBytes, iv.MemoryByteSeconds,
			iv.MemoryRest, toMicros(iv.SeenAt), toMicros(iv.Unconfirmed.At), iv.Unconfirmed.CPUMicros,
			iv.Unconfirmed.MemoryBytes, oneIf(iv.Unconfirmed.Sampled), oneIf(iv.Unconfirmed.Beside),
		}
		if v != [len(v)]int64{} {
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
	iv.SeenAt = fromMicros(x[7])
	iv.Unconfirmed = meter.Reading{
		At: fromMicros(x[8]), CPUMicros: x[9], MemoryBytes: x[10], Sampled: x[11] != 0, Beside: x[12] != 0,
	}
}

// lasting returns the intervals without the fields that the sample holds.
func lasting(all []meter.Interval) []meter.Interval {
	out := make([]meter.Interval, 0, len(all))
	for _, iv := range all {
		out = append(out, meter.Interval{
			RunID:        iv.RunID,
			MemberID:     iv.MemberID,
			Revision:     iv.Revision,
			LeaseNo:      iv.LeaseNo,
			OpenedAt:     iv.OpenedAt,
			Accelerators: iv.Accelerators,
			StartedAt:    iv.StartedAt,
			CPUUnread:    iv.CPUUnread,
			Unknown:      iv.Unknown,
			NoDevice:     iv.NoDevice,
		})
	}
	return out
}

// meter writes the difference between the meter as it is on the disk and the next one.
func (b *batch) meter(d *data, next meter.State) {
	runID := func(iv meter.Interval) string { return iv.RunID }
	writeChanged(b, preInterval, lasting(d.meter.Intervals), lasting(next.Intervals), runID)
	writeChanged(b, preMetered, d.meter.Members, next.Members, func(m meter.Member) string { return m.ID })
	if now := sampleOf(next); !maps.Equal(now, sampleOf(d.meter)) {
		b.json(keySample, now)
	}
}

func writeChanged[T comparable](b *batch, prefix string, old, next []T, id func(T) string) {
	gone := make(map[string]T, len(old))
	for _, v := range old {
		gone[id(v)] = v
	}
	for _, v := range next {
		if had, known := gone[id(v)]; !known || had != v {
			b.json(prefix+id(v), v)
		}
		delete(gone, id(v))
	}
	for key := range gone {
		b.delete(prefix + key)
	}
}

// assembleMeter completes the meter after all keys were read.
func (d *data) assembleMeter() {
	for i := range d.meter.Intervals {
		d.sample.apply(&d.meter.Intervals[i])
	}
	d.sample = nil
	slices.SortFunc(d.meter.Intervals, func(a, b meter.Interval) int { return strings.Compare(a.RunID, b.RunID) })
	slices.SortFunc(d.meter.Members, func(a, b meter.Member) int { return strings.Compare(a.ID, b.ID) })
}

func oneIf(b bool) int64 {
	if b {
		return 1
	}
	return 0
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
