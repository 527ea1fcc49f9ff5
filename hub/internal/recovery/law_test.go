package recovery_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// lost is a hub that is lost after a backup, with what its node will upload to the restored one.
type lost struct {
	h      *hubtest.Hub
	n      *hubtest.Node
	l      *hubtest.Session
	backup hubtest.BackupRows
	// kept is an instance of before the backup, the only one.
	kept   instance.Instance
	state  *protocol.DesiredState
	upload *protocol.StateUpload
}

// loseHub takes a backup of a hub whose node runs one instance.
func loseHub(t *testing.T) *lost {
	t.Helper()
	h, n, l := hubtest.NewWithNode(t)
	kept := h.Launch()
	state, push := l.ExpectState(1)
	l.Report(state.GetGeneration(), hubtest.Ready(kept))
	lo := &lost{h: h, n: n, l: l, backup: h.Backup(), kept: kept}
	lo.holds(state, push)
	return lo
}

// holds notes the newest state that the node has accepted, and the leases with it.
func (lo *lost) holds(state *protocol.DesiredState, push *protocol.PushState) {
	lo.h.T.Helper()
	lo.state = state
	lo.upload = &protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{lo.h.SignedLeases(lo.l)},
		Bundle: lo.n.Bundle.Envelope(), Last: true,
	}
}

// launch makes an instance after the backup.
func (lo *lost) launch() instance.Instance {
	lo.h.T.Helper()
	made := lo.h.Launch()
	lo.holds(lo.l.ExpectState(2))
	return made
}

// restore restores the hub from the backup.
func (lo *lost) restore() *hubtest.Hub {
	lo.h.T.Helper()
	require.NoError(lo.h.T, lo.l.Conn.Close(0, "the hub is gone"))
	again := lo.h.Restore(lo.backup)
	lo.n.Hub = again
	return again
}

// uploads receives for a restored hub, as its sessions do.
func uploads(again *hubtest.Hub) *recovery.Uploads {
	return &recovery.Uploads{
		DB: again.DB, Bundles: again.Keys.Chain, Now: again.Now, Log: slog.New(slog.DiscardHandler),
	}
}

// adopt has the restored hub adopt what the node holds.
func (lo *lost) adopt(again *hubtest.Hub) {
	lo.h.T.Helper()
	adopted, err := uploads(again).Receive(again.T.Context(), lo.n.Identity, lo.upload)
	require.NoError(lo.h.T, err)
	require.True(lo.h.T, adopted)
}

