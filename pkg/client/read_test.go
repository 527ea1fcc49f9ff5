package client_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// A hub that ends in the middle of an answer is away; one that answers nonsense breaks the contract.
func TestAnAnswerThatBreaksOffMeansThatTheHubIsAway(t *testing.T) {
	for name, c := range map[string]struct {
		length string
		away   bool
	}{"broken off": {"1000", true}, "whole, but no JSON": {"7", false}} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", c.length)
				_, _ = w.Write([]byte(`{"id":"`))
			}))
			defer server.Close()
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, http.NoBody)
			require.NoError(t, err)
			_, err = client.Read[client.Node](server.Client().Do(request))
			require.Error(t, err)
			var away *client.UnreachableError
			if c.away {
				require.ErrorAs(t, err, &away)
			} else {
				require.NotErrorAs(t, err, &away)
			}
		})
	}
}
