package reconcile_test

import (
	"context"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

// countedPasses is a runtime that says when a pass lists the containers, which each pass does once.
type countedPasses struct {
	*runtime.Runtime
	listed chan struct{}
}

func (c countedPasses) List(ctx context.Context) ([]runtime.Container, error) {
	select {
	case c.listed <- struct{}{}:
	default:
	}
	return c.Runtime.List(ctx)
}

// workloadsOfAPass is how many workloads the node of BenchmarkPassWithNothingToDo runs.
const workloadsOfAPass = 100

// BenchmarkPassWithNothingToDo runs passes of the default configuration beside running workloads in which nothing has
// changed. It reports the processor time of this process for a pass, probes and metering that fall into it included.
func BenchmarkPassWithNothingToDo(b *testing.B) {
	f := newFixture(b)
	f.stop()
	counted := countedPasses{listed: make(chan struct{})}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		counted.Runtime = rt
		return counted
	}
	f.configure = func(c *reconcile.Config) {
		*c = reconcile.Config{
			PortFrom: 30000, PortTo: 30000 + 2*workloadsOfAPass, Policy: c.Policy, Log: slog.New(slog.DiscardHandler),
		}
	}
	f.start()
	all := make([]*protocol.Workload, workloadsOfAPass)
	for i := range all {
		all[i] = f.hub.workload(`{}`)
	}
	f.push(all...)
	for _, w := range all {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	}
	before := processorTime(b)
	for b.Loop() {
		f.re.Wake()
		<-counted.listed
	}
	f.re.Wake()
	<-counted.listed // the last pass has ended
	b.ReportMetric(float64((processorTime(b)-before).Microseconds())/1000/float64(b.N+1), "cpu-ms/op")
}

func processorTime(t testing.TB) time.Duration {
	var used syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