// requireBalanced checks that every posting sums to zero.
func requireBalanced(t *testing.T, h *hubtest.Hub) {
	t.Helper()
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM (SELECT posting_id FROM entries
		GROUP BY posting_id, currency HAVING sum(amount_nanos) <> 0) x`))
}

// adoption is a change after a backup that an adoption makes good, with the table that shows it.
type adoption struct {
	table string
	make  func(t *testing.T) *lost
}

// after is a hub that is lost some time after a backup with one instance.
func after(change func(t *testing.T, lo *lost)) func(t *testing.T) *lost {
	return func(t *testing.T) *lost {
		t.Helper()
		lo := loseHub(t)
		change(t, lo)
		return lo
	}
}

// adoptions are one for each step that adoption has.
func adoptions() map[string]adoption {
	return map[string]adoption{
		"an instance":        {"app_instances", after(func(_ *testing.T, lo *lost) { lo.launch() })},
		"an uncovered lease": {"leases", after(launchBeyondCredit)},
		"an org":             {"orgs", loseHubBeforeOrg},
		"a missing document": {"recovery_findings", after(loseDocument)},
		"a volume":           {"volumes", after(addVolume)},
		"SSH keys":           {"ssh_key_sets", after(putSSHKey)},
		"an end": {"app_instances", after(func(_ *testing.T, lo *lost) {
			lo.h.Decommission(lo.kept.ID)
			lo.holds(lo.l.ExpectState(0))
		})},
		"a stop": {"app_instances", after(func(t *testing.T, lo *lost) {
			_, err := (&command.Service{DB: lo.h.DB}).StopInstance(t.Context(), lo.h.Tenant("stop"), lo.h.Project.ID,
				lo.kept.ID)
			require.NoError(t, err)
			lo.holds(lo.l.ExpectState(1))
		})},
	}
}

// loseHubBeforeOrg backs a hub up before it has an org.
func loseHubBeforeOrg(t *testing.T) *lost {
	t.Helper()
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	lo := &lost{h: h, n: n, l: l, backup: h.Backup()}
	h.PublishDemo()
	h.Launch()
	lo.holds(l.ExpectState(1))
	return lo
}

// launchBeyondCredit launches at a price of more than the backup's credit for an hour.
func launchBeyondCredit(t *testing.T, lo *lost) {
	t.Helper()
	hubtest.Tx(lo.h, func(ctx context.Context, tx db.Tx) (struct{}, error) {
		now := lo.h.Now().Truncate(time.Microsecond)
		if _, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID: lo.h.Project.OrgID, Currency: "EUR", Nanos: 100_000 * 1_000_000_000, Key: "second",
		}, now); err != nil {
			return struct{}{}, err
		}
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, Currency: "EUR", Nanos: 5000 * 1_000_000_000, Per: "hour",
			From: now,
		}, now)
		return struct{}{}, err
	})
	lo.launch()
}

// loseDocument launches an instance whose document the node has lost again.
func loseDocument(t *testing.T, lo *lost) {
	t.Helper()
	made := lo.launch()
	lo.upload.Parts = slices.DeleteFunc(lo.upload.GetParts(), func(raw []byte) bool {
		w := &protocol.Workload{}
		require.NoError(t, proto.Unmarshal(raw, w))
		return w.GetInstanceId() == made.ID
	})
	require.Len(t, lo.upload.GetParts(), 1)
}

func addVolume(t *testing.T, lo *lost) {
	t.Helper()
	_, err := (&command.Service{DB: lo.h.DB}).CreateVolume(t.Context(), lo.h.Tenant("volume"), capacity.NewVolume{
		ProjectID: lo.h.Project.ID, Name: "models", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	lo.holds(lo.l.ExpectVolumes(1))
}

func putSSHKey(t *testing.T, lo *lost) {
	t.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	key, err := ssh.NewPublicKey(public)
	require.NoError(t, err)
	_, err = (&command.Service{DB: lo.h.DB}).PutSSHKeys(t.Context(), lo.h.Tenant("key"), lo.h.Project.ID,
		lo.kept.Members[0].AllocationID, capacity.SSHKeySet{
			ManagedBy: capacity.SSHKeysOfOperator,
			Keys: []capacity.SSHKey{{
				User: "ubuntu", PublicKey: strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))),
			}},
		})
	require.NoError(t, err)
	lo.holds(lo.l.ExpectSSHKeys(1))
}

// Each statement of an adoption is broken, one at a time: nothing of the adoption is left, and the node still awaits
// its resync.
func TestLaw08AnAdoptionIsOneTransaction(t *testing.T) {
	for name, a := range adoptions() {
		t.Run(name, func(t *testing.T) {
			lo := a.make(t)
			again := lo.restore()
			w := &commandtest.World{T: t, DB: again.DB}
			w.RequireAtomic(func(around commandtest.Around) error {
				_, err := uploads(again).WithAround(around).Receive(t.Context(), lo.n.Identity, lo.upload)
				return err
			}, "events", "audit_rows", "nodes", a.table)
		})
	}
}

// An adoption has an event and an audit row for the node, for the instance and for the finding, all by the system.
func TestLaw08AnAdoptionHasItsEventsAndAuditRows(t *testing.T) {
	lo := loseHub(t)
	made := lo.launch()
	again := lo.restore()
	rows := func(table, column, value, resource string) int {
		t.Helper()
		subject := map[string]string{"events": "subject", "audit_rows": "resource_id"}[table]
		return hubtest.Count(again, `SELECT count(*) FROM `+table+` WHERE `+column+` = $1 AND `+subject+` = $2`, value,
			resource)
	}
	news := map[string]string{
		"fleet.node.recovered": lo.n.ID, "apps.instance.adopted": made.ID, "hub.recovery.finding": made.ID,
	}
	for event, resource := range news {
		require.Zero(t, rows("events", "type", event, resource), event)
	}
	audited := rows("audit_rows", "action", "hub.recovery.adopt", made.ID)
	lo.adopt(again)
	for event, resource := range news {
		require.Equal(t, 1, rows("events", "type", event, resource), event)
	}
	require.Equal(t, audited+2, rows("audit_rows", "action", "hub.recovery.adopt", made.ID), "instance and finding")
	require.Equal(t, 1, rows("audit_rows", "action", "hub.recovery.adopt", lo.n.ID), "the node")
}

// Nodes upload at the same time: the end of one's upload leaves what has come of another's, so that nothing of the
// other's is taken for missing.
func TestLaw16AnUploadEndsForItsOwnNodeAlone(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	other := h.Enroll()
	lo := &lost{h: h, n: n, l: l, kept: h.Launch()}
	l.ExpectState(1)
	lo.backup = h.Backup()
	made := lo.launch()
	again := lo.restore()
	adopts := func(of *hubtest.Node, m *protocol.StateUpload) bool {
		t.Helper()
		adopted, err := uploads(again).Receive(t.Context(), of.Identity, m)
		require.NoError(t, err)
		return adopted
	}
	require.False(t, adopts(n, &protocol.StateUpload{State: lo.upload.GetState(), Parts: lo.upload.GetParts()}))
	require.True(t, adopts(other, &protocol.StateUpload{Last: true}))
	lo.upload.Parts = nil
	require.True(t, adopts(n, lo.upload))
	require.NotContains(t, again.Findings(), finding.Document)
	require.Equal(t, n.ID, again.Instance(made.ID).Members[0].NodeID)
}

// A lease of after the backup that the restored wallet does not cover goes on: what there is of credit is held for it,
// nobody owes more than was there, and the admin reads of it.
func TestLaw07AnAdoptedLeaseHoldsNoMoreThanTheCredit(t *testing.T) {
	lo := loseHub(t)
	credit := hubtest.Count(lo.h, `SELECT balance_nanos FROM wallets`)
	launchBeyondCredit(t, lo)
	again := lo.restore()
	require.Equal(t, credit, hubtest.Count(again, `SELECT balance_nanos FROM wallets`))
	lo.adopt(again)
	var made *protocol.Workload
	for _, raw := range lo.upload.GetParts() {
		w := &protocol.Workload{}
		require.NoError(t, proto.Unmarshal(raw, w))
		if w.GetInstanceId() != lo.kept.ID {
			made = w
		}
	}
	require.Equal(t, made.GetId(), again.Findings()[finding.Lease])
	require.Zero(t, hubtest.Count(again, `SELECT balance_nanos FROM wallets`), "all the credit is held")
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM leases WHERE subject_id = $1`, made.GetId()))
	requireBalanced(t, again)
}

