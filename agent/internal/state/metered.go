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

// sample holds, by run id, the fields of an interval that change with each sample. A release that knows fewer of them
// reads the first ones.
type sample map[string][12]int64

// Flags of an interval in a sample.
const (
	unknown int64 = 1 << iota
	noDevice
	unconfirmedSampled
	unconfirmedBeside
)

func sampleOf(s meter.State) sample {
	out := make(sample, len(s.Intervals))
	for _, iv := range s.Intervals {
		var flags int64
		for flag, is := range map[int64]bool{
			unknown: iv.Unknown, noDevice: iv.NoDevice, unconfirmedSampled: iv.Unconfirmed.Sampled,
			unconfirmedBeside: iv.Unconfirmed.Beside,
		} {
			if is {
				flags |= flag
			}
		}
		v := [...]int64{
			toMicros(iv.CutAt), toMicros(iv.Until), iv.CPUMicros, iv.CPUCutMicros, iv.MemoryBytes, iv.MemoryByteSeconds,
			iv.MemoryRest, flags, toMicros(iv.SeenAt), toMicros(iv.Unconfirmed.At), iv.Unconfirmed.CPUMicros,
			iv.Unconfirmed.MemoryBytes,
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
	iv.Unknown, iv.NoDevice, iv.SeenAt = x[7]&unknown != 0, x[7]&noDevice != 0, fromMicros(x[8])
	iv.Unconfirmed = meter.Reading{
		At: fromMicros(x[9]), CPUMicros: x[10], MemoryBytes: x[11], Sampled: x[7]&unconfirmedSampled != 0,
		Beside: x[7]&unconfirmedBeside != 0,
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
