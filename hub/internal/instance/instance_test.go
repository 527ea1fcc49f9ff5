package instance_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// world is one instance on one node in a real database.
type world struct {
	t       *testing.T
	d       *db.DB
	now     time.Time
	node    string
	project string
	id      string
	member  string
	counter uint64
}

func newWorld(t *testing.T) *world {
	w := &world{
		t: t, d: dbtest.New(t), now: time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC), node: db.NewID(),
		project: db.NewID(), id: db.NewID(), member: db.NewID(),
	}
	w.do(func(ctx context.Context, tx db.Tx) {
		c, err := instance.Create(ctx, tx, instance.Instance{
			ID: w.id, OrgID: db.NewID(), OrgSlug: "acme", ProjectID: w.project, AppSlug: "demo", DisplayName: "first",
			Modes: instance.Modes{
				OperatingMode: "tenant_dedicated", ControlPlaneScope: "project",
				RuntimeBackend: "launchable_oci", TenantBoundaryMode: "project_isolated",
			},
			RequestedBy:   principal.Actor{Type: principal.ServiceAccount, ID: "sa"},
			CorrelationID: "corr-create",
			HintResults: []instance.HintResult{{
				Field: "operating_mode", Requested: "platform_managed",
				Effective: "tenant_dedicated", Reason: "policy",
			}},
			Members: []instance.Member{{ID: w.member, AllocationID: db.NewID(), NodeID: w.node}},
		}, instance.NewRevision{
			AppVersion: "1.0.0", ParametersJSON: `{"a":1}`, ConfigJSON: "{}", ManifestEnvelope: []byte{1},
			Features:         []string{"logs"},
			ReadinessTimeout: time.Minute,
			Services: map[string][]*protocol.Service{
				w.member: {{Name: "main", Image: "x", Config: &protocol.Config{Json: "{}"}}},
			},
		}, db.NewID(), w.now)
		require.NoError(t, err)
		require.Equal(t, "apps.instance.requested", c.Steps[0].EventType())
	})
	return w
}

func (w *world) do(fn func(context.Context, db.Tx)) {
	w.t.Helper()
	w.now = w.now.Add(time.Second)
	_, err := db.RunTx(w.t.Context(), w.d, func(tx db.Tx) (struct{}, error) {
		fn(w.t.Context(), tx)
		return struct{}{}, nil
	})
	require.NoError(w.t, err)
}

func (w *world) get() (i instance.Instance) {
	w.t.Helper()
	w.do(func(ctx context.Context, tx db.Tx) {
		var err error
		i, err = instance.Get(ctx, tx, w.project, w.id)
		require.NoError(w.t, err)
	})
	return i
}

func (w *world) report(generation uint64, statuses ...*protocol.WorkloadStatus) (changes []instance.Change) {
	w.t.Helper()
	w.counter++
	return w.reportAs(instance.Report{
		NodeID: w.node, SessionNo: 1, Counter: w.counter, Epoch: 1, Generation: generation,
		Statuses: statuses,
	})
}

// reportTwice repeats a report when a failure in it counts.
func (w *world) reportTwice(generation uint64, statuses ...*protocol.WorkloadStatus) []instance.Change {
	w.t.Helper()
	w.report(generation, statuses...)
	w.now = w.now.Add(time.Minute)
	return w.report(generation, statuses...)
}

func (w *world) reportAs(r instance.Report) (changes []instance.Change) {
	w.t.Helper()
	w.do(func(ctx context.Context, tx db.Tx) {
		var err error
		changes, err = instance.ApplyReport(ctx, tx, r, w.now)
		require.NoError(w.t, err)
	})
	return changes
}

func (w *world) says(status protocol.WorkloadStatus_Status) *protocol.WorkloadStatus {
	return &protocol.WorkloadStatus{MemberId: w.member, InstanceId: w.id, Revision: 1, Status: status}
}