// Law 16: what runs under a lease of after the backup pays the host of its node as before. The node's copy of the lease
// does not say how much.
func TestLaw16AnAdoptedLeasePaysTheHost(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (ledger.Price, error) {
		now := h.Now().Truncate(time.Microsecond)
		return ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, Currency: "EUR", Nanos: 1_000_000, Per: "hour",
			HostBasisPoints: 7000, From: now,
		}, now)
	})
	lo := &lost{h: h, n: n, l: l, backup: h.Backup()}
	made := h.Launch()
	lo.holds(l.ExpectState(1))
	again := lo.restore()
	lo.adopt(again)
	for _, hub := range []*hubtest.Hub{h, again} {
		require.Equal(t, 7000, hubtest.Count(hub, `SELECT (prices->0->>'host_basis_points')::INT8 FROM leases
			WHERE subject_id = $1`, made.Members[0].ID))
	}
}

// A restored hub lacks usage that was posted after the backup. Until the node has sent it again, the node's silence
// about a member ends nothing: its bill would close before that usage is in it.
func TestLaw16AMemberIsNotSettledWhileItsUsageIsOwed(t *testing.T) {
	lo := loseHub(t)
	member := lo.kept.Members[0].ID
	lease := hubtest.Tx(lo.h, func(ctx context.Context, tx db.Tx) (*protocol.Lease, error) {
		all, err := ledger.LeasesFor(ctx, tx, lo.n.ID)
		return all[0], err
	})
	segments := lo.n.Seal("i1", []*protocol.UsageRecord{
		hubtest.SessionSeconds(member, lease, lo.h.Now().Truncate(time.Microsecond), 1),
	})
	require.EqualValues(t, 1, hubtest.Upload(t, lo.l.OpenUsage(), segments[0]).GetPostedSegment())
	lo.h.Decommission(lo.kept.ID)
	lo.holds(lo.l.ExpectState(0))
	again := lo.restore()

	hello := holds("i1", lo.state, lo.upload.GetState())
	hello.LastSegment = 1
	l := lo.n.Connect(hello)
	l.UploadState(lo.upload)
	bundle := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	var err error
	lo.n.Bundle, err = lo.n.Bundle.Succeed(bundle)
	require.NoError(t, err)
	l.Ack(protocol.Envelope_BUNDLE, 0, lo.n.Bundle.Version())
	state, _ := l.ExpectState(0)
	charged := func() int {
		return hubtest.Count(again, `SELECT coalesce(sum(extract(epoch FROM to_at - from_at)), 0)::INT FROM usage_coverage
			WHERE subject_id = $1`, member)
	}
	l.ReportState(state)
	require.Equal(t, lifecycle.Decommissioning, again.Instance(lo.kept.ID).Lifecycle.Status, "usage is owed")
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM nodes WHERE resync = 'usage_owed'`))
	require.Zero(t, charged())

	require.EqualValues(t, 1, hubtest.Upload(t, l.OpenUsage(), segments[0]).GetPostedSegment())
	l.ReportState(state)
	require.Equal(t, lifecycle.Decommissioned, again.Instance(lo.kept.ID).Lifecycle.Status)
	require.Zero(t, hubtest.Count(again, `SELECT count(*) FROM nodes WHERE resync <> ''`))
	require.Equal(t, 1, charged(), "one second")
	requireBalanced(t, again)
}

// The root signed a bundle after the backup, and the node has it: the hub says so, because what the bundle revoked is
// valid again. A bundle that the backup has is no news.
func TestLaw16ABundleThatIsNotInTheBackupIsAFinding(t *testing.T) {
	for name, newer := range map[string]bool{"the backup's": false, "newer": true} {
		t.Run(name, func(t *testing.T) {
			lo := loseHub(t)
			again := lo.restore()
			u := uploads(again)
			restored := again.Keys.Chain()
			u.Bundles = func() []protocol.Bundle { return restored }
			want := ""
			if newer {
				want = lo.n.ID
				next, err := trust.SignNext(trust.NextBundle{
					DataDir: again.TrustInit.DataDir, Now: time.Now(),
					Root: trust.RootKey(filepath.Join(again.TrustInit.OfflineDir, trust.RootKeyFile), hubtest.Passphrase),
				})
				require.NoError(t, err)
				lo.upload.Bundle = next.Envelope()
			}
			_, err := u.Receive(t.Context(), lo.n.Identity, lo.upload)
			require.NoError(t, err)
			require.Equal(t, want, again.Findings()[finding.Bundle])
		})
	}
}

// The lease key was replaced after the backup: the bundle that the node has vouches for what the new one signed.
func TestLaw16LeasesOfAKeyThatIsNotInTheBackupAreTakenOver(t *testing.T) {
	lo := loseHub(t)
	made := lo.launch()
	batch, err := protocol.VerifyLeases(lo.upload.GetLeases()[0], lo.n.Bundle, lo.n.Identity)
	require.NoError(t, err)
	again := lo.restore()
	u := uploads(again)
	restored := again.Keys.Chain()
	u.Bundles = func() []protocol.Bundle { return restored }
	next, err := trust.Revoke(trust.RevokeOptions{
		DataDir: again.TrustInit.DataDir, KeyID: again.Keys.Lease().KeyID(), Now: time.Now(),
		Root: trust.RootKey(filepath.Join(again.TrustInit.OfflineDir, trust.RootKeyFile), hubtest.Passphrase),
	})
	require.NoError(t, err)
	_, err = again.Keys.Reload()
	require.NoError(t, err)
	signed, err := protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{
		NodeId: lo.n.ID, Incarnation: "i1", Epoch: next.Epoch(), Leases: batch.Message().GetLeases(),
	}, again.Keys.Lease())
	require.NoError(t, err)
	lo.upload.Bundle, lo.upload.Leases = next.Envelope(), []*protocol.Envelope{signed}
	_, err = u.Receive(t.Context(), lo.n.Identity, lo.upload)
	require.NoError(t, err)
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM leases WHERE subject_id = $1`, made.Members[0].ID))
}

