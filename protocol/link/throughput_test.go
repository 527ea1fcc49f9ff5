package link_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

// BenchmarkStreamToTheListener reads what the dialling side writes to one stream, as a hub reads a port of an app. It
// also reports the processor time of both sides for each GB.
func BenchmarkStreamToTheListener(b *testing.B) {
	const pieceBytes = 256 << 10
	s := newSetup(b)
	node, hub := s.connect(b)
	up, down := s.open(b, node, hub, protocol.StreamHeader_KIND_TUNNEL)
	sent := make(chan error, 1)
	b.SetBytes(pieceBytes)
	b.ResetTimer()
	before := processorTime(b)
	go func() {
		piece := make([]byte, pieceBytes)
		for range b.N {
			if _, err := up.Write(piece); err != nil {
				sent <- err
				return
			}
		}
		sent <- up.CloseWrite()
	}()
	var got int
	for piece := make([]byte, pieceBytes); got < b.N*pieceBytes; {
		n, err := down.Read(piece)
		got += n
		if got < b.N*pieceBytes {
			require.NoError(b, err)
		}
	}
	require.NoError(b, <-sent)
	b.ReportMetric((processorTime(b)-before).Seconds()/(float64(got)/1e9), "cpu-s/GB")
}

func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var used syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
