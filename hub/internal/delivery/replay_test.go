package delivery

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
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

// Each event has its own tries, also after one that failed and that the owner may no longer see, and where the hub
// starts anew between the two.
func TestTriesOfAnEventThatIsLeftOutAreNotTheNextOnes(t *testing.T) {
	t.Run("same hub", func(t *testing.T) { triesOfAnEventThatIsLeftOut(t, false) })
	t.Run("started anew", func(t *testing.T) { triesOfAnEventThatIsLeftOut(t, true) })
}

func triesOfAnEventThatIsLeftOut(t *testing.T, anew bool) {
	h := newHouse(t)
	h.pause = time.Hour
	platformAdmin := func(is bool) {
		h.tx(func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE users SET platform_admin = $2 WHERE id = $1`, h.owner.ID, is)
			return err
		})
	}
	platformAdmin(true)
	e := listen(t, func(w http.ResponseWriter, _ request) { w.WriteHeader(http.StatusInternalServerError) })
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"fleet.join_token", "apps.environment"}})
	h.number()
	stop := h.start(e)
	defer func() { stop() }()
	h.happen("fleet.join_token.created", "of the platform")
	require.Equal(t, "of the platform", (<-e.got).subject())
	h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Tries == 1 })
	if anew {
		stop()
	}
	platformAdmin(false)
	if anew {
		stop = h.start(e)
	} else {
		h.replay(made.Webhook.ID) // at once
	}
	h.happen("apps.environment.removed", "next")
	require.Equal(t, "next", (<-e.got).subject())
	w := h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Tries > 0 && w.NextTryAt != nil })
	require.Equal(t, 1, w.Tries)
}

// withDeadLetter is a house with a webhook that has one dead letter, of which answer decides from then on.
func withDeadLetter(t *testing.T, answer func(w http.ResponseWriter, subject string),
) (h *house, e *endpoint, id string) {
	h = newHouse(t)
	tries := 0
	e = listen(t, func(w http.ResponseWriter, r request) {
		if tries++; tries > MaxTries {
			answer(w, r.subject())
			return
		}
		w.WriteHeader(http.StatusInternalServerError)
	})
	id = h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}}).Webhook.ID
	h.number()
	t.Cleanup(h.start(e))
	h.happen("apps.environment.removed", "letter")
	e.subjects(MaxTries)
	h.until(id, func(w webhook.Webhook) bool { return w.FailingSince != nil && w.Tries == 0 })
	require.Len(t, h.letters(id), 1)
	return h, e, id
}

func (h *house) replay(id string) {
	h.Helper()
	_, err := h.commands.ReplayWebhook(h.Context(), h.meta("replay"+db.NewID()), h.org.ID, id, "")
	require.NoError(h, err)
}

// A webhook is disabled after 24 hours without a delivery: a dead letter that is taken at last is one.
func TestAReplayThatIsTakenIsADelivery(t *testing.T) {
	fails := true
	h, e, id := withDeadLetter(t, func(w http.ResponseWriter, subject string) {
		if subject == "next" && fails {
			fails = false
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	h.pass(disableAfter - time.Minute)
	h.replay(id)
	require.Equal(t, []string{"letter"}, e.subjects(1))
	require.Eventually(t, func() bool { return len(h.letters(id)) == 0 }, time.Minute, 10*time.Millisecond)
	w := h.until(id, func(webhook.Webhook) bool { return true })
	require.Nil(t, w.FailingSince)
	require.Empty(t, w.LastError)
	require.Equal(t, h.now(), w.DeliveredAt.UTC())
	h.pass(2 * time.Minute)
	h.happen("apps.environment.removed", "next")
	require.Equal(t, []string{"next", "next"}, e.subjects(2))
}

// Where little happens, the last failure may be days ago: the next event has all of its tries.
func TestAnEventAfterAQuietTimeHasItsTries(t *testing.T) {
	fails := true
	h, e, id := withDeadLetter(t, func(w http.ResponseWriter, _ string) {
		if fails {
			fails = false
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	h.pass(disableAfter)
	h.happen("apps.environment.removed", "next")
	w := h.until(id, func(w webhook.Webhook) bool { return w.Status == webhook.Disabled || w.DeliveredAt != nil })
	require.Equal(t, webhook.Active, w.Status)
	require.Equal(t, []string{"next", "next"}, e.subjects(2))
}

func TestAReplayThatIsAnswered410DisablesTheWebhook(t *testing.T) {
	h, _, id := withDeadLetter(t, func(w http.ResponseWriter, _ string) { w.WriteHeader(http.StatusGone) })
	h.replay(id)
	w := h.until(id, func(w webhook.Webhook) bool { return w.Status == webhook.Disabled })
	require.Equal(t, webhook.Gone, w.DisabledReason)
	letters := h.letters(id)
	require.Len(t, letters, 1)
	require.Equal(t, "status 410", letters[0].LastError)
	require.False(t, letters[0].Replaying)
}

// A replay counts as any other try: one that fails after 24 hours without a delivery disables the webhook.
func TestAReplayThatFailsForLongDisablesTheWebhook(t *testing.T) {
	h, _, id := withDeadLetter(t, func(w http.ResponseWriter, _ string) {
		w.WriteHeader(http.StatusInternalServerError)
	})
	afterReplay := func() webhook.Webhook {
		h.replay(id)
		require.Eventually(t, func() bool { return !h.letters(id)[0].Replaying }, time.Minute, 10*time.Millisecond)
		return h.until(id, func(webhook.Webhook) bool { return true })
	}
	h.pass(disableAfter - time.Minute)
	require.Equal(t, webhook.Active, afterReplay().Status)
	h.pass(time.Minute)
	w := afterReplay()
	require.Equal(t, webhook.Disabled, w.Status)
	require.Equal(t, webhook.Failing, w.DisabledReason)
}

// Only the time since the last delivery counts against a webhook.
func TestADeliveryEndsTheTimeOfFailing(t *testing.T) {
	h := newHouse(t)
	tries := 0
	e := listen(t, func(w http.ResponseWriter, _ request) {
		if tries++; tries%2 == 1 {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	h.number()
	defer h.start(e)()
	for _, subject := range []string{"a", "b"} {
		h.happen("apps.environment.removed", subject)
		w := h.until(made.Webhook.ID, func(w webhook.Webhook) bool {
			return w.Status == webhook.Disabled || w.DeliveredAt != nil && w.DeliveredAt.Equal(h.now())
		})
		require.Equal(t, webhook.Active, w.Status)
		require.Nil(t, w.FailingSince)
		h.pass(disableAfter)
	}
}

// The pauses of the ten tries, which take about half an hour.
func TestPausesDoubleUpToTenMinutes(t *testing.T) {
	var pauses []time.Duration
	for tries := range MaxTries - 1 {
		pauses = append(pauses, (&Deliverer{}).pauseAfter(tries))
	}
	require.Equal(t, []time.Duration{
		5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second,
		320 * time.Second, 10 * time.Minute, 10 * time.Minute,
	}, pauses)
}

// A clock that is set back by a day makes nobody wait for a day.
func TestAPauseEndsThoughTheClockIsSetBack(t *testing.T) {
	at := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	require.Equal(t, 5*time.Second, untilTry(at, at.Add(-5*time.Second)))
	require.Equal(t, 10*time.Minute, untilTry(at, at.Add(-24*time.Hour)))
}

// Law 10: a platform admin may see the events of all orgs. Its webhook of one org sends none of another, also where it
// begins anew, because the events after its last one are no longer kept.
func TestLaw10AWebhookThatBeginsAnewSendsTheEventsOfItsOrgAlone(t *testing.T) {
	h := newHouse(t)
	e := listen(t, func(http.ResponseWriter, request) {})
	h.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE users SET platform_admin = TRUE WHERE id = $1`, h.owner.ID)
		return err
	})
	h.happen("apps.environment.removed", "before")
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	require.Positive(t, made.Webhook.Pos)
	h.number()
	h.happen("apps.environment.removed", "expired")
	h.tx(func(ctx context.Context, tx db.Tx) error {
		other := iam.Org{ID: db.NewID(), Slug: "other", DisplayName: "Other", CreatedAt: h.now()}
		if err := iam.CreateOrg(ctx, tx, other); err != nil {
			return err
		}
		return event.Append(ctx, tx, event.Event{
			Type: "apps.environment.removed", Subject: "theirs", ResourceVersion: 1, OrgID: other.ID, ProjectID: db.NewID(),
			CorrelationID: "corr", At: h.now(),
		})
	})
	h.number()
	h.happen("apps.environment.removed", "ours")
	h.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `DELETE FROM events WHERE pos < (SELECT pos FROM events WHERE subject = 'theirs')`)
		return err
	})
	h.tail = event.NewTail(h.d) // that of a hub which starts now
	require.NoError(t, h.tail.Pass(t.Context()))
	defer h.start(e)()
	require.Equal(t, "ours", (<-e.got).subject())
}
