package recovery_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// holds is the hello of a node that has accepted the state.
func holds(incarnation string, state *protocol.DesiredState, env *protocol.Envelope) *protocol.Hello {
	h := hubtest.Hello(incarnation)
	sum := sha256.Sum256(env.GetPayload())
	h.Epoch, h.Generation, h.StateSha256 = state.GetEpoch(), state.GetGeneration(), sum[:]
	return h
}

// takeBundle accepts the trust bundle that a restored hub pushes first.
func takeBundle(t *testing.T, n *hubtest.Node, l *hubtest.Session) {
	t.Helper()
	bundle := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	var err error
	n.Bundle, err = n.Bundle.Succeed(bundle)
	require.NoError(t, err)
	l.Ack(protocol.Envelope_BUNDLE, 0, n.Bundle.Version())
}

// Law 16: a hub comes back from a backup that knows nothing of one instance and nothing of the end of another. It takes
// over what the node was told since, before it tells the node anything.
func TestLaw16ARestoredHubTakesOverWhatItsNodeWasTold(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	kept := h.Launch()
	l.ExpectState(1)
	ended := h.Launch()
	before, _ := l.ExpectState(2)
	l.Report(before.GetGeneration(), hubtest.Ready(kept), hubtest.Ready(ended))
	backup := h.Backup()

	made := h.Launch()
	l.ExpectState(3)
	h.Decommission(ended.ID)
	state, push := l.ExpectState(2)
	leases := h.SignedLeases(l)
	l.Report(state.GetGeneration(), hubtest.Ready(kept), hubtest.Ready(made), &protocol.WorkloadStatus{
		MemberId: ended.Members[0].ID, InstanceId: ended.ID, Status: protocol.WorkloadStatus_REMOVED,
		Removal: &protocol.RemovalProof{At: timestamppb.Now(), Absent: protocol.RemovalKinds(), Incarnation: "i1"},
	})
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	require.Equal(t, lifecycle.Running, again.Instance(ended.ID).Lifecycle.Status, "as the backup has it")
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	require.True(t, l.Welcome.GetRequestStateUpload())
	states := hubtest.Count(again, `SELECT count(*) FROM node_states`)
	l.ReportState(state, hubtest.Ready(kept), hubtest.Ready(made)) // which may overtake the upload
	require.NoError(t, again.Dispatcher.SyncAll(t.Context()))
	require.Equal(t, states, hubtest.Count(again, `SELECT count(*) FROM node_states`), "nothing is compiled before the "+
		"node has "+
		"spoken")
	_, err := (&command.Service{DB: again.DB}).StopInstance(t.Context(),
		again.Tenant("stop"),
		again.Project.ID, kept.ID)
	require.EqualValues(t, "node_recovering", fault.As(err).Code)

	// In two messages, as a node does with much to tell.
	l.UploadState(&protocol.StateUpload{State: push.GetEnvelope(), Parts: push.GetParts()[:1]})
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts()[1:], Leases: []*protocol.Envelope{leases},
		Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	now, compiled := l.ExpectState(2)
	require.Greater(t, now.GetEpoch(), uint64(1), "what was signed before the restore is older than anything since")
	require.ElementsMatch(t, push.GetParts(), compiled.GetParts(), "the very documents that the node was told before")

	require.Equal(t, map[string]string{finding.Instance: made.ID, finding.Gone: ended.ID},
		again.Findings())
	l.ReportState(now, hubtest.Ready(kept), hubtest.Ready(made))
	require.Equal(t, lifecycle.Running, again.Instance(kept.ID).Lifecycle.Status)
	require.Equal(t, lifecycle.Running, again.Instance(made.ID).Lifecycle.Status)
	require.Equal(t, lifecycle.Decommissioned, again.Instance(ended.ID).Lifecycle.Status,
		"the node is through with it, and says nothing of it")
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM leases WHERE subject_id = $1`, made.Members[0].ID))
	require.Zero(t, hubtest.Count(again, `SELECT count(*) FROM nodes WHERE resync <> ''`))
	require.Zero(t,
		hubtest.Count(again,
			`SELECT count(*) FROM (SELECT posting_id FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0) x`))
}

// Law 16: a volume that was made after the backup goes on, and with it what uses it: the node is never told of one that
// it could take for given up.
func TestLaw16AVolumeMadeAfterTheBackupIsTakenOver(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	kept := h.Launch()
	before, _ := l.ExpectState(1)
	l.Report(before.GetGeneration(), hubtest.Ready(kept))
	backup := h.Backup()
	v, err := (&command.Service{DB: h.DB}).CreateVolume(t.Context(), h.Tenant("volume"), capacity.NewVolume{
		ProjectID: h.Project.ID, Name: "models", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	state, push := l.ExpectVolumes(1)
	require.Equal(t, v.ID, state.GetVolumes()[0].GetId())
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	now, _ := l.ExpectVolumes(1)
	require.True(t, proto.Equal(state.GetVolumes()[0], now.GetVolumes()[0]))
	require.Equal(t, map[string]string{finding.Volume: v.ID}, again.Findings())
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM volumes WHERE status = 'pending'`))
	require.Zero(t, hubtest.Count(again, `SELECT count(*) FROM subjects WHERE kind = 'volume'`), "it is not made yet")
}

