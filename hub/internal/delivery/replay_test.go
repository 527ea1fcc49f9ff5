package delivery

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// Law 10: a dead letter that is replayed is one more delivery, and goes by the rights of now.
func TestLaw10AReplaySendsWhatItsOwnerMaySeeNow(t *testing.T) {
	h := newHouse(t)
	platformAdmin := func(is bool) {
		h.tx(func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE users SET platform_admin = $2 WHERE id = $1`, h.owner.ID, is)
			return err
		})
	}
	platformAdmin(true)
	e := listen(t, func(w http.ResponseWriter, _ request) { w.WriteHeader(http.StatusInternalServerError) })
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"fleet.join_token"}})
	h.number()
	defer h.start(e)()
	h.happen("fleet.join_token.created", "of the platform")
	e.subjects(MaxTries)
	letter := func(tries int) (l webhook.DeadLetter) {
		require.Eventually(t, func() bool {
			all := h.letters(made.Webhook.ID)
			if len(all) == 1 {
				l = all[0]
			}
			return l.Tries == tries && !l.Replaying
		}, time.Minute, 10*time.Millisecond)
		return l
	}
	letter(MaxTries)
	platformAdmin(false)
	_, err := h.commands.ReplayWebhook(t.Context(), h.meta("replay"), h.org.ID, made.Webhook.ID, "")
	require.NoError(t, err)
	require.Contains(t, letter(MaxTries+1).LastError, "the owner may not see it")
	require.Empty(t, e.got)
}

// The next try is minutes after the one before: the webhook and its owner count as they are then.
func TestLaw10AWebhookThatWaitsSendsWhatItsOwnerMaySeeThen(t *testing.T) {
	h := newHouse(t)
	h.pause = time.Hour
	e := listen(t, func(w http.ResponseWriter, _ request) { w.WriteHeader(http.StatusInternalServerError) })
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	h.number()
	defer h.start(e)()
	waits := func(tries int) {
		h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Tries == tries })
	}
	h.happen("apps.environment.removed", "refused")
	<-e.got
	waits(1)
	rotated, err := h.commands.RotateWebhookSecret(t.Context(), h.meta("rotate"), h.org.ID, made.Webhook.ID, 0)
	require.NoError(t, err)
	_, err = h.commands.ReplayWebhook(t.Context(), h.meta("at once"), h.org.ID, made.Webhook.ID, "")
	require.NoError(t, err)
	r := <-e.got
	require.Equal(t, signature(rotated.Secret, r), r.header.Get("webhook-signature"))

	waits(2)
	h.tx(func(ctx context.Context, tx db.Tx) error {
		tx.Enqueue(webhook.Queue, made.Webhook.ID)
		_, err := tx.Exec(ctx, `UPDATE role_bindings SET role = 'viewer' WHERE user_id = $1`, h.owner.ID)
		return err
	})
	h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Status == webhook.Disabled })
	require.Empty(t, e.got)
}
