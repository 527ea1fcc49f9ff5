package httpapi

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/protocol"
)

// fleet has the operations on nodes beside those that open wires.
func TestNodesOverREST(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocations, node := "/projects/"+projectID+"/allocations", "/admin/nodes/"+s.node
	allocation := s.must(t, boss, "POST", allocations, "a", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)

	// Only a platform admin may; for all others nothing changes.
	for _, verb := range []string{"drain", "undrain", "remove"} {
		require.Equal(t, 403, s.ask(t, boss, "POST", node+"/"+verb, "no-"+verb, "").status)
	}
	require.Equal(t, "online", s.must(t, s.admin, "GET", node, "", "", 200).text("status"))

	require.Equal(t, "draining", s.must(t, s.admin, "POST", node+"/drain", "d1", "", 200).text("status"))
	require.Equal(t, "insufficient_capacity", s.must(t, boss, "POST", allocations, "full", sliceBody, 409).text("code"))
	require.Equal(t, "online", s.must(t, s.admin, "POST", node+"/undrain", "u1", "", 200).text("status"))
	require.Equal(t, "node_not_draining", s.must(t, s.admin, "POST", node+"/remove", "r1", "", 409).text("code"))
	s.must(t, s.admin, "POST", node+"/drain", "d2", "", 200)
	require.Equal(t, "node_in_use", s.must(t, s.admin, "POST", node+"/remove", "r2", "{}", 409).text("code"))
	require.Equal(t, "node_connected", s.must(t, s.admin, "POST", node+"/remove", "r3", `{"lost":true}`, 409).text("code"))

	s.wait(fleet.OnlineWindow)
	lost := s.must(t, s.admin, "POST", node+"/remove", "r4", `{"lost":true,"reason":"burnt down"}`, 200)
	require.Equal(t, "lost", lost.text("status"))
	require.Equal(t, "burnt down", lost.text("remove_reason"))
	require.Equal(t, lost.text("removed_at"), s.must(t, s.admin, "POST", node+"/remove", "r4",
		`{"lost":true,"reason":"burnt down"}`, 200).text("removed_at"))
	require.Equal(t, "node_lost", s.must(t, boss, "GET", allocations+"/"+allocation, "", "", 200).text("status"))
	got := s.must(t, boss, "GET", "/projects/"+projectID+"/app-instances/"+i.ID, "", "", 200)
	require.Equal(t, "failed", got.text("status"))
	require.Equal(t, "node_lost", got.text("status_reason"))
	ended := s.must(t, boss, "POST", "/projects/"+projectID+"/app-instances/"+i.ID+"/decommission", "end", "", 202)
	require.Equal(t, "decommissioned", ended.text("status"))
	require.Equal(t, "node_removed", s.must(t, s.admin, "POST", node+"/drain", "d3", "", 409).text("code"))
	require.Len(t, items(s.must(t, s.admin, "GET", "/admin/nodes?status=lost", "", "", 200)), 1)
	require.Equal(t, "banned", s.must(t, s.admin, "POST", node+"/ban", "b1", `{"reason":"stolen"}`, 200).text("status"))
}

// A node's detail shows what it refused, the newest first, and why it serves one org.
func TestANodeShowsItsRefusalsAndItsIsolation(t *testing.T) {
	s := &theater{house: newHouse(t)}
	s.tenant(t, "acme")
	s.open(t)
	for n, reason := range []string{"malformed", "stale"} {
		s.tx(t, func(ctx context.Context, tx db.Tx) error {
			_, err := fleet.RecordRefusal(ctx, tx, s.node, db.NewID(), fleet.Refusal{
				Document: protocol.Envelope_STATE.Text(), Epoch: 1, Generation: uint64(n + 1), Reason: reason,
				At: s.clock().Add(time.Duration(n) * time.Minute),
			})
			return err
		})
	}
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		_, err := fleet.ApplyReport(ctx, tx, fleet.Report{
			NodeID: s.node, SessionNo: 1, Counter: 99,
			Conditions: []string{protocol.ConditionRuncVulnerable},
		}, s.clock())
		return err
	})
	got := s.must(t, s.admin, "GET", "/admin/nodes/"+s.node, "", "", 200)
	var reasons []any
	for _, r := range got.body["refusals"].([]any) {
		reasons = append(reasons, r.(map[string]any)["reason"])
	}
	require.Equal(t, []any{"stale", "malformed"}, reasons)
	require.Equal(t, []any{protocol.ConditionRuncVulnerable}, got.body["one_org_because"])
}
