package httpapi

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// TestTheEndOfARequestCancelsItsStatement: the context of a request reaches the database, so that a request which
// nobody waits for any more holds neither a connection nor a lock.
func TestTheEndOfARequestCancelsItsStatement(t *testing.T) {
	s := newStage(t)
	waiting := func() int64 {
		n, err := db.Query(t.Context(), s.d, func(tx db.Tx) (int64, error) {
			return db.Value[int64](t.Context(), tx, `SELECT count(*) FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock'`)
		})
		require.NoError(t, err)
		return n
	}
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		// Another transaction has the user's row for as long as this function runs.
		if _, err := tx.Exec(ctx, `SELECT 1 FROM users WHERE id = $1 FOR UPDATE`, s.ids["user_id"]); err != nil {
			return err
		}
		ended, cancel := context.WithCancel(ctx)
		defer cancel()
		r := httptest.NewRequestWithContext(ended, http.MethodPost, basePath+"/users/"+s.ids["user_id"]+"/disable", nil)
		r.Header.Set("Authorization", "Bearer "+s.admin)
		r.Header.Set("X-Idempotency-Key", "k")
		done, w := make(chan struct{}), httptest.NewRecorder()
		go func() {
			defer close(done)
			s.direct.ServeHTTP(w, r)
		}()
		require.Eventually(t, func() bool { return waiting() == 1 }, time.Minute, 10*time.Millisecond)
		cancel()
		<-done
		require.GreaterOrEqual(t, w.Code, 500)
		require.Eventually(t, func() bool { return waiting() == 0 }, time.Minute, 10*time.Millisecond,
			"the statement still waits in the database")
		return nil
	})
	require.Equal(t, "active", s.must(t, s.admin, "GET", "/users/"+s.ids["user_id"], "", "", 200).text("status"))
}
