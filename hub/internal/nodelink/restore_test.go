package nodelink_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"io"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// remembered is a backup of the rows.
type remembered struct {
	versions []int64
	tables   []db.Table
	rows     [][]byte
}

func (h *hub) remember() (r remembered) {
	h.t.Helper()
	require.NoError(h.t, db.WithDump(h.t.Context(), h.d, func(d *db.Dump) error {
		r.versions, r.tables = d.Versions, d.Tables
		for _, t := range d.Tables {
			var rows bytes.Buffer
			if _, err := d.Copy(h.t.Context(), t, &rows); err != nil {
				return err
			}
			r.rows = append(r.rows, rows.Bytes())
		}
		return nil
	}))
	return r
}

// restored is a hub that came back from these rows, with a new epoch.
func (h *hub) restored(r remembered) *hub {
	t := h.t
	t.Helper()
	d, err := db.Open(t.Context(), dbtest.EmptyURL(t))
	require.NoError(t, err)
	t.Cleanup(d.Close)
	next := -1
	require.NoError(t, db.Load(t.Context(), d, r.versions, func() (db.Table, io.Reader, bool, error) {
		if next++; next == len(r.tables) {
			return db.Table{}, nil, false, nil
		}
		return r.tables[next], bytes.NewReader(r.rows[next]), true, nil
	}))
	bundle, err := trust.NewEpoch(trust.EpochOptions{
		TrustDir: filepath.Join(h.trustInit.DataDir, "trust"), Root: trust.RootKey(filepath.Join(h.trustInit.OfflineDir,
			trust.RootKeyFile), passphrase), Now: time.Now(),
	})
	require.NoError(t, err)
	require.NoError(t, recovery.Begin(t.Context(), d, recovery.Restore{
		ID: db.NewID(), BackupID: db.NewID(), TakenAt: h.now(), Epoch: bundle.Epoch(), At: h.now().Truncate(time.Microsecond),
	}))
	return (&hub{t: t, d: d, trustInit: h.trustInit, project: h.project, user: h.user}).start()
}

func (h *hub) instance(id string) instance.Instance {
	h.t.Helper()
	return tx(h, func(ctx context.Context, tx db.Tx) (instance.Instance, error) {
		return instance.Get(ctx, tx, h.project.ID, id)
	})
}

func (h *hub) findings() map[string]string {
	h.t.Helper()
	out := map[string]string{}
	for _, f := range tx(h, func(ctx context.Context, tx db.Tx) ([]finding.Finding, error) {
		return finding.List(ctx, tx)
	}) {
		out[f.Kind] = f.ResourceID
	}
	return out
}

// holds is the hello of a node that has accepted the state.
func holds(incarnation string, state *protocol.DesiredState, env *protocol.Envelope) *protocol.Hello {
	h := hello(incarnation)
	sum := sha256.Sum256(env.GetPayload())
	h.Epoch, h.Generation, h.StateSha256 = state.GetEpoch(), state.GetGeneration(), sum[:]
	return h
}

func ready(i instance.Instance) *protocol.WorkloadStatus {
	return &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: uint64(i.Revision),
		Status: "ready", StartedAt: timestamppb.Now(), ReadyAt: timestamppb.Now(),
	}
}

