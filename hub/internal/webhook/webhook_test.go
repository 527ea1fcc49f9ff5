package webhook_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestAWebhookHasAPublicHTTPSURL(t *testing.T) {
	public := func(a netip.Addr) bool { return !a.IsLoopback() }
	for text, good := range map[string]bool{
		"https://example.org/hook?a=1": true,
		"https://192.0.2.1:8443/":      true,
		"http://example.org/":          false,
		"https:///path":                false,
		"https://:443/path":            false,
		"https://u:p@example.org/":     false,
		"https://example.org/#part":    false,
		"https://127.0.0.1/":           false,
		"https://[::1]/":               false,
		"https://exa mple.org/":        false,
		"example.org":                  false,
	} {
		err := webhook.CheckURL(text, public)
		require.Equal(t, good, err == nil, text)
		if !good {
			require.Equal(t, "/url", fault.As(err).Fields[0].Pointer)
		}
	}
}

// A webhook that is enabled again has as long to deliver as a new one.
func TestAnEnabledWebhookBeginsAnew(t *testing.T) {
	d, now := dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()
	id, owner := db.NewID(), principal.Actor{Type: principal.User, ID: db.NewID()}
	var w webhook.Webhook
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) (err error) {
		if _, err = webhook.Create(t.Context(), tx, webhook.Webhook{
			ID: id, OrgID: db.NewID(), Owner: owner, URL: "https://example.org/", SealedSecret: []byte("x"), CreatedAt: now,
		}); err != nil {
			return err
		}
		if err = webhook.Failed(t.Context(), tx, id, webhook.Failure{
			Pos: 7, Reason: "status 500", NextTryAt: now.Add(time.Minute), At: now,
		}); err != nil {
			return err
		}
		if w, err = webhook.Disable(t.Context(), tx, id, webhook.Failing, now.Add(24*time.Hour)); err != nil {
			return err
		}
		require.Equal(t, 1, w.Tries)
		require.NotNil(t, w.FailingSince)
		w, err = webhook.Enable(t.Context(), tx, w, owner, now.Add(48*time.Hour))
		return err
	}))
	require.Equal(t, webhook.Active, w.Status)
	require.Zero(t, w.Tries)
	require.Nil(t, w.NextTryAt)
	require.Nil(t, w.FailingSince, "its next failure would disable it at once")
}

// Each overlap was promised to receivers. A secret that others know ends by a rotation without one.
func TestRotationsKeepTheOverlapsOfThoseBefore(t *testing.T) {
	d, now := dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()
	var w webhook.Webhook
	change := func(f func(tx db.Tx) (webhook.Webhook, error)) error {
		return db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			after, err := f(tx)
			if err == nil {
				w = after
			}
			return err
		})
	}
	rotate := func(secret string, overlap, at time.Duration) error {
		return change(func(tx db.Tx) (webhook.Webhook, error) {
			return webhook.Rotate(t.Context(), tx, w, []byte(secret), overlap, now.Add(at))
		})
	}
	signing := func(at time.Duration) (out []string) {
		for _, s := range w.Signing(now.Add(at)) {
			out = append(out, string(s))
		}
		return out
	}
	require.NoError(t, change(func(tx db.Tx) (webhook.Webhook, error) {
		return webhook.Create(t.Context(), tx, webhook.Webhook{
			ID: db.NewID(), OrgID: db.NewID(), Owner: principal.Actor{Type: principal.User, ID: db.NewID()},
			URL: "https://example.org/", SealedSecret: []byte("a"), CreatedAt: now,
		})
	}))
	require.Zero(t, w.PreviousUntil())
	require.NoError(t, rotate("b", 5*time.Hour, 0))
	require.NoError(t, rotate("c", 2*time.Hour, time.Hour))
	require.Equal(t, []string{"c", "b", "a"}, signing(time.Hour))
	require.Equal(t, []string{"c", "a"}, signing(3*time.Hour))
	require.Equal(t, []string{"c"}, signing(5*time.Hour))
	require.Equal(t, now.Add(5*time.Hour), w.PreviousUntil())
	require.NoError(t, rotate("d", time.Hour, time.Hour))
	require.NoError(t, rotate("e", time.Hour, time.Hour))
	err := rotate("f", time.Hour, time.Hour)
	require.Equal(t, "/overlap_seconds", fault.As(err).Fields[0].Pointer)
	require.NoError(t, rotate("f", time.Hour, 3*time.Hour), "what has ended makes room")
	require.NoError(t, rotate("g", 0, 3*time.Hour))
	require.Equal(t, []string{"g"}, signing(3*time.Hour))
}

func TestLaw10AnotherOrgsWebhookAnswersLikeAnAbsentOne(t *testing.T) {
	d := dbtest.New(t)
	made := webhook.Webhook{
		ID: db.NewID(), OrgID: db.NewID(), Owner: principal.Actor{Type: principal.User, ID: db.NewID()},
		URL: "https://example.org/", SealedSecret: []byte("x"), CreatedAt: time.Unix(1_800_000_000, 0),
	}
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		_, err := webhook.Create(t.Context(), tx, made)
		return err
	}))
	get := func(orgID, id string) (webhook.Webhook, error) {
		return db.ReadTx(t.Context(), d, func(tx db.Tx) (webhook.Webhook, error) {
			return webhook.Get(t.Context(), tx, orgID, id)
		})
	}
	got, err := get(made.OrgID, made.ID)
	require.NoError(t, err)
	require.Equal(t, made.URL, got.URL)
	_, absent := get(made.OrgID, db.NewID())
	require.True(t, fault.Is(absent, fault.NotFound))
	for name, ask := range map[string][2]string{
		"another org": {db.NewID(), made.ID}, "no id": {made.OrgID, "x"},
	} {
		_, err := get(ask[0], ask[1])
		require.Equal(t, absent.Error(), err.Error(), name)
		require.Equal(t, fault.As(absent).Code, fault.As(err).Code, name)
	}
}
