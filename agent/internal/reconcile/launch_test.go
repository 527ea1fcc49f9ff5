package reconcile_test

import (
	"testing"
	"time"

	"github.com/gpuaas/gpuaas/agent"
)

// BenchmarkLaunch is the node's part of a launch: from the signed document to ready, the image cached.
func BenchmarkLaunch(b *testing.B) {
	f := newFixture(b)
	warm := f.hub.workload(`{}`)
	f.push(warm)
	f.untilStatus(warm.GetId(), agent.StatusReady)
	for b.Loop() {
		w := f.hub.workload(`{}`)
		began := time.Now()
		f.push(warm, w)
		f.untilStatus(w.GetId(), agent.StatusReady)
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/last")
		b.StopTimer()
		f.push(warm)
		f.untilStatus(w.GetId(), agent.StatusRemoved)
		b.StartTimer()
	}
}
