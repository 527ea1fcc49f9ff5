// Package worker is the SDK of external workers: programs that operate apps whose controller runs outside the platform.
// It claims tasks, extends their leases while a handler works, and reports how they end. It knows no cluster software:
// that is the handler's, and each step of a handler must bear to be repeated, because a task passes on when its worker
// dies.
//
//	w := worker.Worker{Hub: hub, ProjectID: project, InstanceID: instance, Handle: func(ctx context.Context,
//		t worker.Task) error {
//		if err := t.Phase(ctx, "install"); err != nil {
//			return err
//		}
//		return install(ctx)
//	}}
//	err := w.Run(ctx)
package worker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// pollWait is how long the hub may wait for a task before it answers that there is none.
	pollWait = "30s"
	// DefaultLease is how long a task stays with a worker that is silent.
	DefaultLease = time.Minute
	// heartbeatShare of the lease passes between two heartbeats, so that two of them may be lost.
	heartbeatShare = 3
	// retryPause is how long the worker waits after an error of the hub.
	retryPause = 2 * time.Second
	// DefaultReportEvery is a quarter of the time after which a member that is not reported any more counts as failed.
	DefaultReportEvery = 30 * time.Second
	// MembersTimeout bounds a call of Members.
	MembersTimeout = 20 * time.Second
	// reportTimeout bounds the reports of members, and the report of a task's end: the work is done, also where the
	// worker is asked to stop.
	reportTimeout = 20 * time.Second
	maxDetail     = 2000
	// codeFenced is the problem's code where another attempt holds the task.
	codeFenced = "task_fenced"
	// codeHeld and codeWaits are those of a task that cannot be claimed now.
	codeHeld  = "task_held"
	codeWaits = "task_waits"
	// codeMemberBusy is the problem's code where a task is about the member.
	codeMemberBusy = "member_busy"
)

// ErrCancelled is the cause of a handler's context once the hub has asked for the task's end.
var ErrCancelled = errors.New("worker: the task was cancelled")

// ErrLost is the cause of a handler's context once another worker may hold the task.
var ErrLost = errors.New("worker: the task's lease was lost")

// Failure is an error of a handler with a reason of the contract; any other error has the reason internal.
type Failure struct {
	Reason client.WorkerReason
	Cause  error
}

func (f *Failure) Error() string { return string(f.Reason) + ": " + f.Cause.Error() }

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Cause }

// Worker works off the tasks of one app instance, one after the other.
type Worker struct {
	Hub        *client.Hub
	ProjectID  string
	InstanceID string
	// Name tells apart the processes of one service account; empty for a random one.
	Name string
	// Lease is DefaultLease where it is zero.
	Lease time.Duration
	// Handle does what a task asks for. Its context ends when the task is cancelled or lost, and is within the trace of
	// the request that the task follows from, in a span of the global tracer provider of OpenTelemetry.
	Handle func(ctx context.Context, t Task) error
	// Members says how the members of a running instance do, by their ids; those that it leaves out are not reported.
	// Once it has reported a member, the hub takes a silence of two minutes for the member's failure. It may be nil: then
	// members are as their tasks left them. It is called beside Handle. Its context ends after MembersTimeout: what it
	// returns by then is reported, also beside an error.
	Members func(ctx context.Context, i client.AppInstance) (map[string]client.MemberReport, error)
	// ReportEvery is DefaultReportEvery where it is zero.
	ReportEvery time.Duration
	// OnError gets errors of the hub and of Members, after which the worker goes on; may be nil. Calls do not overlap.
	OnError func(error)

	onError sync.Mutex
	// membersTimeout replaces MembersTimeout in tests.
	membersTimeout time.Duration
}

// Task is a claimed task. Instance is the app instance at the claim, with its members, parameters and config.
type Task struct {
	client.Task
	Instance client.AppInstance

	worker *Worker
	// claimed is when the hub was asked for it: its lease begins then at the earliest.
	claimed time.Time
}

// Member is the member that the task is about; false where it is about all of them.
func (t Task) Member() (client.Member, bool) {
	for _, m := range t.Instance.Members {
		if m.ID == t.MemberID {
			return m, true
		}
	}
	return client.Member{}, false
}