func (w *world) decommission() (c instance.Change) {
	w.t.Helper()
	i := w.get()
	w.do(func(ctx context.Context, tx db.Tx) {
		var err error
		c, err = instance.RequestDecommission(ctx, tx, i, instance.Request{OperationID: db.NewID(), By: principal.Actor{
			Type: principal.User,
			ID:   "u",
		}, CorrelationID: "corr-end"}, w.now)
		require.NoError(w.t, err)
	})
	return c
}

func (w *world) wanted() int {
	n := 0
	w.do(func(ctx context.Context, tx db.Tx) {
		list, err := instance.SnapshotFor(ctx, tx, w.node)
		require.NoError(w.t, err)
		n = len(list)
	})
	return n
}

func fullProof(w *world) *protocol.RemovalProof {
	return &protocol.RemovalProof{
		At: timestamppb.New(w.now), Absent: protocol.RemovalKinds(), LastUsageSequence: 7,
		Incarnation: "inc",
	}
}

func TestReportsDriveAnInstanceToRunning(t *testing.T) {
	w := newWorld(t)
	require.Equal(t, lifecycle.Requested, w.get().Lifecycle.Status)
	require.Equal(t, 1, w.wanted())

	changes := w.report(1, w.says(protocol.WorkloadStatus_STARTING))
	require.Equal(t, []lifecycle.Step{{From: lifecycle.Requested, To: lifecycle.Deploying}}, changes[0].Steps)
	require.Equal(t, int64(2), changes[0].FirstVersion)
	require.Equal(t, "corr-create", changes[0].Instance.Operation.CorrelationID)

	ready := w.says(protocol.WorkloadStatus_READY)
	// Of what a node says that it publishes, only its own loopback ports are shown.
	ready.Endpoints = []*protocol.PublishedEndpoint{
		{Name: "script", Protocol: "javascript", Host: "127.0.0.1", Port: 20001},
		{Name: "elsewhere", Protocol: "http", Host: "198.51.100.1", Port: 20001},
		{Name: "name", Protocol: "http", Host: "localhost@evil.example", Port: 20001},
		{Name: "zone", Protocol: "http", Host: "::1%lo", Port: 20001},
		{Name: "port", Protocol: "http", Host: "127.0.0.1", Port: 1 << 16},
		{Name: "no port", Protocol: "http", Host: "127.0.0.1"},
		{Name: "no address", Protocol: "http", Host: "", Port: 20001},
		{Name: "http", Protocol: "http", Host: "127.0.0.1", Port: 20001},
	}
	ready.StartedAt = timestamppb.New(w.now)
	changes = w.report(1, ready)
	require.Equal(t, []lifecycle.Step{{From: lifecycle.Deploying, To: lifecycle.Running}}, changes[0].Steps)
	require.False(t, changes[0].DesiredChanged)

	i := w.get()
	require.Equal(t, lifecycle.Lifecycle{Status: lifecycle.Running, Health: lifecycle.HealthHealthy}, i.Lifecycle)
	require.Len(t, i.Members[0].Endpoints, 1)
	require.Equal(t, "http://127.0.0.1:20001", i.Members[0].Endpoints[0].URL())
	require.Equal(t, int64(3), i.ResourceVersion)
	require.False(t, i.ActivatedAt.IsZero())
	require.Equal(t, "1.0.0", i.Version)
	require.Empty(t, i.PreviousVersion)
	require.Equal(t, "platform_managed", i.HintResults[0].Requested)
	require.Empty(t, w.report(1, ready), "the same again changes nothing")
}

func TestAnOlderReportLoses(t *testing.T) {
	w := newWorld(t)
	w.reportAs(instance.Report{NodeID: w.node, SessionNo: 2, Counter: 5, Statuses: []*protocol.WorkloadStatus{
		w.says(protocol.WorkloadStatus_READY),
	}})
	for _, r := range []instance.Report{
		{SessionNo: 2, Counter: 4}, {SessionNo: 2, Counter: 5}, {SessionNo: 1, Counter: 99},
	} {
		r.NodeID, r.Statuses = w.node, []*protocol.WorkloadStatus{w.says(protocol.WorkloadStatus_DEGRADED)}
		require.Empty(t, w.reportAs(r))
	}
	require.Equal(t, lifecycle.HealthHealthy, w.get().Lifecycle.Health)
	w.reportAs(instance.Report{NodeID: w.node, SessionNo: 3, Counter: 1, Statuses: []*protocol.WorkloadStatus{
		w.says(protocol.WorkloadStatus_DEGRADED),
	}})
	require.Equal(t, lifecycle.HealthDegraded, w.get().Lifecycle.Health)
}

