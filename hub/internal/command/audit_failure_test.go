package command_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

func TestDenialsAndFailuresAreInTheAuditTrail(t *testing.T) {
	d := dbtest.New(t)
	ctx := t.Context()
	audit := &command.Service{DB: d}
	known := command.Meta{
		Principal:     iam.Principal{Type: principal.User, ID: db.NewID()},
		Route:         "POST /things",
		CorrelationID: "c-1",
		SourceAddress: "192.0.2.7",
		Now:           time.Unix(1_800_000_000, 0).UTC(),
	}
	nobody := known
	nobody.Principal = iam.Principal{}
	require.NoError(t, audit.AuditFailure(ctx, known, command.Failure{
		Operation: "createOrg", Code: "forbidden",
		Denied: true,
	}))
	require.NoError(t, audit.AuditFailure(ctx, nobody, command.Failure{Operation: "createOrg", Code: "invalid_request"}))

	rows, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]event.AuditRow, error) {
		return event.AuditOf(ctx, tx, "operation", known.Route, 10)
	})
	require.NoError(t, err)
	require.Len(t, rows, 2)
	outcomes := map[string]event.AuditRow{}
	for _, r := range rows {
		require.Equal(t, "c-1", r.CorrelationID)
		require.Equal(t, "createOrg", r.Action)
		require.Equal(t, "192.0.2.7", r.SourceAddress)
		outcomes[r.Outcome] = r
	}
	require.Equal(t, known.Principal.ID, outcomes[event.Denied].Actor.ID)
	require.Equal(t, "forbidden", outcomes[event.Denied].Reason)
	require.Equal(t, principal.Anonymous, outcomes[event.Failed].Actor.Type)
	require.Equal(t, "invalid_request", outcomes[event.Failed].Reason)

	user, org := db.NewID(), db.NewID()
	require.NoError(t, audit.AuditFailure(ctx, nobody, command.Failure{
		Operation: "login", Code: "login_refused", Denied: true, OrgID: org, UserID: user, Unrecorded: 2,
	}))
	rows, err = db.ReadTx(ctx, d, func(tx db.Tx) ([]event.AuditRow, error) {
		return event.AuditOf(ctx, tx, "user", user, 10)
	})
	require.NoError(t, err)
	require.Len(t, rows, 1, "whoever administers the account sees who tries it")
	require.Equal(t, org, rows[0].OrgID)
	after, err := json.Marshal(rows[0].After)
	require.NoError(t, err)
	require.JSONEq(t, `{"unrecorded_before": 2}`, string(after))
}
