package event_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func at(seconds int) time.Time { return time.Unix(1_800_000_000+int64(seconds), 0).UTC() }

func appendEvents(t *testing.T, d *db.DB, events ...event.Event) {
	t.Helper()
	err := db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		for _, e := range events {
			if err := event.Append(t.Context(), tx, e); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, err)
}

// inOrder returns the events of the subjects in the order of their positions.
func inOrder(t *testing.T, d *db.DB, subjects ...string) (events []event.Event) {
	t.Helper()
	for _, subject := range subjects {
		own, err := db.ReadTx(t.Context(), d, func(tx db.Tx) ([]event.Event, error) {
			return event.BySubject(t.Context(), tx, event.SubjectQuery{Subject: subject})
		})
		require.NoError(t, err)
		events = append(events, own...)
	}
	slices.SortFunc(events, func(a, b event.Event) int { return cmp.Compare(a.Pos, b.Pos) })
	return events
}

func TestEventAndAuditRowVanishWithTheirTransaction(t *testing.T) {
	d := dbtest.New(t)
	broken := errors.New("the command failed after telling")
	err := db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		require.NoError(t, event.Append(t.Context(), tx, event.Event{
			Type: "apps.instance.requested", Subject: "i",
			ResourceVersion: 1, At: at(0),
		}))
		require.NoError(t, event.Audit(t.Context(), tx, event.AuditRow{
			Actor: principal.Actor{Type: principal.User}, Action: "apps.instance.create",
			ResourceType: "app_instance", ResourceID: "i", At: at(0),
		}))
		return broken
	})
	require.ErrorIs(t, err, broken)

	_, err = db.ReadTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
		events, err := event.BySubject(t.Context(), tx, event.SubjectQuery{Subject: "i"})
		require.NoError(t, err)
		require.Empty(t, events)
		rows, err := event.AuditOf(t.Context(), tx, "app_instance", "i", 0)
		require.NoError(t, err)
		require.Empty(t, rows)
		return struct{}{}, nil
	})
	require.NoError(t, err)
}

func TestEventsOfASubjectAreListedByVersionAndByPage(t *testing.T) {
	d := dbtest.New(t)
	org, other := db.NewID(), db.NewID()
	appendEvents(
		t, d,
		event.Event{Type: "apps.instance.deploying", Subject: "i", ResourceVersion: 2, OrgID: org, At: at(2)},
		event.Event{Type: "apps.instance.requested", Subject: "i", ResourceVersion: 1, OrgID: org, At: at(1)},
		event.Event{Type: "apps.instance.running", Subject: "i", ResourceVersion: 3, OrgID: org, At: at(3)},
		event.Event{Type: "apps.instance.changed", Subject: "i", ResourceVersion: 3, OrgID: org, At: at(3)},
		event.Event{Type: "apps.instance.stopped", Subject: "j", ResourceVersion: 1, OrgID: org, At: at(4)},
	)
	list := func(q event.SubjectQuery) []string {
		events, err := db.ReadTx(t.Context(), d, func(tx db.Tx) ([]event.Event, error) {
			return event.BySubject(t.Context(), tx, q)
		})
		require.NoError(t, err)
		var types []string
		for _, e := range events {
			types = append(types, e.Type)
		}
		return types
	}
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running",
		"apps.instance.changed",
	}, list(event.SubjectQuery{Subject: "i", OrgID: org}))
	require.Empty(t, list(event.SubjectQuery{Subject: "i", OrgID: other}), "another org's events do not exist")

	var seen []string
	cursor := ""
	for {
		page, err := db.ReadTx(t.Context(), d, func(tx db.Tx) ([]event.Event, error) {
			return event.BySubject(t.Context(), tx, event.SubjectQuery{Subject: "i", After: cursor, Limit: 1})
		})
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		seen = append(seen, page[0].Type)
		cursor = page[0].Cursor()
	}
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running",
		"apps.instance.changed",
	}, seen)

	for _, bad := range []string{"x", "1.", ".", "-1." + db.NewID(), "1.not-an-id", "9999999999999999999999." +
		db.NewID()} {
		_, err := db.ReadTx(t.Context(), d, func(tx db.Tx) ([]event.Event, error) {
			return event.BySubject(t.Context(), tx, event.SubjectQuery{Subject: "i", After: bad})
		})
		require.True(t, fault.Is(err, fault.Malformed), "cursor %q: %v", bad, err)
	}
}

