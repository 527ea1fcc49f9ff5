package command_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/protocol"
)

// auditOf returns the last audit row of a resource.
func (w *world) auditOf(resourceType, id string) (last event.AuditRow) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		rows, err := event.AuditOf(ctx, tx, resourceType, id, 0)
		require.NotEmpty(w.T, rows)
		last = rows[len(rows)-1]
		return err
	})
	return last
}

// A row says who did it, from where, and on behalf of whom a node did what a caller had asked for.
func TestAuditRowsSayWhoFromWhereAndOnBehalfOfWhom(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	m := w.Meta("create")
	m.SourceAddress = "192.0.2.7"
	i, err := w.Commands().CreateInstance(t.Context(), m, w.InstanceInput())
	require.NoError(t, err)
	row := w.auditOf("app_instance", i.ID)
	require.Equal(t, w.User.Actor(), row.Actor)
	require.Zero(t, row.OnBehalfOf)
	require.Equal(t, "192.0.2.7", row.SourceAddress)
	require.Equal(t, m.CorrelationID, row.CorrelationID)

	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	row = w.auditOf("app_instance", i.ID)
	require.Equal(t, principal.Actor{Type: principal.Node, ID: w.Node}, row.Actor)
	require.Equal(t, w.User.Actor(), row.OnBehalfOf)
	require.Empty(t, row.SourceAddress)
	require.Equal(t, m.CorrelationID, row.CorrelationID)
}

// A row of a node's change has its reason, and what it was before.
func TestAuditRowsOfNodesSayWhyAndWhatWasBefore(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.Commands().DrainNode(t.Context(), w.Admin("drain"), w.Node))
	require.NoError(t, w.Commands().BanNode(t.Context(), w.Admin("ban"), w.Node, "stolen"))
	row := w.auditOf("node", w.Node)
	require.Equal(t, "stolen", row.Reason)
	require.Equal(t, "draining", row.Before.(map[string]any)["status"])
	require.Equal(t, "banned", row.After.(map[string]any)["status"])
}

// A row of an upgrade has the version and the revision before and after it.
func TestAuditRowsOfUpgradesSayWhatWasBefore(t *testing.T) {
	w := newWorld(t)
	i := w.Upgraded()
	row := w.auditOf("app_instance", i.ID)
	require.Equal(t, map[string]any{"status": "running", "revision": json.Number("1"), "version": "1.0.0"}, row.Before)
	after, _ := row.After.(map[string]any)
	require.Equal(t, json.Number("2"), after["revision"])
	require.Equal(t, i.Version, after["version"])
}