// Law 16: a hub comes back from a backup that knows nothing of one instance and nothing of the end of another. It takes
// over what the node was told since, before it tells the node anything.
func TestLaw16ARestoredHubTakesOverWhatItsNodeWasTold(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	kept := h.launch()
	l.state(1)
	ended := h.launch()
	before, _ := l.state(2)
	l.report(before.GetGeneration(), ready(kept), ready(ended))
	backup := h.remember()

	made := h.launch()
	l.state(3)
	h.decommission(ended.ID)
	state, push := l.state(2)
	leases := h.leasesOf(l)
	l.report(state.GetGeneration(), ready(kept), ready(made), &protocol.WorkloadStatus{
		MemberId: ended.Members[0].ID, InstanceId: ended.ID, Status: "removed",
		Removal: &protocol.RemovalProof{At: timestamppb.Now(), Absent: protocol.RemovalKinds(), Incarnation: "i1"},
	})
	require.NoError(t, l.conn.Close(0, "the hub is gone"))

	again := h.restored(backup)
	n.h = again
	require.Equal(t, instance.Running, again.instance(ended.ID).Lifecycle.Status, "as the backup has it")
	l = n.connect(holds("i1", state, push.GetEnvelope()))
	require.True(t, l.welcome.GetRequestStateUpload())
	states := count(again, `SELECT count(*) FROM node_states`)
	require.NoError(t, again.dispatcher.SyncAll(t.Context()))
	require.Equal(t, states, count(again, `SELECT count(*) FROM node_states`), "nothing is compiled before the node has "+
		"spoken")
	_, err := (&command.Service{DB: again.d, EnqueueNode: again.dispatcher.Enqueue}).StopInstance(t.Context(),
		again.tenant("stop"),
		again.project.ID, kept.ID)
	require.Equal(t, "node_recovering", fault.As(err).Code)

	// In two messages, as a node does with much to tell.
	l.uploadState(&protocol.StateUpload{State: push.GetEnvelope(), Parts: push.GetParts()[:1]})
	l.uploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts()[1:], Leases: []*protocol.Envelope{leases},
		Bundle: n.bundle.Envelope(), Last: true,
	})
	bundle := next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	n.bundle, err = n.bundle.Succeed(bundle)
	require.NoError(t, err)
	l.accept("bundle", 0, n.bundle.Version())
	now, compiled := l.state(2)
	require.EqualValues(t, 2, now.GetEpoch(), "what was signed before the restore is older than anything since")
	require.ElementsMatch(t, push.GetParts(), compiled.GetParts(), "the very documents that the node was told before")

	require.Equal(t, map[string]string{finding.Instance: made.ID, finding.Gone: ended.ID},
		again.findings())
	l.reportOf(now, ready(kept), ready(made))
	require.Equal(t, instance.Running, again.instance(kept.ID).Lifecycle.Status)
	require.Equal(t, instance.Running, again.instance(made.ID).Lifecycle.Status)
	require.Equal(t, instance.Decommissioned, again.instance(ended.ID).Lifecycle.Status,
		"the node is through with it, and says nothing of it")
	require.Equal(t, 1, count(again, `SELECT count(*) FROM leases WHERE subject_id = $1`, made.Members[0].ID))
	require.Zero(t, count(again, `SELECT count(*) FROM nodes WHERE resync <> ''`))
	require.Zero(t,
		count(again,
			`SELECT count(*) FROM (SELECT posting_id FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0) x`))
}

// Law 16: what a restored hub has not heard of keeps its place.
func TestLaw16WhatARestoredHubHasNotHeardOfKeepsItsCapacity(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	h.launch()
	l.state(1)
	again := h.restored(h.remember())
	n.h = again
	ask := func(key string) error {
		_, err := (&command.Service{DB: again.d}).CreateAllocation(t.Context(), again.tenant(key),
			command.CreateAllocationInput{
				ProjectID: again.project.ID, Shape: "gpu_slice", CPUCores: 1, MemoryMiB: 512,
			})
		return err
	}
	require.Equal(t, "insufficient_capacity", fault.As(ask("away")).Code, "its node is away")
	n.connect(hello("i1"))
	require.Equal(t, "insufficient_capacity", fault.As(ask("waiting")).Code, "its node has not said what it runs")
	require.Equal(t, 1, count(again, `SELECT count(*) FROM allocations WHERE released_at IS NULL`))
}

// Law 16: a node that was enrolled after the backup is no stranger, and what it runs goes on.
func TestLaw16ANodeEnrolledAfterTheBackupIsTakenIn(t *testing.T) {
	h := newHub(t)
	h.publish()
	backup := h.remember()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	made := h.launch()
	state, push := l.state(1)
	leases := h.leasesOf(l)
	again := h.restored(backup)
	n.h = again
	l = n.connect(holds("i1", state, push.GetEnvelope()))
	require.True(t, l.welcome.GetRequestStateUpload())
	l.uploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{leases},
		Bundle: n.bundle.Envelope(), Last: true,
	})
	require.Eventually(t, func() bool { return count(again, `SELECT count(*) FROM nodes WHERE resync = 'awaiting'`) == 0 },
		bound, 20*time.Millisecond)
	require.Equal(t, map[string]string{
		finding.Node: n.id, finding.Instance: made.ID,
		finding.Allocation: made.Members[0].AllocationID,
	}, again.findings())
	require.Equal(t, n.id, again.instance(made.ID).Members[0].NodeID)
}

// A certificate of before the restore has expired by then: whoever shows a newer one under an unknown id was never
// enrolled.
func TestANodeThatARestoredHubDoesNotKnowIsAStrangerOnceOldCertificatesHaveExpired(t *testing.T) {
	h := newHub(t)
	backup := h.remember()
	again := h.restored(backup)
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	last := tx(again, func(ctx context.Context, tx db.Tx) (recovery.Restore, error) {
		r, _, err := recovery.Last(ctx, tx)
		return r, err
	})
	admit := func(at time.Time) bool {
		return tx(again, func(ctx context.Context, tx db.Tx) (bool, error) {
			return recovery.AdoptUnknown(ctx, tx, db.NewID(), pub, at)
		})
	}
	require.True(t, admit(last.At.Add(trust.MaxNodeTTL)))
	require.False(t, admit(last.At.Add(trust.MaxNodeTTL+time.Second)))
}

