package httpapi

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/protocol"
)

// reportVolumes applies what the node says of its volumes.
func (s *theater) reportVolumes(t *testing.T, volumes ...*protocol.VolumeStatus) {
	t.Helper()
	s.reports++
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		return nodes.ApplyReport(ctx, tx, nodes.Report{
			Report: instance.Report{NodeID: s.node, SessionNo: 1, Counter: s.reports}, Volumes: volumes,
		}, s.clock())
	})
}

func TestVolumesOverREST(t *testing.T) {
	s := &theater{house: newHouse(t)}
	_, projectID, boss := s.tenant(t, "acme")
	_, strangeProject, stranger := s.tenant(t, "other")
	s.open(t)
	path := "/projects/" + projectID + "/volumes"
	const body = `{"name":"models","size_mib":64}`

	require.Equal(t, "placement_required", s.ask(t, boss, "POST", path, "k0", body).text("code"), "no allocation, no node")
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	require.Equal(t, 422, s.ask(t, stranger, "POST", "/projects/"+strangeProject+"/volumes", "k2",
		`{"name":"models","size_mib":64,"allocation_id":"`+allocation+`"}`).status, "another tenant's allocation")
	made := s.must(t, boss, "POST", path, "k3", body, 201)
	require.Equal(t, "pending", made.text("status"))
	require.Equal(t, s.node, made.text("node_id"))
	require.InDelta(t, 64, made.body["size_mib"], 0)
	again := s.must(t, boss, "POST", path, "k3", body, 201)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.JSONEq(t, made.raw, again.raw)
	require.Equal(t, "volume_exists", s.ask(t, boss, "POST", path, "k4", body).text("code"))
	for invalid, status := range map[string]int{
		`{"name":"x","size_mib":8}`: 400, `{"name":"../x","size_mib":64}`: 400, `{"name":"x"}`: 400,
		`{"name":"x","size_mib":64,"node_id":"` + s.node + `"}`: 400, `{"name":"x","size_mib":2048}`: 409,
		`{"name":"x","size_mib":64,"allocation_id":"` + someID + `"}`: 422,
	} {
		require.Equal(t, status, s.ask(t, boss, "POST", path, "k5", invalid).status, invalid)
	}

	s.useVolume(t, boss, stranger, projectID, strangeProject, made.text("id"))
	s.must(t, boss, "POST", path, "k13", body, 201) // the name is free again
}

