package worker_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

const id = "0192f0c0-0000-7000-8000-000000000001"

// fakeHub has one task, which is pending until it is claimed.
type fakeHub struct {
	mu sync.Mutex
	// calls are the last steps of the paths of POSTs, without heartbeats; bodies are theirs.
	calls  []string
	bodies []map[string]any
	// traceparent is the task's; traces are those of the calls.
	traceparent string
	traces      []string
	claimed     bool
	// heartbeat is the answer to heartbeats: a task, or a problem.
	heartbeat any
}

func (f *fakeHub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	call := path.Base(r.URL.Path)
	switch {
	case r.Method == http.MethodGet && call == "tasks":
		list := client.TaskList{Items: []client.Task{}}
		if !f.claimed {
			list.Items = append(list.Items, client.Task{
				ID: id, State: client.TaskStatePending, Traceparent: f.traceparent,
			})
		}
		answer(w, list)
	case r.Method == http.MethodGet:
		i := client.AppInstance{ID: id, Status: client.AppInstanceStatusDeploying, Members: []client.Member{{ID: id}}}
		if f.claimed {
			i.Status = client.AppInstanceStatusDecommissioned
		}
		answer(w, i)
	case call == "heartbeat":
		answer(w, f.heartbeat)
	default:
		var body map[string]any
		_ = json.NewDecoder(r.Body).Decode(&body)
		f.calls, f.bodies = append(f.calls, call), append(f.bodies, body)
		f.traces = append(f.traces, r.Header.Get("traceparent"))
		f.claimed = true
		answer(w, client.Task{ID: id, MemberID: id, Attempt: 7})
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if p, is := v.(client.Problem); is {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(int(p.Status))
	}
	_ = json.NewEncoder(w).Encode(v)
}

// run has a worker work until the hub has no instance any more.
func run(t *testing.T, f *fakeHub, handle func(context.Context, worker.Task) error) []error {
	t.Helper()
	return runWorker(t, f, &worker.Worker{Handle: handle})
}

func runWorker(t *testing.T, handler http.Handler, w *worker.Worker) []error {
	t.Helper()
	var errs []error
	w.OnError = func(err error) { errs = append(errs, err) }
	require.NoError(t, newWorker(t, handler, w).Run(t.Context()))
	return errs
}

// newWorker connects a worker to a hub.
func newWorker(t *testing.T, handler http.Handler, w *worker.Worker) *worker.Worker {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	hub, err := client.Open(client.Config{
		URL:        server.URL,
		CAPEM:      pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		Credential: client.BearerToken("t"),
	})
	require.NoError(t, err)
	t.Cleanup(hub.Close)
	w.Hub, w.ProjectID, w.InstanceID, w.Name = hub, id, id, "a"
	return w
}

func TestAWorkerClaimsReportsAndCompletes(t *testing.T) {
	f := &fakeHub{heartbeat: client.Task{}}
	errs := run(t, f, func(ctx context.Context, task worker.Task) error {
		member, one := task.Member()
		require.True(t, one)
		require.Equal(t, id, member.ID)
		return task.Phase(ctx, "install")
	})
	require.Empty(t, errs)
	require.Equal(t, []string{"claim", "progress", "complete"}, f.calls)
	require.Equal(t, "a", f.bodies[0]["worker"])
	require.EqualValues(t, 7, f.bodies[2]["attempt"], "each call carries the fence")
}

func TestTheCallsAboutATaskAreInItsTrace(t *testing.T) {
	for _, traceparent := range []string{"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""} {
		f := &fakeHub{heartbeat: client.Task{}, traceparent: traceparent}
		errs := run(t, f, func(ctx context.Context, task worker.Task) error { return task.Phase(ctx, "install") })
		require.Empty(t, errs)
		require.Equal(t, []string{"claim", "progress", "complete"}, f.calls)
		require.Equal(t, []string{traceparent, traceparent, traceparent}, f.traces)
	}
}

func TestAFailureHasItsReasonAndAPanicIsOne(t *testing.T) {
	f := &fakeHub{heartbeat: client.Task{}}
	run(t, f, func(context.Context, worker.Task) error {
		return &worker.Failure{Reason: client.WorkerReasonEnvironmentFailed, Cause: errors.New("no\x00 packages\xff")}
	})
	require.Equal(t, []string{"claim", "fail"}, f.calls)
	require.Equal(t, "environment_failed", f.bodies[1]["reason"])
	require.Equal(t, "environment_failed: no packages", f.bodies[1]["detail"], "the hub refuses U+0000")
	f = &fakeHub{heartbeat: client.Task{}}
	run(t, f, func(context.Context, worker.Task) error { panic("handler") })
	require.Equal(t, "internal", f.bodies[1]["reason"])
}

func TestACancelledTaskEndsItsHandlerAndIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeHub{heartbeat: client.Task{CancelRequested: true}}
		require.NoError(t, near(doer(func(r *http.Request) (*http.Response, error) {
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			return w.Result(), nil
		}), func(ctx context.Context, _ worker.Task) error {
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), worker.ErrCancelled)
			return ctx.Err()
		}).Run(t.Context()))
		require.Equal(t, []string{"claim", "fail"}, f.calls)
	})
}