// Phase reports that a phase of the task begins.
func (t Task) Phase(ctx context.Context, name string) error {
	w := t.worker
	_, err := client.Read[client.Task](w.Hub.ProgressAppInstanceTask(ctx, w.ProjectID, w.InstanceID, t.ID,
		client.TaskProgress{Attempt: t.Attempt, Phase: name}))
	return err
}

// Run claims and works off tasks until the context ends, or until the instance is decommissioned.
func (w *Worker) Run(ctx context.Context) error {
	if w.Name == "" {
		w.Name = rand.Text()
	}
	if w.Lease == 0 {
		w.Lease = DefaultLease
	}
	if w.Members != nil {
		reporting, stop := context.WithCancel(ctx)
		var ended sync.WaitGroup
		ended.Go(func() { w.report(reporting) })
		defer func() { stop(); ended.Wait() }()
	}
	for ctx.Err() == nil {
		done, err := w.step(ctx)
		if done {
			return nil
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		if !isTurnOfAnother(err) {
			w.failed(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryPause):
		}
	}
	return context.Cause(ctx)
}

// isTurnOfAnother reports whether a task could not be claimed because another worker has one of the instance, or
// because it has failed just now.
func isTurnOfAnother(err error) bool {
	problem, is := errors.AsType[*client.Problem](err)
	return is && (problem.Code == codeHeld || problem.Code == codeWaits)
}

func (w *Worker) failed(err error) {
	if err == nil || w.OnError == nil {
		return
	}
	w.onError.Lock()
	defer w.onError.Unlock()
	w.OnError(err)
}

// report reports the members until the context ends.
func (w *Worker) report(ctx context.Context) {
	tick := time.NewTicker(cmp.Or(w.ReportEvery, DefaultReportEvery))
	defer tick.Stop()
	for {
		if err := w.reportMembers(ctx); ctx.Err() == nil {
			w.failed(err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (w *Worker) reportMembers(ctx context.Context) error {
	i, members, err := w.askMembers(ctx)
	if i.Status != client.AppInstanceStatusRunning {
		return err
	}
	// What Members has found out in all of its time still reaches the hub.
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	for id, r := range members {
		r.Detail = detailOf(r.Detail)
		_, failure := client.Read[client.AppInstance](w.Hub.ReportAppInstanceMember(ctx, w.ProjectID, w.InstanceID, id, r))
		if problem, is := errors.AsType[*client.Problem](failure); !is || problem.Code != codeMemberBusy {
			err = errors.Join(err, failure)
		}
	}
	return err
}

// askMembers asks how the members of the instance do, where it runs.
func (w *Worker) askMembers(ctx context.Context) (i client.AppInstance, members map[string]client.MemberReport,
	err error,
) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(w.membersTimeout, MembersTimeout))
	defer cancel()
	if i, err = w.instance(ctx); err == nil && i.Status == client.AppInstanceStatusRunning {
		members, err = w.Members(ctx, i)
	}
	return i, members, err
}

// step waits for a task and works it off; done says that there will be none any more.
func (w *Worker) step(ctx context.Context) (done bool, err error) {
	i, err := w.instance(ctx)
	if err != nil || i.Status == client.AppInstanceStatusDecommissioned {
		return err == nil, err
	}
	list, err := client.Read[client.TaskList](w.Hub.ListAppInstanceTasks(ctx, w.ProjectID, w.InstanceID,
		&client.ListAppInstanceTasksParams{State: client.TaskStatePending, Wait: pollWait, Limit: 1}))
	if err != nil || len(list.Items) == 0 {
		return false, err
	}
	ctx, span := inTrace(ctx, list.Items[0])
	defer func() { endSpan(span, err) }()
	asked := time.Now()
	claimed, err := client.Read[client.Task](w.Hub.ClaimAppInstanceTask(ctx, w.ProjectID, w.InstanceID, list.Items[0].ID,
		client.TaskClaim{Worker: w.Name, LeaseSeconds: int32(w.Lease / time.Second)}))
	if err != nil {
		return false, err
	}
	if i, err = w.instance(ctx); err != nil {
		return false, err
	}
	return false, w.work(ctx, Task{Task: claimed, Instance: i, worker: w, claimed: asked})
}

// inTrace is within a span of the task's own, in the trace of the request that the task follows from; outside of any
// where that was in none.
func inTrace(ctx context.Context, t client.Task) (context.Context, trace.Span) {
	if t.Traceparent == "" {
		return ctx, noop.Span{}
	}
	header := propagation.MapCarrier{"traceparent": t.Traceparent}
	return otel.Tracer("gpuaas/worker").Start(propagation.TraceContext{}.Extract(ctx, header), "task "+string(t.Kind),
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
			attribute.String("gpuaas.app_instance_id", t.AppInstanceID),
			attribute.String("gpuaas.correlation_id", t.CorrelationID),
		))
}

// endSpan marks the span of a task by the reason of its failure alone: the text may quote what is not for a collector.
func endSpan(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, string(reasonOf(err)))
	}
	span.End()
}

