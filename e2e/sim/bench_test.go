package sim_test

import (
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

// BenchmarkEvents runs two worlds of 250 nodes side by side. events/cpu-s counts processor time, and so does not depend
// on what else runs on the machine; twice that is what two idle cores do in a second.
func BenchmarkEvents(b *testing.B) {
	const worlds = 2
	var events atomic.Int64
	before := cpuTime(b)
	for b.Loop() {
		var running sync.WaitGroup
		for seed := range uint64(worlds) {
			running.Go(func() {
				result, err := sim.Run(sim.LargeWorld(1 + seed))
				events.Add(int64(result.Events))
				if err != nil {
					b.Error(err)
				}
			})
		}
		running.Wait()
	}
	b.ReportMetric(float64(events.Load())/b.Elapsed().Seconds(), "events/s")
	b.ReportMetric(float64(events.Load())/(cpuTime(b)-before).Seconds(), "events/cpu-s")
}

// cpuTime is the processor time of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