// Of two workers of an instance one waits: that is no error.
func TestATaskThatAnotherWorkerHasIsClaimedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeHub{heartbeat: client.Task{}}
		codes := []client.ProblemCode{"task_held", "task_waits", "internal"}
		patient := near(doer(func(r *http.Request) (*http.Response, error) {
			if path.Base(r.URL.Path) == "claim" && len(codes) > 0 {
				refusal := &client.Problem{Status: http.StatusConflict, Code: codes[0]}
				codes = codes[1:]
				return nil, refusal
			}
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			return w.Result(), nil
		}), func(context.Context, worker.Task) error { return nil })
		var errs []error
		patient.OnError = func(err error) { errs = append(errs, err) }
		require.NoError(t, patient.Run(t.Context()))
		require.Equal(t, []string{"claim", "complete"}, f.calls)
		require.Len(t, errs, 1, "%v", errs)
	})
}

func TestALostTaskEndsItsHandlerAndIsNotReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeHub{}
		var refused, ended time.Time
		hub := doer(func(r *http.Request) (*http.Response, error) {
			if path.Base(r.URL.Path) == "heartbeat" {
				if refused.IsZero() {
					refused = time.Now()
				}
				return nil, &client.Problem{Status: http.StatusConflict, Code: "task_fenced"}
			}
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			return w.Result(), nil
		})
		lost := near(hub, func(ctx context.Context, _ worker.Task) error {
			<-ctx.Done()
			ended = time.Now()
			return nil
		})
		var errs []error
		lost.OnError = func(err error) { errs = append(errs, err) }
		require.NoError(t, lost.Run(t.Context()))
		require.Equal(t, []string{"claim"}, f.calls)
		require.True(t, slices.ContainsFunc(errs, func(err error) bool { return errors.Is(err, worker.ErrLost) }))
		require.Equal(t, refused, ended, "at once, not at the end of the lease")
	})
}

// Once its lease has passed, another worker may have the task: one that the hub does not answer works on it no more.
func TestATaskIsLostWhenItsLeaseEndsWithoutAnAnswer(t *testing.T) {
	for name, silent := range map[string]bool{"the hub refuses": false, "the hub is silent": true} {
		t.Run(name, func(t *testing.T) {
			f := &fakeHub{heartbeat: client.Problem{Status: http.StatusServiceUnavailable, Code: "busy"}}
			hub := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if silent && path.Base(r.URL.Path) == "heartbeat" {
					<-t.Context().Done()
					return
				}
				f.ServeHTTP(w, r)
			})
			handle := func(ctx context.Context, _ worker.Task) error {
				<-ctx.Done()
				return nil
			}
			errs := runWorker(t, hub, &worker.Worker{Lease: time.Second, Handle: handle})
			require.Equal(t, []string{"claim"}, f.calls)
			require.True(t, slices.ContainsFunc(errs, func(err error) bool { return errors.Is(err, worker.ErrLost) }))
		})
	}
}

// doer answers requests without a network.
type doer func(*http.Request) (*http.Response, error)

func (d doer) Do(r *http.Request) (*http.Response, error) { return d(r) }

// near is a worker that needs no network to reach the hub, so that its lease passes in a bubble of synctest.
func near(hub doer, handle func(context.Context, worker.Task) error) *worker.Worker {
	return &worker.Worker{
		Hub: &client.Hub{Client: &client.Client{Server: "https://hub.test/", Client: hub}}, ProjectID: id, InstanceID: id,
		Handle: handle,
	}
}

