package session

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

// A node that talks without a pause is read at messageRate after its first messageBurst; one that pauses has its burst again.
func TestNodeThatTalksWithoutAPauseIsReadAtTheRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var readAt []time.Duration
		const pausesAfter, messages = messageBurst + 10*messageRate, 2*messageBurst + 10*messageRate
		c := &connection{log: slog.New(slog.DiscardHandler)}
		errEnd := errors.New("the stream ends")
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
		require.Zero(t, readAt[messageBurst-1], "the first are read at once")
		for k := messageBurst; k < pausesAfter; k++ {
			due := time.Duration(k-messageBurst+1) * time.Second / messageRate
			require.InDelta(t, due, readAt[k], float64(time.Millisecond), "message %d", k)
		}
		require.Equal(t, readAt[pausesAfter], readAt[messages-1], "after a pause as many are read at once")
	})
}