// A state that this hub never signed is not taken over, and the node is not told anything by it either.
func TestLaw16AStateThatTheHubNeverSignedIsAFinding(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	kept := h.launch()
	state, push := l.state(1)
	again := h.restored(h.remember())
	n.h = again
	forged := &protocol.Envelope{
		PayloadType: push.GetEnvelope().GetPayloadType(),
		Payload:     push.GetEnvelope().GetPayload(), Signatures: []*protocol.Signature{{KeyId: "x", Signature: []byte("y")}},
	}
	l = n.connect(holds("i1", state, push.GetEnvelope()))
	l.uploadState(&protocol.StateUpload{State: forged, Parts: push.GetParts(), Last: true})
	require.Eventually(t, func() bool { return again.findings()[finding.Unverified] == n.id }, bound,
		20*time.Millisecond)
	require.NotEqual(t, instance.Decommissioning, again.instance(kept.ID).Lifecycle.Status)
}

// Law 16: the node had accepted the state and not yet the first lease of what is in it. Nobody else asks for one.
func TestLaw16AnAdoptedMemberWithoutALeaseGetsOne(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	backup := h.remember()
	made := h.launch()
	state, push := l.state(1)
	again := h.restored(backup)
	n.h = again
	l = n.connect(holds("i1", state, push.GetEnvelope()))
	l.uploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.bundle.Envelope(),
		Last: true,
	})
	bundle := next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	var err error
	n.bundle, err = n.bundle.Succeed(bundle)
	require.NoError(t, err)
	l.accept("bundle", 0, n.bundle.Version())
	l.state(1)
	require.NoError(t, again.dispatcher.Renew(t.Context()))
	require.Equal(t, made.Members[0].ID, l.pushedLeases().GetLeases()[0].GetMemberId())
}

// Law 16: the node's leases come from two batches, one from before the backup and one from after it. What ran is billed
// under the lease that it ran under, although its end is asked for before the hub gives any lease itself.
func TestLaw16LeasesOfAllBatchesAreTakenOver(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	h.launch()
	l.state(1)
	before, backup := h.leasesOf(l), h.remember()
	made := h.launch()
	state, push := l.state(2)
	list := tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, n.id)
	})
	list = slices.DeleteFunc(list, func(l *protocol.Lease) bool { return l.GetMemberId() != made.Members[0].ID })
	again := h.restored(backup)
	n.h = again
	l = n.connect(holds("i1", state, push.GetEnvelope()))
	l.uploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{before, h.batchOf(l, list...)},
		Bundle: n.bundle.Envelope(), Last: true,
	})
	require.Eventually(t, func() bool { return count(again, `SELECT count(*) FROM nodes WHERE resync = 'awaiting'`) == 0 },
		bound, 20*time.Millisecond)
	require.Equal(t, 1, count(again, `SELECT count(*) FROM leases WHERE subject_id = $1`, made.Members[0].ID))
	require.Equal(t, 1, count(again, `SELECT count(*) FROM postings WHERE app_instance_id = $1`, made.ID),
		"what its lease may cost is held")
}

func (l *line) uploadState(b *protocol.StateUpload) {
	l.t.Helper()
	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_StateUpload{StateUpload: b}})
}

// reportOf is report under the state's own epoch.
func (l *line) reportOf(s *protocol.DesiredState, statuses ...*protocol.WorkloadStatus) {
	l.t.Helper()
	l.counter++
	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: l.counter, At: timestamppb.Now(), Epoch: s.GetEpoch(), Generation: s.GetGeneration(), Workloads: statuses,
	}}})
	next(l, func(m *protocol.HubMessage) (bool, bool) { return true, m.GetReportAck().GetCounter() == l.counter })
}

// leasesOf is the newest batch for the node, signed as the hub signs it.
func (h *hub) leasesOf(l *line) *protocol.Envelope {
	h.t.Helper()
	list := tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, l.node.id)
	})
	return h.batchOf(l, list...)
}

func (h *hub) batchOf(l *line, list ...*protocol.Lease) *protocol.Envelope {
	h.t.Helper()
	env, err := protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{
		NodeId: l.node.id, Incarnation: "i1",
		Epoch: 1, IssuedAt: timestamppb.Now(), Leases: list,
	}, h.keys.Lease())
	require.NoError(h.t, err)
	return env
}