func TestAuditRedactsSecretsAndKeepsNumbers(t *testing.T) {
	d := dbtest.New(t)
	err := db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		return event.Audit(t.Context(), tx, event.AuditRow{
			Actor: principal.Actor{Type: principal.User, ID: "u"}, Action: "iam.service_account.create",
			ResourceType: "service_account",
			ResourceID:   "s", At: at(0),
			After: map[string]any{
				"name": "ci", "nanos": int64(9007199254740993),
				"key": map[string]any{"private_key_pem": "-----BEGIN"},
			},
		})
	})
	require.NoError(t, err)
	rows, err := db.ReadTx(t.Context(), d, func(tx db.Tx) ([]event.AuditRow, error) {
		return event.AuditOf(t.Context(), tx, "service_account", "s", 0)
	})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.Equal(t, event.Done, rows[0].Outcome)
	require.Nil(t, rows[0].Before)
	text, err := json.Marshal(rows[0].After)
	require.NoError(t, err)
	require.NotContains(t, string(text), "BEGIN")
	require.Contains(t, string(text), "9007199254740993")
}

func TestPositionsAreDenseAndFollowVersions(t *testing.T) {
	d := dbtest.New(t)
	org := db.NewID()
	// The clock of the hub that wrote version 2 was behind: its id is the lower one.
	early, late := db.NewID(), db.NewID()
	appendEvents(
		t, d,
		event.Event{ID: late, Type: "apps.instance.requested", Subject: "i", ResourceVersion: 1, OrgID: org, At: at(1)},
		event.Event{ID: early, Type: "apps.instance.deploying", Subject: "i", ResourceVersion: 2, OrgID: org, At: at(0)},
		event.Event{Type: "apps.instance.failed", Subject: "j", ResourceVersion: 1, At: at(2)},
	)
	seq := &event.Sequencer{DB: d, Holder: "hub-1", Now: func() time.Time { return at(0) }}
	n, err := seq.Number(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, n)
	all := inOrder(t, d, "i", "j")
	require.Len(t, all, 3)
	for i, e := range all {
		require.Equal(t, int64(i+1), e.Pos)
	}
	require.Equal(t, []string{"apps.instance.requested", "apps.instance.deploying", "apps.instance.failed"},
		[]string{all[0].Type, all[1].Type, all[2].Type})
}

func TestOnlyTheHolderNumbersUntilItsLeaseEnds(t *testing.T) {
	d := dbtest.New(t)
	now := at(0)
	one := &event.Sequencer{DB: d, Holder: "hub-1", Now: func() time.Time { return now }}
	two := &event.Sequencer{DB: d, Holder: "hub-2", Now: func() time.Time { return now }}
	pass := func(s *event.Sequencer) int {
		n, err := s.Number(t.Context())
		require.NoError(t, err)
		return n
	}
	appendEvents(t, d, event.Event{Type: "apps.instance.requested", Subject: "i", ResourceVersion: 1, At: now})
	require.Equal(t, 1, pass(one))
	appendEvents(t, d, event.Event{Type: "apps.instance.deploying", Subject: "i", ResourceVersion: 2, At: now})
	require.Zero(t, pass(two), "the lease is another's")
	now = now.Add(time.Minute)
	require.Equal(t, 1, pass(two), "the holder fell silent")
	appendEvents(t, d, event.Event{Type: "apps.instance.running", Subject: "i", ResourceVersion: 3, At: now})
	require.Zero(t, pass(one), "and lost its lease")
}

// interrupted calls before once, before its first Exec.
type interrupted struct {
	db.Tx
	before *sync.Once
	do     func()
}