// reasonOf is what the hub gets of an error of a handler.
func reasonOf(err error) client.WorkerReason {
	if named, is := errors.AsType[*Failure](err); is {
		return named.Reason
	}
	return client.WorkerReasonInternal
}

func (w *Worker) instance(ctx context.Context) (client.AppInstance, error) {
	return client.Read[client.AppInstance](w.Hub.GetAppInstance(ctx, w.ProjectID, w.InstanceID))
}

// work runs the handler while heartbeats extend the lease, and reports how the task ended.
func (w *Worker) work(ctx context.Context, t Task) error {
	handling, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.keep(handling, cancel, t)
	}()
	failure := w.handle(handling, t)
	cause := context.Cause(handling)
	cancel(nil)
	<-ended
	if errors.Is(cause, ErrLost) {
		return cause
	}
	if ctx.Err() != nil && failure != nil {
		return failure // the worker stops; the task passes on when its lease ends
	}
	report, done := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer done()
	return w.end(report, t, failure)
}

// handle turns a panic of the handler into a failure, so that the worker goes on.
func (w *Worker) handle(ctx context.Context, t Task) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the handler panicked: %v", p)
		}
	}()
	return w.Handle(ctx, t)
}

// keep extends the lease until the context ends. It ends the handler where the hub asks for that, or where the lease
// has run out or belongs to another worker.
func (w *Worker) keep(ctx context.Context, cancel context.CancelCauseFunc, t Task) {
	// Also while the hub leaves a heartbeat without an answer: another worker may have the task from then on.
	lost := time.AfterFunc(time.Until(t.claimed.Add(w.Lease)), func() { cancel(ErrLost) })
	defer lost.Stop()
	tick := time.NewTicker(w.Lease / heartbeatShare)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asked := time.Now()
		task, err := client.Read[client.Task](w.Hub.HeartbeatAppInstanceTask(ctx, w.ProjectID, w.InstanceID, t.ID,
			client.TaskAttempt{Attempt: t.Attempt}))
		var problem *client.Problem
		switch {
		case err == nil && task.CancelRequested:
			cancel(ErrCancelled)
			return
		case err == nil:
			lost.Reset(time.Until(asked.Add(w.Lease)))
		case errors.As(err, &problem) && problem.Code == codeFenced:
			cancel(ErrLost)
			return
		}
	}
}

// end reports success or failure. The answer of a repeated report is the same, so that the client may retry it.
func (w *Worker) end(ctx context.Context, t Task, failure error) error {
	if failure == nil {
		_, err := client.Read[client.Task](w.Hub.CompleteAppInstanceTask(ctx, w.ProjectID, w.InstanceID, t.ID,
			client.TaskAttempt{Attempt: t.Attempt}))
		return err
	}
	trace.SpanFromContext(ctx).SetStatus(codes.Error, string(reasonOf(failure)))
	_, err := client.Read[client.Task](w.Hub.FailAppInstanceTask(ctx, w.ProjectID, w.InstanceID, t.ID, client.TaskFail{
		Attempt: t.Attempt, Reason: reasonOf(failure), Detail: detailOf(failure.Error()),
	}))
	return err
}

// detailOf is so much of a text as the hub takes, which refuses U+0000: what a cluster prints may hold anything.
func detailOf(text string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(text[:min(len(text), maxDetail)], "\x00", ""), "")
}
