package httpapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// followed serves a log that says nothing until its source is closed, and gives the time that it lasted.
func followed(may func() error) time.Duration {
	source, _ := io.Pipe()
	start := time.Now()
	_ = logStream{source: source, may: may}.VisitGetAppInstanceLogsResponse(httptest.NewRecorder())
	return time.Since(start)
}

func TestAFollowedLogEndsWithItsCallersRights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		checks := 0
		lasted := followed(func() error {
			if checks++; checks == 1 {
				return fault.New(fault.Unavailable, "database_unavailable", "The database does not answer.", nil)
			}
			if checks == 3 {
				return iam.ErrUnauthenticated()
			}
			return nil
		})
		require.Equal(t, 3*logCheckEvery, lasted)
		require.Equal(t, logStreamTime, followed(func() error { return nil }), "it ends in any case")
		require.Equal(t, logStreamTime, followed(func() error { return errors.New("a defect") }))
	})
}

// revocable asks again who calls, as an open stream does.
type revocable struct {
	stubServer
	revoke func()
	after  error
}

func (r *revocable) GetAppInstanceLogs(ctx context.Context,
	_ GetAppInstanceLogsRequestObject,
) (GetAppInstanceLogsResponseObject, error) {
	again := callOf(ctx).again
	if _, err := again(ctx); err != nil {
		return nil, err
	}
	r.revoke()
	_, r.after = again(ctx)
	return nil, iam.ErrNotFound()
}

func TestAnOpenStreamLearnsThatItsCredentialWasRevoked(t *testing.T) {
	s := &revocable{}
	d := newTestAPI(t, s)
	d.known = map[string]iam.Principal{"mine": {Type: principal.User, ID: "mine"}}
	s.revoke = func() { delete(d.known, "mine") }
	a := ask{
		method: http.MethodGet, path: "/api/v1/projects/" + someID + "/app-instances/" + someID + "/logs",
		header: bearer("mine"),
	}
	require.Equal(t, http.StatusNotFound, d.status(t, a))
	require.True(t, fault.Is(s.after, fault.Unauthenticated))
}

// endless is a log that never stops; closed says when it was.
type endless struct{ closed chan struct{} }

func (e endless) Read(p []byte) (int, error) { return len(p), nil }

func (e endless) Close() error {
	close(e.closed)
	return nil
}

// A caller who stops reading holds a tunnel to a node no longer than one piece may take.
func TestALogThatNobodyReadsEnds(t *testing.T) {
	limits := defaultServeLimits()
	limits.write = time.Hour
	source := endless{make(chan struct{})}
	dial := servedWithin(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = logStream{source: source, pieceTime: 100 * time.Millisecond}.VisitGetAppInstanceLogsResponse(w)
	}), limits)
	_, err := io.WriteString(dial(), "GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
	require.NoError(t, err)
	<-source.closed
}
