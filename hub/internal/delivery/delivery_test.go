package delivery

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
)

// house is a hub's deliveries, with a clock of its own.
type house struct {
	*testing.T

	d        *db.DB
	tail     *event.Tail
	sealer   *secret.Sealer
	commands *command.Service
	org      iam.Org
	project  iam.Project
	owner    iam.User
	// pause is between two tries.
	pause time.Duration

	mu    sync.Mutex
	clock time.Time
}

func newHouse(t *testing.T) *house {
	kek, err := secret.NewKEK([]byte("0123456789abcdef0123456789abcdef"))
	require.NoError(t, err)
	h := &house{T: t, d: dbtest.New(t), sealer: secret.NewSealer(kek), clock: time.Unix(1_800_000_000, 0).UTC()}
	t.Cleanup(func() { eventtest.Conform(t, h.d) })
	h.tail = event.NewTail(h.d)
	h.commands = &command.Service{DB: h.d, Sealer: h.sealer, MayDial: netip.Addr.IsLoopback}
	require.NoError(t, h.tail.Pass(t.Context()))
	h.tx(func(ctx context.Context, tx db.Tx) (err error) {
		h.org = iam.Org{ID: db.NewID(), Slug: "acme", DisplayName: "Acme", CreatedAt: h.now()}
		if err := iam.CreateOrg(ctx, tx, h.org); err != nil {
			return err
		}
		if h.project, err = iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: h.org.ID, Slug: "main", DisplayName: "Main", CreatedAt: h.now(),
		}); err != nil {
			return err
		}
		h.owner, err = iam.CreateUser(ctx, tx, iam.User{
			ID: db.NewID(), OrgID: h.org.ID, Email: "ada@acme.example", DisplayName: "Ada",
			Roles: []iam.Role{iam.OrgAdmin}, CreatedAt: h.now(),
		})
		return err
	})
	return h
}

func (h *house) tx(fn func(context.Context, db.Tx) error) {
	h.Helper()
	require.NoError(h, db.WriteTx(h.Context(), h.d, func(tx db.Tx) error { return fn(h.Context(), tx) }))
}

func (h *house) now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.clock
}

func (h *house) pass(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock = h.clock.Add(d)
}

func (h *house) meta(key string) (m command.Meta) {
	h.tx(func(ctx context.Context, tx db.Tx) (err error) {
		m.Principal, err = iam.CurrentPrincipal(ctx, tx, iam.Principal{Type: "user", ID: h.owner.ID}.Actor())
		return err
	})
	m.IdempotencyKey, m.CorrelationID, m.Route, m.BodyMAC, m.Now = key, "corr", key, []byte("mac"), h.now()
	return m
}

// happen makes events of the project, of each subject one.
func (h *house) happen(eventType string, subjects ...string) {
	h.Helper()
	h.tx(func(ctx context.Context, tx db.Tx) error {
		for _, subject := range subjects {
			if err := event.Append(ctx, tx, event.Event{
				Type: eventType, Subject: subject, ResourceVersion: 1, OrgID: h.org.ID, ProjectID: h.project.ID,
				CorrelationID: "corr", At: h.now(),
			}); err != nil {
				return err
			}
		}
		return nil
	})
	h.number()
}

func (h *house) number() {
	_, err := (&event.Sequencer{DB: h.d, Holder: "hub", Now: h.now}).Number(h.Context())
	require.NoError(h, err)
	require.NoError(h, h.tail.Pass(h.Context()))
}

