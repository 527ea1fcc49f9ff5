package httpapi

import (
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// deadlineRecorder records the deadlines that are set.
type deadlineRecorder struct {
	*httptest.ResponseRecorder
	set []time.Time
}

func (r *deadlineRecorder) SetWriteDeadline(at time.Time) error {
	r.set = append(r.set, at)
	return nil
}

// Each piece of a stream has a deadline ahead, which no pause between two pieces reaches, and the end of the answer has
// none.
func TestAStreamKeepsItsDeadlineAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const piece, keepAlive = 60 * time.Second, 15 * time.Second
		r := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
		w := newStreamWriter(r, piece, keepAlive)
		began := time.Now()
		for _, pause := range []time.Duration{0, keepAlive, keepAlive, time.Second, keepAlive, time.Nanosecond} {
			time.Sleep(pause) // of the synctest bubble
			require.NoError(t, w.Send([]byte("x")))
			last := r.set[len(r.set)-1]
			require.GreaterOrEqual(t, time.Until(last), 2*keepAlive)
			require.LessOrEqual(t, time.Until(last), piece)
		}
		w.End()
		require.Equal(t, []time.Time{{}, began.Add(piece), began.Add(31*time.Second + piece), {}}, r.set)
		require.Equal(t, "xxxxxx", r.Body.String())
		require.True(t, r.Flushed)
	})
}