func sshKey(t *testing.T) capacity.SSHKey {
	t.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	key, err := ssh.NewPublicKey(public)
	require.NoError(t, err)
	return capacity.SSHKey{User: "ubuntu", PublicKey: strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))}
}

func putSSHKeys(h *hubtest.Hub, of instance.Instance, managedBy string, keys ...capacity.SSHKey) {
	h.T.Helper()
	_, err := (&command.Service{DB: h.DB}).PutSSHKeys(h.T.Context(), h.Tenant("keys"+db.NewID()), h.Project.ID,
		of.Members[0].AllocationID, capacity.SSHKeySet{ManagedBy: managedBy, Keys: keys})
	require.NoError(h.T, err)
}

// Law 16: SSH keys are those of the newer state: one that was taken out after the backup stays out.
func TestLaw16SSHKeysAreThoseOfTheNewerState(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	kept := h.Launch()
	before, _ := l.ExpectState(1)
	l.Report(before.GetGeneration(), hubtest.Ready(kept))
	put := func(managedBy string, keys ...capacity.SSHKey) *protocol.PushState {
		putSSHKeys(h, kept, managedBy, keys...)
		_, push := l.ExpectSSHKeys(len(keys))
		return push
	}
	old, fresh := sshKey(t), sshKey(t)
	put(capacity.SSHKeysOfOperator, old)
	backup := h.Backup()
	put(capacity.SSHKeysOfOperator)
	push := put(capacity.SSHKeysOfApp, fresh)
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	state := &protocol.DesiredState{}
	require.NoError(t, proto.Unmarshal(push.GetEnvelope().GetPayload(), state))
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	now, _ := l.ExpectSSHKeys(1)
	require.True(t, proto.Equal(state.GetSshKeys()[0], now.GetSshKeys()[0]))
	require.Equal(t, capacity.SSHKeysOfApp, now.GetSshKeys()[0].GetManagedBy())
	require.Equal(t, 2, hubtest.Count(again, `SELECT count(*) FROM audit_rows WHERE resource_type = 'ssh_keys'
		AND actor_type = 'system'`), "both sets were others")
}

// Law 16: a key that was taken out before the backup stays out, whatever the node still has.
func TestLaw16SSHKeysOfAnOlderStateAreNotTakenOver(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	kept := h.Launch()
	before, _ := l.ExpectState(1)
	l.Report(before.GetGeneration(), hubtest.Ready(kept))
	putSSHKeys(h, kept, capacity.SSHKeysOfOperator, sshKey(t))
	state, push := l.ExpectSSHKeys(1)
	require.NoError(t, l.Conn.Close(0, "the node is away"))
	putSSHKeys(h, kept, capacity.SSHKeysOfOperator)

	n.Hub = h.Restore(h.Backup())
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	now := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.PushState, bool) {
		return m.GetPushState(), m.GetPushState() != nil
	})
	verified, err := protocol.VerifyState(now.GetEnvelope(), n.Bundle, n.Identity)
	require.NoError(t, err)
	require.Empty(t, verified.Message().GetSshKeys())
}