func TestReportsOnAnotherNodesMemberChangeNothing(t *testing.T) {
	w := newWorld(t)
	require.Empty(t, w.reportAs(instance.Report{
		NodeID: db.NewID(), SessionNo: 1, Counter: 1,
		Statuses: []*protocol.WorkloadStatus{w.says(protocol.WorkloadStatus_READY)},
	}))
	require.Equal(t, lifecycle.Requested, w.get().Lifecycle.Status)
}

func TestAFailedDeploymentIsHeldStopped(t *testing.T) {
	w := newWorld(t)
	failed := w.says(protocol.WorkloadStatus_FAILED)
	failed.Reason, failed.Detail = protocol.WorkloadStatus_READINESS_TIMEOUT, "no answer\x00 on /"+strings.Repeat("é",
		4000)
	changes := w.reportTwice(1, failed)
	require.True(t, changes[0].DesiredChanged)
	i := w.get()
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Failed, Health: lifecycle.HealthUnhealthy,
		Reason: protocol.WorkloadStatus_READINESS_TIMEOUT,
	}, i.Lifecycle)
	require.LessOrEqual(t, len(i.Members[0].Detail), 2<<10)
	w.do(func(ctx context.Context, tx db.Tx) {
		list, err := instance.SnapshotFor(ctx, tx, w.node)
		require.NoError(t, err)
		require.True(t, list[0].Stopped)
	})
	w.report(2, w.says(protocol.WorkloadStatus_STOPPED))
	require.Equal(t, protocol.WorkloadStatus_STOPPED, w.get().Members[0].Status)
	require.Contains(t, w.get().Members[0].Detail, "no answer", "why it failed stays readable")
	require.Equal(t, lifecycle.Failed, w.get().Lifecycle.Status)
}

// What the owner refuses, a node that is being upgraded or a failure that was reported once does not end a deployment:
// the tenant reads the reason, and the next good report is all that it takes.
func TestAPassingReasonNeverEndsADeployment(t *testing.T) {
	w := newWorld(t)
	for _, reason := range []protocol.WorkloadStatus_Reason{
		protocol.WorkloadStatus_OWNER_REFUSED, protocol.WorkloadStatus_FEATURE_MISSING,
	} {
		refused := w.says(protocol.WorkloadStatus_FAILED)
		refused.Reason = reason
		w.reportTwice(1, refused)
		require.Equal(t, lifecycle.Lifecycle{
			Status: lifecycle.Deploying, Health: lifecycle.HealthUnknown,
			Reason: reason,
		}, w.get().Lifecycle)
		require.Equal(t, 1, w.wanted())
	}
	waiting := w.says(protocol.WorkloadStatus_STARTING)
	waiting.Reason, waiting.Detail = protocol.WorkloadStatus_IMAGE_PULL_FAILED, "The image could not be pulled."
	w.reportTwice(1, waiting)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Deploying, Health: lifecycle.HealthUnknown,
		Reason: protocol.WorkloadStatus_IMAGE_PULL_FAILED,
	}, w.get().Lifecycle)
	require.Equal(t, 1, w.wanted(), "a registry that is away")
	once := w.says(protocol.WorkloadStatus_FAILED)
	once.Reason = protocol.WorkloadStatus_CRASH_LOOP
	w.report(1, once)
	require.Equal(t, lifecycle.Deploying, w.get().Lifecycle.Status)
	w.report(1, w.says(protocol.WorkloadStatus_STARTING))
	w.report(1, once)
	require.Equal(t, lifecycle.Deploying, w.get().Lifecycle.Status, "not the same failure that was reported before")
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	require.Equal(t, lifecycle.Lifecycle{Status: lifecycle.Running, Health: lifecycle.HealthHealthy}, w.get().Lifecycle)
}