func (i interrupted) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	i.before.Do(i.do)
	return i.Tx.Exec(ctx, sql, args...)
}

// What a hub has read before it has the lease, another may have numbered meanwhile.
func TestTheFirstLeaseIsHeldBeforeEventsAreRead(t *testing.T) {
	d := dbtest.New(t)
	one := &event.Sequencer{DB: d, Holder: "hub-1", Now: func() time.Time { return at(0) }}
	two := &event.Sequencer{DB: d, Holder: "hub-2", Now: func() time.Time { return at(3600) }} // for it, the lease is over
	appendEvents(t, d, event.Event{Type: "apps.instance.requested", Subject: "i", ResourceVersion: 1, At: at(0)})
	var before sync.Once
	two.WithTx(func(tx db.Tx) db.Tx {
		return interrupted{tx, &before, func() {
			n, err := one.Number(t.Context())
			require.NoError(t, err)
			require.Equal(t, 1, n)
		}}
	})
	n, err := two.Number(t.Context())
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, int64(1), inOrder(t, d, "i")[0].Pos)
}

func TestNumbersStayDenseWhileManyWrite(t *testing.T) {
	d := dbtest.New(t)
	const writers, each = 6, 15
	ctx, cancel := context.WithCancel(t.Context())
	var sequencing, writing sync.WaitGroup
	for _, holder := range []string{"hub-1", "hub-2"} {
		sequencing.Go(func() {
			s := &event.Sequencer{DB: d, Holder: holder, Now: func() time.Time { return at(0) }}
			for ctx.Err() == nil {
				if _, err := s.Number(ctx); err != nil && ctx.Err() == nil {
					t.Errorf("%s: %v", holder, err)
				}
			}
		})
	}
	var subjects []string
	for w := range writers {
		subject := string(rune('a' + w))
		subjects = append(subjects, subject)
		writing.Go(func() {
			for i := range each {
				err := db.WriteTx(ctx, d, func(tx db.Tx) error {
					return event.Append(ctx, tx, event.Event{
						Type: "apps.instance.changed", Subject: subject,
						ResourceVersion: int64(i + 1), At: at(i),
					})
				})
				if err != nil {
					t.Errorf("writer %d: %v", w, err)
				}
			}
		})
	}
	writing.Wait()
	cancel()
	sequencing.Wait()
	last := &event.Sequencer{DB: d, Holder: "hub-1", Now: func() time.Time { return at(3600) }}
	_, err := last.Number(t.Context())
	require.NoError(t, err)

	all := inOrder(t, d, subjects...)
	require.Len(t, all, writers*each)
	version := map[string]int64{}
	for i, e := range all {
		require.Equal(t, int64(i+1), e.Pos)
		require.Equal(t, version[e.Subject]+1, e.ResourceVersion, "the versions of one subject are numbered in order")
		version[e.Subject]++
	}
}

func TestCloudEventHoldsWhatTheContractNames(t *testing.T) {
	org, project, id := db.NewID(), db.NewID(), db.NewID()
	const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	e := event.Event{
		ID: id, Type: "apps.instance.running", Subject: "i", ResourceVersion: 4, OrgID: org, ProjectID: project,
		CorrelationID: "c", Traceparent: traceparent,
		Data: map[string]any{"from": "deploying", "to": "running", "event_id": "forged"}, At: at(1),
	}
	ce, err := e.CloudEvent()
	require.NoError(t, err)
	raw, err := json.Marshal(ce)
	require.NoError(t, err)
	require.JSONEq(t, `{"specversion":"1.0","id":"`+id+
		`","source":"urn:gpuaas:hub","type":"apps.instance.running","subject":"i","time":"2027-01-15T08:00:01Z",
		"datacontenttype":"application/json","resourceversion":4,"traceparent":"`+traceparent+`",
		"data":{"event_id":"`+id+`","correlation_id":"c","trace_id":"0af7651916cd43dd8448eb211c80319c",
		"org_id":"`+org+`","project_id":"`+project+`","from":"deploying","to":"running"}}`, string(raw))
}