// Law 16: a member stays placed while its node awaits resync.
func TestLaw16ANodeThatAwaitsResyncKeepsItsCapacity(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	h.Launch()
	l.ExpectState(1)
	again := h.Restore(h.Backup())
	n.Hub = again
	ask := func(key string) error {
		_, err := (&command.Service{DB: again.DB}).CreateAllocation(t.Context(), again.Tenant(key),
			capacity.NewAllocation{
				ProjectID: again.Project.ID, Shape: "gpu_slice", CPUCores: 1, MemoryMiB: 512,
			})
		return err
	}
	require.EqualValues(t, "insufficient_capacity", fault.As(ask("away")).Code, "its node is away")
	n.Connect(hubtest.Hello("i1"))
	require.EqualValues(t, "insufficient_capacity", fault.As(ask("waiting")).Code, "its node has not said what it runs")
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM allocations WHERE released_at IS NULL`))
}

// Law 16: a node that was enrolled after the backup is no stranger, and what it runs goes on.
func TestLaw16ANodeEnrolledAfterTheBackupIsTakenIn(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	backup := h.Backup()
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	made := h.Launch()
	state, push := l.ExpectState(1)
	leases := h.SignedLeases(l)
	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	require.True(t, l.Welcome.GetRequestStateUpload())
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{leases},
		Bundle: n.Bundle.Envelope(), Last: true,
	})
	require.Eventually(t, func() bool {
		return hubtest.Count(again, `SELECT count(*) FROM nodes WHERE resync = 'awaiting'`) == 0
	},
		hubtest.Bound, 20*time.Millisecond)
	require.Equal(t, map[string]string{
		finding.Node: n.ID, finding.Instance: made.ID,
		finding.Allocation: made.Members[0].AllocationID,
	}, again.Findings())
	require.Equal(t, n.ID, again.Instance(made.ID).Members[0].NodeID)
}

// Law 16: the credit that was granted after the backup is lost with it. What it paid for goes on for a day, and an
// admin reads of it.
func TestLaw16WhatTheRestoredWalletDoesNotCoverGoesOnForADay(t *testing.T) {
	lo := loseHub(t)
	again := lo.restore()
	setWallets := func(nanos int64) {
		hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (any, error) {
			return tx.Exec(ctx, `UPDATE wallets SET balance_nanos = $1`, nanos)
		})
	}
	setWallets(0)
	last := hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (recovery.Restore, error) {
		r, _, err := recovery.Last(ctx, tx)
		if err != nil {
			return r, err
		}
		_, err = ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: ledger.MeterAllocationSeconds, Currency: "EUR", Nanos: 1_000_000_000, Per: "hour",
			From: r.At,
		}, r.At)
		return r, err
	})
	passes := periodic.Passes{DB: again.DB, Log: slog.New(slog.DiscardHandler)}
	accrue := func(after time.Duration) {
		t.Helper()
		require.NoError(t, passes.AccrueAllocations(t.Context(), last.At, last.At.Add(after)))
	}
	spared := map[string]string{finding.Lease: lo.kept.Members[0].AllocationID}
	accrue(time.Hour)
	require.Equal(t, spared, again.Findings())
	setWallets(1_000_000_000_000)
	accrue(2 * time.Hour)
	require.Empty(t, again.Findings(), "an admin has granted the credit again")
	setWallets(0)
	accrue(24*time.Hour - time.Second)
	require.Equal(t, spared, again.Findings())
	require.Equal(t, lifecycle.Running, again.Instance(lo.kept.ID).Lifecycle.Status)
	accrue(24 * time.Hour)
	require.Equal(t, lifecycle.Decommissioning, again.Instance(lo.kept.ID).Lifecycle.Status)
}

// Law 16: what an allocation of after the backup costs is billed from its adoption on, also where the wallet does not
// cover it at first.
func TestLaw16AnAdoptedAllocationIsBilledOnceItIsCovered(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (ledger.Price, error) {
		now := h.Now().Truncate(time.Microsecond)
		return ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: ledger.MeterAllocationSeconds, Currency: "EUR", Nanos: 3_600_000, Per: "hour", From: now,
		}, now)
	})
	lo := &lost{h: h, n: n, l: l, backup: h.Backup()}
	made := h.Launch()
	lo.holds(l.ExpectState(1))
	again := lo.restore()
	setWallets := func(nanos int64) {
		hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (any, error) {
			_, err := tx.Exec(ctx, `UPDATE wallets SET balance_nanos = $1`, nanos)
			return nil, err
		})
	}
	setWallets(0)
	lo.adopt(again)
	allocation := made.Members[0].AllocationID
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM subjects WHERE id = $1`, allocation))

	setWallets(1_000_000_000_000)
	last, passes := again.Now(), periodic.Passes{DB: again.DB, Log: slog.New(slog.DiscardHandler)}
	require.NoError(t, passes.AccrueAllocations(t.Context(), last, last.Add(time.Hour)))
	charged := hubtest.Count(again, `SELECT coalesce(sum(charged_nanos), 0)::int8 FROM usage_hours WHERE subject_id = $1`,
		allocation)
	require.InDelta(t, 3_600_000, charged, 360_000)
}

// A certificate of before the restore has expired by then: a newer one under an unknown id was never
// enrolled.
func TestANodeThatARestoredHubDoesNotKnowIsAStrangerOnceOldCertificatesHaveExpired(t *testing.T) {
	h := hubtest.New(t)
	backup := h.Backup()
	again := h.Restore(backup)
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	last := hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (recovery.Restore, error) {
		r, _, err := recovery.Last(ctx, tx)
		return r, err
	})
	admit := func(at time.Time) bool {
		return hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (bool, error) {
			return recovery.AdoptUnknown(ctx, tx, db.NewID(), pub, at)
		})
	}
	require.True(t, admit(last.At.Add(trust.MaxNodeTTL)))
	require.False(t, admit(last.At.Add(trust.MaxNodeTTL+time.Second)))
}

