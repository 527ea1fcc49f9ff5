package cli

import (
	"bytes"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestProgressIsQuietForASecondAndThenSaysWhat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lockedBuffer
		p := newProgress(&out, false, "deploy an app")
		time.Sleep(quietTime - time.Millisecond)
		synctest.Wait()
		require.Empty(t, out.String())
		time.Sleep(time.Millisecond)
		synctest.Wait()
		require.Equal(t, "… deploy an app (1s)\n", out.String())
		p.now("pushing")
		time.Sleep(logInterval)
		synctest.Wait()
		require.Equal(t, "… deploy an app (1s)\n… pushing (11s)\n", out.String())
		p.stop()
		p.stop()
	})
}

func TestProgressOnATerminalCleansItsLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lockedBuffer
		p := newProgress(&out, true, "wait")
		time.Sleep(2 * quietTime)
		synctest.Wait()
		p.note("deploying\x1b[2J")
		p.stop()
		require.Equal(t, "\r\x1b[K… wait (1s)\r\x1b[K… wait (2s)\r\x1b[K   2.0s  deploying [2J\n", out.String())
	})
}
