package main

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
)

const (
	// gcPercent is what the collector lets the heap grow by when GOGC says nothing. What a hub holds is mostly sessions that do not
	// change: with the usual 100 it would take as much again for what reports leave behind.
	gcPercent = 33
	// smallHeap is what the heap may always grow to: collecting a heap of a few MiB again and again took a quarter of a small hub's
	// processor time.
	smallHeap = 40 << 20
	// crowdGCPercent is for as long as many nodes connect: what their handshakes leave behind is garbage by the hundred megabytes, and each
	// collection looks at all the sessions that are there already.
	crowdGCPercent = 150
	// maxGCPercent bounds what a heap with almost nothing in it may grow by.
	maxGCPercent = 1000
)

// paceGC has the collector follow gcPercent and smallHeap from now on.
func paceGC() *gcPacer {
	p := &gcPacer{percent: gcPercent, least: gcPercent}
	debug.SetGCPercent(gcPercent)
	follow(p)
	return p
}

// gcPacer sets the collector's percentage anew after each collection.
type gcPacer struct {
	mu             sync.Mutex
	percent, least int
}

// crowd says that many nodes connect, or that they have.
func (p *gcPacer) crowd(is bool) {
	p.mu.Lock()
	p.least = gcPercent
	if is {
		p.least = crowdGCPercent
	}
	p.mu.Unlock()
	p.set()
}

func (p *gcPacer) set() {
	samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"}, {Name: "/gc/scan/globals:bytes"}}
	metrics.Read(samples)
	heap := samples[0].Value.Uint64()
	p.mu.Lock()
	defer p.mu.Unlock()
	next := max(percentFor(heap, heap+samples[1].Value.Uint64()+samples[2].Value.Uint64()), p.least)
	// Setting it stops the world for a moment.
	if next != p.percent {
		p.percent = next
		debug.SetGCPercent(next)
	}
}

// follow is called back when the mark that it leaves was collected: once after each collection.
func follow(p *gcPacer) {
	runtime.AddCleanup(new(atomic.Pointer[gcPacer]), func(p *gcPacer) {
		p.set()
		follow(p)
	}, p)
}

// percentFor is how much the collector may let a heap of so many live bytes grow by; it counts it of the heap, stacks and globals
// together. The steps are coarse, so that it seldom changes.
func percentFor(heap, counted uint64) int {
	const step = 20
	if heap >= smallHeap || counted == 0 {
		return gcPercent
	}
	percent := int((smallHeap-heap)*100/counted) / step * step
	return min(max(percent, gcPercent), maxGCPercent)
}
