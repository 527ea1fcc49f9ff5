package oidc

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// A caller that gives up waits no longer for a provider that hangs, nor for those who still ask it.
func TestNobodyWaitsForAnothersQuestion(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	hangs := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked <- struct{}{}
		<-answer
		w.WriteHeader(http.StatusInternalServerError)
	}))
	defer hangs.Close()
	let := sync.OnceFunc(func() { close(answer) })
	defer let() // the server waits for its handlers
	p := New(Config{Issuer: hangs.URL})
	first := make(chan error)
	go func() {
		_, err := p.AuthURL(t.Context(), "state", "nonce", "verifier")
		first <- err
	}()
	<-asked
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := p.AuthURL(gone, "state", "nonce", "verifier")
	require.ErrorIs(t, err, context.Canceled)
	select {
	case err := <-first:
		t.Fatalf("the second waited for the first: %v", err)
	default:
	}
	let()
	require.True(t, fault.Is(<-first, fault.Unavailable))
}

// Some providers say in words whether an address is verified.
func TestAClaimMayBeAString(t *testing.T) {
	for text, want := range map[string]boolOrString{
		`true`: true, `"true"`: true, `false`: false, `"false"`: false, `null`: false,
	} {
		var got boolOrString
		require.NoError(t, json.Unmarshal([]byte(text), &got), text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{`"yes"`, `1`, `{}`, `""`} {
		require.Error(t, json.Unmarshal([]byte(text), new(boolOrString)), text)
	}
}