// start runs deliveries that trust the endpoints of the test, and returns what ends them.
func (h *house) start(endpoints ...*endpoint) (stop func()) {
	roots := x509.NewCertPool()
	for _, e := range endpoints {
		roots.AddCert(e.Certificate())
	}
	d := &Deliverer{
		DB: h.d, Queries: &query.Service{DB: h.d, Tail: h.tail}, Sealer: h.sealer, Now: h.now,
		Client: NewClient(Addresses{Allowed: prefixes("127.0.0.0/8")}, roots), Log: slog.New(slog.DiscardHandler),
		pause: func(int) time.Duration { return h.pause },
	}
	ctx, cancel := context.WithCancel(h.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	return sync.OnceFunc(func() {
		cancel()
		require.NoError(h, <-ended)
	})
}

func (h *house) create(w webhook.Webhook) command.WebhookWithSecret {
	h.Helper()
	w.OrgID = h.org.ID
	made, err := h.commands.CreateWebhook(h.Context(), h.meta("create "+w.URL), w)
	require.NoError(h, err)
	return made
}

// until waits until the webhook is as it should be.
func (h *house) until(id string, is func(webhook.Webhook) bool) (w webhook.Webhook) {
	h.Helper()
	require.Eventually(h, func() bool {
		h.tx(func(ctx context.Context, tx db.Tx) (err error) {
			w, err = webhook.ByID(ctx, tx, id)
			return err
		})
		return is(w)
	}, time.Minute, 10*time.Millisecond)
	return w
}

func (h *house) letters(id string) (out []webhook.DeadLetter) {
	h.tx(func(ctx context.Context, tx db.Tx) (err error) {
		out, err = webhook.DeadLetters(ctx, tx, id, db.Page{Limit: 100})
		return err
	})
	return out
}

// request is what an endpoint got.
type request struct {
	header http.Header
	body   string
}

// subject is that of the event.
func (r request) subject() string {
	_, after, _ := strings.Cut(r.body, `"subject":"`)
	subject, _, _ := strings.Cut(after, `"`)
	return subject
}

// endpoint is an HTTPS server that answers with what answer says; 204 where that is nil.
type endpoint struct {
	*httptest.Server

	got    chan request
	answer func(w http.ResponseWriter, r request)
}

func listen(t *testing.T, answer func(http.ResponseWriter, request)) *endpoint {
	e := &endpoint{got: make(chan request, 100), answer: answer}
	e.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got := request{r.Header, string(body)}
		e.got <- got
		if e.answer != nil {
			e.answer(w, got)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	e.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(e.Close)
	return e
}

func (e *endpoint) subjects(n int) (out []string) {
	for range n {
		out = append(out, (<-e.got).subject())
	}
	return out
}

// signatures computes those of Standard Webhooks from its text: base64(HMAC-SHA256(key, id.timestamp.payload)).
func signature(secret string, r request) string {
	key, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(r.header.Get("webhook-id") + "." + r.header.Get("webhook-timestamp") + "." + r.body))
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

func TestEventsAreDeliveredSignedAndInOrder(t *testing.T) {
	h := newHouse(t)
	failures := 2
	e := listen(t, func(w http.ResponseWriter, r request) {
		if r.subject() == "b" && failures > 0 {
			failures--
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	require.True(t, strings.HasPrefix(made.Secret, "whsec_"))
	h.number()
	stop := h.start(e)
	h.happen("apps.environment.removed", "a", "b", "c")
	h.happen("capacity.volume.ready", "other")
	h.happen("apps.environment.removed", "a")
	var tries []request
	for range 6 {
		tries = append(tries, <-e.got)
	}
	var order []string
	for _, r := range tries {
		order = append(order, r.subject())
		require.Equal(t, signature(made.Secret, r), r.header.Get("webhook-signature"))
		require.Equal(t, fmt.Sprint(h.now().Unix()), r.header.Get("webhook-timestamp"))
		require.Equal(t, "application/cloudevents+json", r.header.Get("Content-Type"))
	}
	require.Equal(t, []string{"a", "b", "b", "b", "c", "a"}, order)
	require.Equal(t, tries[1].header.Get("webhook-id"), tries[3].header.Get("webhook-id"))
	require.NotEqual(t, tries[0].header.Get("webhook-id"), tries[5].header.Get("webhook-id"))
	var last int64
	h.tx(func(ctx context.Context, tx db.Tx) (err error) {
		last, err = db.Value[int64](ctx, tx, `SELECT max(pos) FROM events`)
		return err
	})
	done := h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Pos == last })
	require.NotNil(t, done.DeliveredAt)
	require.Zero(t, done.Tries)
	require.Nil(t, done.FailingSince)

	// Another process goes on where this one was; until the overlap ends, both secrets sign.
	stop()
	rotated, err := h.commands.RotateWebhookSecret(t.Context(), h.meta("rotate"), h.org.ID, made.Webhook.ID, time.Hour)
	require.NoError(t, err)
	h.happen("apps.environment.removed", "d")
	defer h.start(e)()
	r := <-e.got
	require.Equal(t, "d", r.subject())
	require.Equal(t, signature(rotated.Secret, r)+" "+signature(made.Secret, r), r.header.Get("webhook-signature"))
	h.pass(30 * time.Minute)
	again, err := h.commands.RotateWebhookSecret(t.Context(), h.meta("again"), h.org.ID, made.Webhook.ID, 10*time.Minute)
	require.NoError(t, err)
	h.happen("apps.environment.removed", "twice")
	r = <-e.got
	require.Equal(t, signature(again.Secret, r)+" "+signature(rotated.Secret, r)+" "+signature(made.Secret, r),
		r.header.Get("webhook-signature"), "the first overlap was promised")
	rotated = again
	h.pass(30 * time.Minute)
	h.happen("apps.environment.removed", "e")
	r = <-e.got
	require.Equal(t, signature(rotated.Secret, r), r.header.Get("webhook-signature"))
}

// TestADeliveryIsInTheTraceOfItsEvent: the attribute is the event's in each try, the header the try's own span.
func TestADeliveryIsInTheTraceOfItsEvent(t *testing.T) {
	const span, traced = "b7ad6b7169203331", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	collector := telemetrytest.NewCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	stopTraces, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	h := newHouse(t)
	failures := 1
	e := listen(t, func(w http.ResponseWriter, _ request) {
		if failures > 0 {
			failures--
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	h.number()
	stop := h.start(e)
	h.tx(func(ctx context.Context, tx db.Tx) error {
		return event.Append(ctx, tx, event.Event{
			Type: "apps.environment.removed", Subject: "traced", ResourceVersion: 1, OrgID: h.org.ID, ProjectID: h.project.ID,
			CorrelationID: "corr", Traceparent: traced, At: h.now(),
		})
	})
	h.happen("apps.environment.removed", "untraced")
	headers := map[string]bool{}
	for range 2 {
		r := <-e.got
		require.Contains(t, r.body, `"traceparent":"`+traced+`"`)
		header := r.header.Get("traceparent")
		require.Equal(t, telemetry.TraceID(traced), telemetry.TraceID(header))
		headers[strings.Split(header, "-")[2]] = true
	}
	r := <-e.got
	require.Equal(t, "untraced", r.subject())
	require.NotContains(t, r.body, "traceparent")
	require.Empty(t, r.header.Get("traceparent"))
	stop()
	stopTraces()
	spans := slices.DeleteFunc(collector.Spans(), func(s telemetrytest.Span) bool { return s.Name != "deliver event" })
	require.Len(t, spans, 2, "what was in no trace begins none")
	for _, s := range spans {
		require.Equal(t, span, s.Parent())
		require.True(t, headers[s.ID()], "the header is the span of the try")
	}
	require.Equal(t, "status 503", spans[0].GetStatus().GetMessage())
}

func TestASlowEndpointDelaysNoOther(t *testing.T) {
	h := newHouse(t)
	release := make(chan struct{})
	slow := listen(t, func(http.ResponseWriter, request) { <-release })
	fast := listen(t, nil)
	defer close(release)
	h.create(webhook.Webhook{URL: slow.URL, Types: []string{"apps.environment"}})
	h.create(webhook.Webhook{URL: fast.URL, Types: []string{"apps.environment"}})
	h.number()
	defer h.start(slow, fast)()
	h.happen("apps.environment.removed", "a", "b", "c")
	require.Equal(t, []string{"a"}, slow.subjects(1))
	require.Equal(t, []string{"a", "b", "c"}, fast.subjects(3))
	require.Empty(t, slow.got)
}

func TestLaw10AWebhookSendsWhatItsOwnerMaySeeNow(t *testing.T) {
	h := newHouse(t)
	e := listen(t, nil)
	made := h.create(webhook.Webhook{URL: e.URL})
	h.number()
	require.Equal(t, webhook.Active, made.Webhook.Status)
	stop := h.start(e)
	require.Contains(t, (<-e.got).body, "iam.webhook.created")
	acme, main := h.org, h.project
	h.org, h.project = iam.Org{ID: db.NewID()}, iam.Project{ID: db.NewID()}
	h.happen("apps.environment.removed", "of another org")
	h.org, h.project = acme, main
	h.happen("apps.environment.removed", "mine")
	require.Equal(t, "mine", (<-e.got).subject())
	h.happen("fleet.join_token.created", "of the platform, for its admins")
	h.happen("apps.environment.removed", "mine again")
	require.Equal(t, "mine again", (<-e.got).subject())
	// What counts are the rights at the delivery, not those when it happened.
	stop()
	h.happen("apps.environment.removed", "while it was off")
	h.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE role_bindings SET role = 'viewer' WHERE user_id = $1`, h.owner.ID)
		return err
	})
	defer h.start(e)()
	w := h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Status == webhook.Disabled })
	require.Equal(t, webhook.OwnerNotAllowed, w.DisabledReason)
	require.Empty(t, e.got)
}

func TestAnEventThatFailsTooOftenIsADeadLetterUntilItIsReplayed(t *testing.T) {
	h := newHouse(t)
	var broken sync.Mutex
	wrong := true
	e := listen(t, func(w http.ResponseWriter, r request) {
		broken.Lock()
		defer broken.Unlock()
		if r.subject() == "poison" && wrong {
			http.Error(w, "a text that is shown to nobody", http.StatusInternalServerError)
		}
	})
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	h.number()
	defer h.start(e)()
	h.happen("apps.environment.removed", "poison", "good")
	got := e.subjects(MaxTries + 1)
	require.Equal(t, "good", got[MaxTries])
	letters := h.letters(made.Webhook.ID)
	require.Len(t, letters, 1)
	require.Equal(t, "status 500", letters[0].LastError)
	require.Equal(t, MaxTries, letters[0].Tries)

	replay := func(key string) {
		_, err := h.commands.ReplayWebhook(t.Context(), h.meta(key), h.org.ID, made.Webhook.ID, "")
		require.NoError(t, err)
		require.Equal(t, "poison", (<-e.got).subject())
	}
	replay("too early")
	require.Eventually(t, func() bool {
		l := h.letters(made.Webhook.ID)
		return l[0].Tries == MaxTries+1 && !l[0].Replaying
	}, time.Minute, 10*time.Millisecond)
	broken.Lock()
	wrong = false
	broken.Unlock()
	replay("repaired")
	require.Eventually(t, func() bool { return len(h.letters(made.Webhook.ID)) == 0 }, time.Minute, 10*time.Millisecond)
}

func TestAWebhookThatFailsForLongIsDisabledAndGoesOnWhereItStopped(t *testing.T) {
	for reason, status := range map[webhook.Reason]int{webhook.Failing: 500, webhook.Gone: http.StatusGone} {
		t.Run(string(reason), func(t *testing.T) {
			h := newHouse(t)
			tries := 0
			e := listen(t, func(w http.ResponseWriter, _ request) {
				if tries++; tries == 2 {
					h.pass(disableAfter)
				}
				if tries <= MaxTries {
					w.WriteHeader(status)
				}
			})
			made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
			h.number()
			defer h.start(e)()
			h.happen("apps.environment.removed", "a")
			w := h.until(made.Webhook.ID, func(w webhook.Webhook) bool { return w.Status == webhook.Disabled })
			require.Equal(t, reason, w.DisabledReason)
			types, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) ([]event.Event, error) {
				return event.BySubject(t.Context(), tx, event.SubjectQuery{Subject: made.Webhook.ID})
			})
			require.NoError(t, err)
			require.Equal(t, "iam.webhook.disabled", types[len(types)-1].Type)
			tries = MaxTries
			for len(e.got) > 0 {
				<-e.got
			}
			_, err = h.commands.EnableWebhook(t.Context(), h.meta("enable"), h.org.ID, made.Webhook.ID)
			require.NoError(t, err)
			require.Equal(t, "a", (<-e.got).subject())
		})
	}
}

func TestAWebhookGoesOnWithTheOldestEventThatIsKept(t *testing.T) {
	h := newHouse(t)
	e := listen(t, func(http.ResponseWriter, request) {})
	h.happen("apps.environment.removed", "before")
	made := h.create(webhook.Webhook{URL: e.URL, Types: []string{"apps.environment"}})
	require.Positive(t, made.Webhook.Pos)
	h.number()
	h.happen("apps.environment.removed", "a", "b", "c")
	h.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `DELETE FROM events WHERE pos < (SELECT max(pos) FROM events)`)
		return err
	})
	h.tail = event.NewTail(h.d) // that of a hub which starts now
	require.NoError(t, h.tail.Pass(t.Context()))
	defer h.start(e)()
	require.Equal(t, "c", (<-e.got).subject())
}