// TestLaw09DecommissionEndsOnlyOnTheNodesProof: neither silence nor a word nor half a proof ends it.
func TestLaw09DecommissionEndsOnlyOnTheNodesProof(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	c := w.decommission()
	require.True(t, c.DesiredChanged)
	require.Equal(t, lifecycle.Decommissioning, c.Instance.Lifecycle.Status)
	require.Equal(t, 0, w.wanted())
	w.dispatched(2)

	w.report(2)
	w.report(2, &protocol.WorkloadStatus{MemberId: w.member, Status: protocol.WorkloadStatus_STOPPING})
	require.Equal(t, protocol.WorkloadStatus_STOPPING, w.get().Members[0].Status)
	half := w.says(protocol.WorkloadStatus_REMOVED)
	half.Removal = fullProof(w)
	half.Removal.Absent = half.Removal.Absent[1:]
	w.report(2, half)
	w.report(2, w.says(protocol.WorkloadStatus_REMOVED))
	require.Equal(t, lifecycle.Decommissioning, w.get().Lifecycle.Status)

	whole := w.says(protocol.WorkloadStatus_REMOVED)
	whole.Removal = fullProof(w)
	changes := w.report(2, whole)
	require.Equal(t, []lifecycle.Step{{From: lifecycle.Decommissioning, To: lifecycle.Decommissioned}}, changes[0].Steps)
	require.Len(t, changes[0].Removed, 1)
	require.Equal(t, uint64(7), changes[0].Removed[0].Proof.GetLastUsageSequence())
	require.Equal(t, "corr-end", changes[0].Instance.Operation.CorrelationID)
	require.Equal(t, principal.Actor{Type: principal.User, ID: "u"}, changes[0].Instance.Operation.By)
	require.Equal(t, "corr-create", changes[0].Instance.CorrelationID)
	require.Empty(t, w.report(2, whole), "it ends once")
	require.Empty(t, w.get().Members[0].Endpoints)
}

func (w *world) dispatched(generation uint64, members ...string) {
	w.t.Helper()
	w.do(func(ctx context.Context, tx db.Tx) {
		require.NoError(w.t, instance.RecordAbsentFrom(ctx, tx, w.node, 1, generation, append([]string{}, members...), w.now))
	})
}

func TestAMemberThatNoNodeEverHadNeedsNoProof(t *testing.T) {
	w := newWorld(t)
	w.dispatched(4, w.member)
	w.decommission()
	w.dispatched(5)
	w.dispatched(6)
	require.Empty(t, w.report(4), "the state with the member may still arrive")
	changes := w.report(5)
	require.Equal(t, lifecycle.Decommissioned, changes[0].Instance.Lifecycle.Status)
	require.Nil(t, changes[0].Removed[0].Proof)
}

// Law 9: what another node was sent proves nothing, however few generations that node has had: the state with the
// member may still arrive at its own.
func TestLaw09AStateOfAnotherNodeIsNoProof(t *testing.T) {
	w := newWorld(t)
	w.dispatched(4, w.member)
	w.decommission()
	w.do(func(ctx context.Context, tx db.Tx) {
		require.NoError(t, instance.RecordAbsentFrom(ctx, tx, db.NewID(), 1, 3, []string{}, w.now))
	})
	require.Empty(t, w.report(4))
	w.dispatched(5)
	require.Empty(t, w.report(4))
	require.Equal(t, lifecycle.Decommissioned, w.report(5)[0].Instance.Lifecycle.Status)
}

func TestAProofForAMemberThatIsWantedDoesNotEndIt(t *testing.T) {
	w := newWorld(t)
	removed := w.says(protocol.WorkloadStatus_REMOVED)
	removed.Removal = fullProof(w)
	w.report(1, removed)
	require.Equal(t, lifecycle.Deploying, w.get().Lifecycle.Status)
	require.Equal(t, 1, w.wanted())
}

