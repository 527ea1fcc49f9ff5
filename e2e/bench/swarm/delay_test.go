package swarm

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// recorder is a socket that notes what it is given.
type recorder struct {
	net.PacketConn
	since time.Time
	sent  []string
	at    []time.Duration
}

func (r *recorder) WriteTo(data []byte, _ net.Addr) (int, error) {
	r.sent, r.at = append(r.sent, string(data)), append(r.at, time.Since(r.since))
	return len(data), nil
}

func TestAPathDelaysEachPacketAndKeepsTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		socket := &recorder{since: time.Now()}
		path := delayed(t.Context(), socket, 300*time.Millisecond)
		buf := []byte("a")
		for _, p := range []string{"a", "b"} {
			copy(buf, p) // the caller uses its buffer again
			_, err := path.WriteTo(buf, nil)
			require.NoError(t, err)
		}
		time.Sleep(100 * time.Millisecond)
		_, err := path.WriteTo([]byte("c"), nil)
		require.NoError(t, err)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a", "b", "c"}, socket.sent)
		require.Equal(t, []time.Duration{300 * time.Millisecond, 300 * time.Millisecond, 400 * time.Millisecond}, socket.at)
	})
}

func TestAFullPathLosesPackets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		socket := &recorder{since: time.Now()}
		path := delayed(t.Context(), socket, time.Second)
		synctest.Wait()
		for range 2 * inFlight {
			_, err := path.WriteTo([]byte("a"), nil)
			require.NoError(t, err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.GreaterOrEqual(t, len(socket.sent), inFlight)
		require.LessOrEqual(t, len(socket.sent), inFlight+1)
	})
}

func TestAPathWithoutDelayIsTheSocket(t *testing.T) {
	socket := &recorder{}
	require.Same(t, socket, delayed(t.Context(), socket, 0))
}