// Usage of what was made after the backup waits for the node's state: before, the restored hub does not know whose it
// is. It is billed, though it is older than the adoption.
func TestLaw16UsageOfAMemberMadeAfterTheBackupIsBilled(t *testing.T) {
	lo := loseHub(t)
	made := lo.launch()
	member := made.Members[0].ID
	leases := hubtest.Tx(lo.h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, lo.n.ID)
	})
	lease := leases[slices.IndexFunc(leases, func(l *protocol.Lease) bool { return l.GetMemberId() == member })]
	segments := lo.n.Seal("i1", []*protocol.UsageRecord{
		hubtest.SessionSeconds(member, lease, lo.h.Now().Truncate(time.Microsecond), 1),
	})
	again := lo.restore()

	hello := holds("i1", lo.state, lo.upload.GetState())
	hello.LastSegment = 1
	l := lo.n.Connect(hello)
	stream, posted := l.OpenUsage(), make(chan uint64, 1)
	require.NoError(t, stream.Send(&protocol.UsageUpload{Segment: segments[0]}))
	go func() {
		ack := &protocol.UsageAck{}
		_ = stream.Receive(ack, protocol.MaxControlBytes)
		posted <- ack.GetPostedSegment()
	}()
	for range 10 {
		l.ReportState(lo.state, hubtest.Ready(lo.kept), hubtest.Ready(made)) // time in which the usage is not taken in
	}
	select {
	case <-posted:
		require.FailNow(t, "the hub took usage in before it knew the member")
	default:
	}
	l.UploadState(lo.upload)
	takeBundle(t, lo.n, l)
	require.EqualValues(t, 1, <-posted)
	require.Equal(t, 1, hubtest.Count(again, `SELECT coalesce(sum(extract(epoch FROM to_at - from_at)), 0)::INT
		FROM usage_coverage WHERE subject_id = $1`, member), "one second")
	requireBalanced(t, again)
}