// useVolume takes a volume from its first report to its deletion.
func (s *theater) useVolume(t *testing.T, boss, stranger, projectID, strangeProject, id string) {
	t.Helper()
	path := "/projects/" + projectID + "/volumes"
	one := path + "/" + id
	require.Equal(t, "volume_status", s.ask(t, boss, "POST", one+"/snapshots", "k6", `{}`).text("code"), "not made yet")
	s.reportVolumes(t, &protocol.VolumeStatus{
		Id: id, Status: protocol.VolumeStatus_PENDING, Reason: "volume_no_space", Detail: "The disk is full.",
	})
	lacking := s.must(t, boss, "GET", one, "", "", 200)
	require.Equal(t, "volume_no_space", lacking.text("status_reason"))
	require.Equal(t, "The disk is full.", lacking.text("detail"))
	s.reportVolumes(t, &protocol.VolumeStatus{Id: id, Status: protocol.VolumeStatus_READY})
	ready := s.must(t, boss, "GET", one, "", "", 200)
	require.Equal(t, "ready", ready.text("status"))
	require.NotContains(t, ready.body, "status_reason")

	snapshot := s.must(t, boss, "POST", one+"/snapshots", "k7", `{"description":"before"}`, 201)
	require.Equal(t, "pending", snapshot.text("status"))
	require.JSONEq(t, snapshot.raw, s.must(t, boss, "POST", one+"/snapshots", "k7", `{"description":"before"}`, 201).raw)
	sid := snapshot.text("id")
	restore := `{"snapshot_id":"` + sid + `"}`
	require.Equal(t, 409, s.ask(t, boss, "POST", one+"/restore", "k8", restore).status, "not taken yet")
	s.reportVolumes(t, &protocol.VolumeStatus{
		Id: id, Status: protocol.VolumeStatus_READY,
		Snapshots: []*protocol.SnapshotStatus{{Id: sid, Status: protocol.VolumeStatus_READY}},
	})
	require.Equal(t, "ready", s.must(t, boss, "GET", one+"/snapshots/"+sid, "", "", 200).text("status"))
	require.Len(t, items(s.must(t, boss, "GET", one+"/snapshots", "", "", 200)), 1)
	require.Equal(t, 422, s.ask(t, boss, "POST", one+"/restore", "k9", `{"snapshot_id":"`+someID+`"}`).status)
	require.Equal(t, "restoring", s.must(t, boss, "POST", one+"/restore", "k10", restore, 202).text("status"))
	require.Equal(t, 409, s.ask(t, boss, "DELETE", one+"/snapshots/"+sid, "", "").status, "it is being read")
	s.reportVolumes(t, &protocol.VolumeStatus{Id: id, Status: protocol.VolumeStatus_READY})
	require.Equal(t, "restoring", s.must(t, boss, "GET", one, "", "", 200).text("status"), "the report is older")
	s.reportVolumes(t, &protocol.VolumeStatus{Id: id, Status: protocol.VolumeStatus_READY, RestoreNo: 1})
	require.Equal(t, "ready", s.must(t, boss, "GET", one, "", "", 200).text("status"))

	// To another tenant nothing of it exists.
	for _, at := range []string{one, one + "/snapshots", one + "/snapshots/" + sid} {
		require.Equal(t, 404, s.ask(t, stranger, "GET", at, "", "").status, at)
		elsewhere := "/projects/" + strangeProject + at[len("/projects/"+projectID):]
		require.Equal(t, 404, s.ask(t, stranger, "GET", elsewhere, "", "").status, elsewhere)
	}
	for _, at := range []string{one, one + "/snapshots/" + sid} {
		require.Equal(t, 404, s.ask(t, stranger, "DELETE", at, "", "").status, at)
	}
	require.Equal(t, 404, s.ask(t, stranger, "POST", one+"/snapshots", "k11", `{}`).status)
	require.Equal(t, 404, s.ask(t, stranger, "POST", one+"/restore", "k12", restore).status)

	require.Equal(t, "deleting", s.must(t, boss, "DELETE", one+"/snapshots/"+sid, "", "", 202).text("status"))
	s.reportVolumes(t, &protocol.VolumeStatus{
		Id: id, Status: protocol.VolumeStatus_READY, RestoreNo: 1,
		Snapshots: []*protocol.SnapshotStatus{{Id: sid, Status: protocol.VolumeStatus_DELETED}},
	})
	require.Equal(t, "deleted", s.must(t, boss, "GET", one+"/snapshots/"+sid, "", "", 200).text("status"))
	require.Empty(t, items(s.must(t, boss, "GET", one+"/snapshots", "", "", 200)))
	require.Equal(t, "deleting", s.must(t, boss, "DELETE", one, "", "", 202).text("status"))
	require.Equal(t, "deleting", s.must(t, boss, "DELETE", one, "", "", 202).text("status"), "once more")
	require.Len(t, items(s.must(t, boss, "GET", path, "", "", 200)), 1)
	s.reportVolumes(t, &protocol.VolumeStatus{Id: id, Status: protocol.VolumeStatus_DELETED})
	require.Equal(t, "deleted", s.must(t, boss, "GET", one, "", "", 200).text("status"))
	require.Empty(t, items(s.must(t, boss, "GET", path, "", "", 200)))
	require.Len(t, items(s.must(t, boss, "GET", path+"?status=deleted", "", "", 200)), 1)
}
