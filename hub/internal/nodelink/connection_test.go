package nodelink

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

// The messages of a node that sends without a pause are handled at messageRate after the first messageBurst; after a
// pause the burst is available again.
func TestMessagesAreHandledAtTheRateAfterABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var readAt []time.Duration
		const pausesAfter, messages = messageBurst + 10*messageRate, 2*messageBurst + 10*messageRate
		c := &connection{log: slog.New(slog.DiscardHandler)}
		err := c.read(t.Context(), func(*protocol.NodeMessage) error {
			if len(readAt) == messages {
				return errEnd
			}
			if len(readAt) == pausesAfter {
				time.Sleep(messageBurst / messageRate * time.Second)
			}
			readAt = append(readAt, time.Since(began))
			return nil
		})
		require.ErrorIs(t, err, errEnd)
		require.Zero(t, readAt[messageBurst], "the first are handled at once")
		for k := messageBurst + 1; k < pausesAfter; k++ {
			due := time.Duration(k-messageBurst) * time.Second / messageRate
			require.InDelta(t, due, readAt[k], float64(time.Millisecond), "message %d", k)
		}
		require.Equal(t, readAt[pausesAfter], readAt[messages-1], "after a pause as many are handled at once")
	})
}

var errEnd = errors.New("the stream ends")

// However many states a node is sent, it may answer each without a delay; the same state again gives it nothing.
func TestANodeAnswersEachNewStateWithoutADelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const states = 10 * messageBurst
		began := time.Now()
		c := &connection{log: slog.New(slog.DiscardHandler)}
		read := 0
		err := c.read(t.Context(), func(*protocol.NodeMessage) error {
			if read == states*messagesPerState {
				return errEnd
			}
			c.mu.Lock()
			c.pushedGeneration = uint64(read/messagesPerState) + 1
			c.mu.Unlock()
			read++
			return nil
		})
		require.ErrorIs(t, err, errEnd)
		require.Zero(t, time.Since(began))

		err = c.read(t.Context(), func(*protocol.NodeMessage) error {
			if read--; read == 0 {
				return errEnd
			}
			return nil
		})
		require.ErrorIs(t, err, errEnd)
		said := time.Duration(states*messagesPerState - 1 - messagesPerState - messageBurst)
		require.InDelta(t, said*time.Second/messageRate, time.Since(began), float64(time.Millisecond))
	})
}
