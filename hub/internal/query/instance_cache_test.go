package query_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// cachingReader reads instances with a cache, and compares each with what a service without one reads.
type cachingReader struct {
	*commandtest.World
	service query.Service
}

func newCachingReader(t *testing.T) cachingReader {
	w := commandtest.New(t)
	return cachingReader{w, query.Service{DB: w.DB, Cache: query.NewInstanceCache(w.DB)}}
}

// read reads an instance that may be cached, and again.
func (r *cachingReader) read(id string) query.Instance {
	r.T.Helper()
	fresh, err := (&query.Service{DB: r.DB}).Instance(r.T.Context(), r.User, r.Project.ID, id, query.Watch{})
	require.NoError(r.T, err)
	for range 2 {
		got, err := r.service.Instance(r.T.Context(), r.User, r.Project.ID, id, query.Watch{})
		require.NoError(r.T, err)
		require.Equal(r.T, fresh, got)
	}
	return fresh
}

// Whatever changes an instance, a read of one that was read before finds the change. The changes are made without the
// cache's knowledge, as another hub's are.
func TestACachedInstanceIsReadAsItIs(t *testing.T) {
	r := newCachingReader(t)
	i := r.Running()
	require.Equal(t, "running", string(r.read(i.ID).Lifecycle.Status))

	name := "another"
	_, err := r.Commands().ChangeInstance(t.Context(), r.Meta("name"), r.Project.ID, i.ID,
		command.ChangeInstanceInput{DisplayName: &name})
	require.NoError(t, err)
	require.Equal(t, name, r.read(i.ID).DisplayName)

	with := r.Says(i, protocol.WorkloadStatus_READY)
	with.Endpoints = []*protocol.PublishedEndpoint{{Name: "http", Protocol: "http", Host: "127.0.0.1", Port: 20001}}
	r.Report(1, with)
	require.NotEmpty(t, r.read(i.ID).Members[0].Endpoints)
	r.Exec(`UPDATE nodes SET hostname = 'renamed' WHERE id = $1`, r.Node)
	r.Tx(func(ctx context.Context, tx db.Tx) error {
		return instance.NodeRenamed(ctx, tx, r.Node, r.Now.Add(time.Second))
	})
	require.Equal(t, map[string]string{r.Node: "renamed"}, r.read(i.ID).Hostnames)

	for _, reachable := range []bool{false, true} {
		r.Tx(func(ctx context.Context, tx db.Tx) error {
			_, err := instance.SetReachable(ctx, tx, r.Node, reachable, r.Now)
			return err
		})
		require.Equal(t, !reachable, r.read(i.ID).Members[0].Unreachable)
	}
	r.Release("2.0.0")
	_, err = r.Commands().UpgradeInstance(t.Context(), r.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: r.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(t, err)
	require.Equal(t, "2.0.0", r.read(i.ID).Version)

	// A restored hub forgets what was reported before, without an event.
	r.Tx(func(ctx context.Context, tx db.Tx) error {
		return instance.RecordAlreadyAbsent(ctx, tx, i.Members[0].ID, 1, 1, r.Now.Add(time.Second))
	})
	require.Equal(t, protocol.WorkloadStatus_PENDING, r.read(i.ID).Members[0].Status)

	_, err = r.Commands().DecommissionInstance(t.Context(), r.Meta("end"), r.Project.ID, i.ID)
	require.NoError(t, err)
	r.Report(9, r.Removed(i))
	require.Equal(t, "decommissioned", string(r.read(i.ID).Lifecycle.Status))
}

// A cache gives nothing to those who may not read it, nor under another project.
func TestACachedInstanceIsReadByThoseWhoMay(t *testing.T) {
	r := newCachingReader(t)
	i := r.Running()
	r.read(i.ID)
	project, stranger := r.NewTenant("other")
	_, err := r.service.Instance(t.Context(), stranger, r.Project.ID, i.ID, query.Watch{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	_, err = r.service.Instance(t.Context(), stranger, project.ID, i.ID, query.Watch{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	_, err = r.service.Instance(t.Context(), r.User, project.ID, i.ID, query.Watch{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}

// Of states that are read together each is its own instance's, and one that cannot be read harms no other.
func TestStatesAreReadTogether(t *testing.T) {
	w := commandtest.New(t)
	i := w.Running()
	other, err := w.Commands().CreateInstance(t.Context(), w.Meta("other"), w.InstanceInput())
	require.NoError(t, err)
	w.Exec(`UPDATE holds SET posted_nanos = 7 WHERE subject_id = $1`, i.Members[0].ID)
	ids := []string{i.ID, uuid.NewString(), other.ID, i.ID}
	want := make([]ledger.Cost, len(ids))
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		for n, id := range ids {
			if want[n], err = ledger.CostOf(ctx, tx, id); err != nil {
				break
			}
		}
		return err
	})
	require.EqualValues(t, 7, want[0].SpentNanos)
	require.Zero(t, want[2].SpentNanos)
	require.Positive(t, want[2].HeldNanos)

	found, costs, errs := query.StatesTogether(t.Context(), w.DB, ids...)
	require.Equal(t, []bool{true, false, true, true}, found)
	require.Equal(t, want, costs)
	require.Equal(t, make([]error, len(ids)), errs)

	w.Exec(`UPDATE leases SET prices = '{}' WHERE subject_id = $1`, i.Members[0].ID)
	_, costs, errs = query.StatesTogether(t.Context(), w.DB, i.ID, other.ID)
	require.ErrorContains(t, errs[0], i.Members[0].ID)
	require.NoError(t, errs[1])
	require.Equal(t, want[2], costs[1])
}

// A caller who goes while the database is slow gets an error at once; those who came later get their answers.
func TestACallerWhoLeavesEndsNoOthersRead(t *testing.T) {
	r := newCachingReader(t)
	i := r.Running()
	want := r.read(i.ID)
	locked, unlock, released := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		released <- db.WriteTx(context.WithoutCancel(t.Context()), r.DB, func(tx db.Tx) error {
			_, err := tx.Exec(t.Context(), `LOCK TABLE app_instances IN ACCESS EXCLUSIVE MODE`)
			close(locked)
			<-unlock
			return err
		})
	}()
	<-locked

	type answer struct {
		instance query.Instance
		err      error
	}
	ask := func(ctx context.Context) chan answer {
		answers := make(chan answer, 1)
		go func() {
			got, err := r.service.Instance(ctx, r.User, r.Project.ID, i.ID, query.Watch{})
			answers <- answer{got, err}
		}()
		return answers
	}
	ctx, leave := context.WithCancel(t.Context())
	leaver := ask(ctx)
	require.Eventually(t, func() bool {
		n, err := db.Query(t.Context(), r.DB, func(tx db.Tx) (int64, error) {
			return db.Value[int64](t.Context(), tx, `SELECT count(*) FROM pg_locks l
				JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
				WHERE NOT l.granted AND l.relation = 'app_instances'::regclass`)
		})
		return err == nil && n == 1
	}, time.Minute, time.Millisecond)
	others := []chan answer{ask(t.Context()), ask(t.Context())}
	leave()
	left := <-leaver
	require.True(t, fault.Is(left.err, fault.Unavailable), "%v", left.err)

	close(unlock)
	require.NoError(t, <-released)
	for _, other := range others {
		got := <-other
		require.NoError(t, got.err)
		require.Equal(t, want, got.instance)
	}
}