func TestAnUnreachableNodeShowsAndAReportEndsIt(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.reachable(false)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Running, Health: lifecycle.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_UNREACHABLE,
	}, w.get().Lifecycle)
	c := w.decommission()
	require.Equal(t, protocol.WorkloadStatus_NODE_UNREACHABLE, c.Instance.Lifecycle.Reason)
	w.report(1, w.says(protocol.WorkloadStatus_STOPPING))
	require.Equal(t, lifecycle.Lifecycle{Status: lifecycle.Decommissioning, Health: lifecycle.HealthUnknown},
		w.get().Lifecycle)
}

func (w *world) reachable(yes bool) {
	w.t.Helper()
	w.do(func(ctx context.Context, tx db.Tx) {
		_, err := instance.SetReachable(ctx, tx, w.node, yes, w.now)
		require.NoError(w.t, err)
	})
}

func TestAnotherProjectsInstanceAnswersLikeNone(t *testing.T) {
	w := newWorld(t)
	w.do(func(ctx context.Context, tx db.Tx) {
		for _, at := range [][2]string{{db.NewID(), w.id}, {w.project, db.NewID()}, {w.project, "no-id"}} {
			_, err := instance.Get(ctx, tx, at[0], at[1])
			require.True(t, fault.Is(err, fault.NotFound))
			require.NotContains(t, fault.As(err).Public, w.id)
		}
	})
}

func TestListPages(t *testing.T) {
	w := newWorld(t)
	w.do(func(ctx context.Context, tx db.Tx) {
		page, err := instance.List(ctx, tx, instance.Filter{
			ProjectID: w.project, Status: lifecycle.Requested, AppSlug: "demo",
			Limit: 10,
		})
		require.NoError(t, err)
		require.Len(t, page, 1)
		page, err = instance.List(ctx, tx, instance.Filter{ProjectID: w.project, After: w.id, Limit: 10})
		require.NoError(t, err)
		require.Empty(t, page)
		live, err := instance.LiveInAllocation(ctx, tx, w.get0(ctx, tx).Members[0].AllocationID)
		require.NoError(t, err)
		require.Len(t, live, 1)
	})
}

func (w *world) get0(ctx context.Context, tx db.Tx) instance.Instance {
	i, err := instance.Get(ctx, tx, w.project, w.id)
	require.NoError(w.t, err)
	return i
}

func TestEachOrgCountsItsOwnLiveInstances(t *testing.T) {
	w := newWorld(t)
	org := w.get().OrgID
	w.do(func(ctx context.Context, tx db.Tx) {
		for id, want := range map[string]int64{org: 1, db.NewID(): 0} {
			n, err := instance.CountLive(ctx, tx, id)
			require.NoError(t, err)
			require.Equal(t, want, n)
		}
	})
}

// An update that changes no column of an index leaves all indexes of its row alone (a heap-only tuple). Any other adds
// to each of them, and conflicts with serializable readers of the same page.
func TestAReportWritesToNoIndex(t *testing.T) {
	w := newWorld(t)
	hot := map[string]bool{}
	w.do(func(ctx context.Context, tx db.Tx) {
		changes, err := instance.ApplyReport(ctx, tx, instance.Report{
			NodeID: w.node, SessionNo: 1, Counter: 1, Epoch: 1, Generation: 1,
			Statuses: []*protocol.WorkloadStatus{w.says(protocol.WorkloadStatus_READY)},
		}, w.now)
		require.NoError(t, err)
		require.Len(t, changes, 1)
		require.Equal(t, lifecycle.Running, changes[0].Instance.Lifecycle.Status)
		var (
			table string
			all   bool
		)
		require.NoError(t, db.ForEach(ctx, tx, []any{&table, &all}, func() { hot[table] = all },
			`SELECT relname::TEXT, n_tup_upd = n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE n_tup_upd > 0`))
	})
	require.Equal(t, map[string]bool{
		"app_instances": true, "instance_members": true, "instance_operations": true, "instance_revisions": true,
	}, hot)
}