// The hub counts the lease from when it gets a heartbeat: a slow answer makes it no longer.
func TestALeaseCountsFromTheHeartbeatAndNotFromItsAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeHub{heartbeat: client.Task{ID: id}}
		var asked, lost time.Time
		hub := doer(func(r *http.Request) (*http.Response, error) {
			if path.Base(r.URL.Path) == "heartbeat" {
				if !asked.IsZero() { // only the first has an answer
					<-r.Context().Done()
					return nil, r.Context().Err()
				}
				asked = time.Now()
				time.Sleep(worker.DefaultLease / 2)
			}
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			return w.Result(), nil
		})
		require.NoError(t, near(hub, func(ctx context.Context, _ worker.Task) error {
			<-ctx.Done()
			lost = time.Now()
			return nil
		}).Run(t.Context()))
		require.Equal(t, worker.DefaultLease, lost.Sub(asked))
	})
}

// TestMembersAreReportedWhileTheirInstanceRuns also where the program fails once, and not those that a task is about.
func TestMembersAreReportedWhileTheirInstanceRuns(t *testing.T) {
	var (
		mu      sync.Mutex
		reports []client.MemberReport
	)
	broken := errors.New("the cluster does not answer")
	calls := 0
	errs := runWorker(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		i := client.AppInstance{ID: id, Status: client.AppInstanceStatusRunning, Members: []client.Member{{ID: id}}}
		switch {
		case r.Method == http.MethodPost:
			var report client.MemberReport
			_ = json.NewDecoder(r.Body).Decode(&report)
			reports = append(reports, report)
			if len(reports) == 1 {
				answer(w, client.Problem{Status: http.StatusConflict, Code: "member_busy"})
				return
			}
			answer(w, i)
		case path.Base(r.URL.Path) == "tasks":
			answer(w, client.TaskList{Items: []client.Task{}})
		default:
			if len(reports) >= 3 {
				i.Status = client.AppInstanceStatusDecommissioned
			}
			answer(w, i)
		}
	}), &worker.Worker{
		ReportEvery: time.Millisecond,
		Members: func(_ context.Context, i client.AppInstance) (map[string]client.MemberReport, error) {
			calls++
			if calls == 1 {
				return nil, broken
			}
			r := client.MemberReport{Status: client.MemberReportStatusReady, Detail: "up\x00"}
			return map[string]client.MemberReport{i.Members[0].ID: r}, nil
		},
	})
	require.Equal(t, []error{broken}, errs)
	require.GreaterOrEqual(t, len(reports), 3)
	require.Equal(t, client.MemberReport{Status: client.MemberReportStatusReady, Detail: "up"}, reports[0])
}

// A machine that does not answer takes Members all its time; what is known of the others is reported, beside the error.
func TestMembersThatTakeAllTheirTimeAreReported(t *testing.T) {
	var (
		reported atomic.Bool
		calls    atomic.Int64
	)
	runWorker(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := client.AppInstance{ID: id, Status: client.AppInstanceStatusRunning, Members: []client.Member{{ID: id}}}
		switch {
		case r.Method == http.MethodPost:
			reported.Store(true)
		case path.Base(r.URL.Path) == "tasks":
			answer(w, client.TaskList{Items: []client.Task{}})
			return
		case reported.Load() || calls.Load() > 20:
			i.Status = client.AppInstanceStatusDecommissioned
		}
		answer(w, i)
	}), worker.WithMembersTimeout(&worker.Worker{
		ReportEvery: time.Millisecond,
		Members: func(ctx context.Context, i client.AppInstance) (map[string]client.MemberReport, error) {
			calls.Add(1)
			<-ctx.Done()
			return map[string]client.MemberReport{i.Members[0].ID: {Status: client.MemberReportStatusReady}}, ctx.Err()
		},
	}, 100*time.Millisecond))
	require.True(t, reported.Load())
}

// A worker that is asked to stop leaves its task to the next one: what it has not done is no failure.
func TestAWorkerThatStopsReportsNoFailure(t *testing.T) {
	f := &fakeHub{heartbeat: client.Task{}}
	ctx, stop := context.WithCancel(t.Context())
	w := &worker.Worker{Handle: func(ctx context.Context, _ worker.Task) error {
		stop()
		<-ctx.Done()
		return ctx.Err()
	}}
	require.ErrorIs(t, newWorker(t, f, w).Run(ctx), context.Canceled)
	require.Equal(t, []string{"claim"}, f.calls)
}