// A state that this hub never signed is not taken over, and the node is not told anything by it either.
func TestLaw16AStateThatTheHubNeverSignedIsAFinding(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	kept := h.Launch()
	state, push := l.ExpectState(1)
	again := h.Restore(h.Backup())
	n.Hub = again
	forged := &protocol.Envelope{
		PayloadType: push.GetEnvelope().GetPayloadType(),
		Payload:     push.GetEnvelope().GetPayload(), Signatures: []*protocol.Signature{{KeyId: "x", Signature: []byte("y")}},
	}
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{State: forged, Parts: push.GetParts(), Last: true})
	require.Eventually(t, func() bool { return again.Findings()[finding.Unverified] == n.ID }, hubtest.Bound,
		20*time.Millisecond)
	require.NotEqual(t, lifecycle.Decommissioning, again.Instance(kept.ID).Lifecycle.Status)
}

// Law 16: the node had accepted the state and not yet the first lease of what is in it. Nobody else asks for one.
func TestLaw16AnAdoptedMemberWithoutALeaseGetsOne(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	backup := h.Backup()
	made := h.Launch()
	state, push := l.ExpectState(1)
	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(),
		Last: true,
	})
	takeBundle(t, n, l)
	l.ExpectState(1)
	require.NoError(t, again.Dispatcher.Renew(t.Context()))
	require.Equal(t, made.Members[0].ID, l.ExpectLeases().GetLeases()[0].GetMemberId())
}

// Law 16: an app of several services is taken over with all of them, its capacity is their sum, and what was chosen is
// the main one's.
func TestLaw16AnAppOfSeveralServicesIsTakenOver(t *testing.T) {
	h, n, l := hubtest.NewWithServices(t)
	backup := h.Backup()
	made := h.Launch()
	state, push := l.ExpectState(1)
	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(), Last: true,
	})
	require.Eventually(t, func() bool { return len(again.Findings()) > 0 }, hubtest.Bound, 10*time.Millisecond)
	adopted := again.Instance(made.ID)
	require.EqualValues(t, 128, adopted.Resources.MemoryMiB)
	require.Equal(t, manifest.RuntimeDockerCompose, adopted.Modes.RuntimeBackend)
	services := hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (map[string][]*protocol.Service, error) {
		return instance.Topology(ctx, tx, adopted)
	})
	require.Len(t, services[made.Members[0].ID], 2)
	require.Equal(t, 192<<20, hubtest.Count(again, `SELECT memory_bytes FROM reservations WHERE member_id = $1`,
		made.Members[0].ID))
	require.Equal(t, 700, hubtest.Count(again, `SELECT cpu_millis FROM subjects WHERE id = $1`, made.Members[0].ID))
}

// Law 16: what the platform manages is taken over with its modes, and its allocation is the platform's, although the
// backup has neither; the node gets its documents as before.
func TestLaw16WhatThePlatformManagesIsTakenOver(t *testing.T) {
	h, n, l, platform, lend := hubtest.NewManaged(t)
	backup := h.Backup()
	lend()
	made := h.Launch()
	state, push := l.ExpectState(1)
	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	_, compiled := l.ExpectState(1)
	require.ElementsMatch(t, push.GetParts(), compiled.GetParts())
	adopted := again.Instance(made.ID)
	require.Equal(t, made.Modes, adopted.Modes)
	require.Equal(t, h.Project.ID, adopted.ProjectID)
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM allocations WHERE id = $1 AND project_id = $2`,
		made.Members[0].AllocationID, platform.ID))
}

// Law 16: the node's leases come from two batches, one from before the backup and one from after it. What ran is billed
// under the lease that it ran under, although its end is asked for before the hub gives any lease itself.
func TestLaw16LeasesOfAllBatchesAreTakenOver(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	h.Launch()
	l.ExpectState(1)
	before, backup := h.SignedLeases(l), h.Backup()
	made := h.Launch()
	state, push := l.ExpectState(2)
	list := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, n.ID)
	})
	list = slices.DeleteFunc(list, func(l *protocol.Lease) bool { return l.GetMemberId() != made.Members[0].ID })
	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{before, h.SignLeases(l, list...)},
		Bundle: n.Bundle.Envelope(), Last: true,
	})
	require.Eventually(t, func() bool {
		return hubtest.Count(again, `SELECT count(*) FROM nodes WHERE resync = 'awaiting'`) == 0
	},
		hubtest.Bound, 20*time.Millisecond)
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM leases WHERE subject_id = $1`, made.Members[0].ID))
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM postings WHERE app_instance_id = $1`, made.ID),
		"what its lease may cost is held")
}
