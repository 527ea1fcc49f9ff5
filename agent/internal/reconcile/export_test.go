package reconcile

import (
	"context"
	"net/url"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
)

// SetRunIDs replaces how runs are named.
func (r *Reconciler) SetRunIDs(next func(memberID string) string) { r.newRunID = next }

// StopContainer executes a stop.
func (r *Reconciler) StopContainer(ctx context.Context, a agent.StopContainer) error {
	return r.stop(ctx, a)
}

// Execute executes an action as a pass does, and waits for its end.
func (r *Reconciler) Execute(ctx context.Context, a agent.Action) {
	r.start(ctx, a)
	r.running.Wait()
}

// Sample takes a sample.
func (r *Reconciler) Sample(ctx context.Context) error {
	_, err := r.sample(ctx)
	return err
}

// HeldBack reports whether what is due for a service waits for an action that runs, or for the end of a pause.
func (r *Reconciler) HeldBack(memberID, service string) bool {
	return r.busyMembers(r.clock.Now())[memberID].With(service)
}

// ListedOf is a container as the loop passes it on.
func ListedOf(c runtime.Container) agent.Listed { return listed(c) }

// OnlyReads reports whether no service of a workload writes to a project's volume.
func OnlyReads(w agent.Workload, volumeID string) bool { return onlyReads(w, volumeID) }

// Redacted is a text without the credentials of a package index.
func Redacted(index, text string) (string, error) {
	parsed, err := url.Parse(index)
	return string(packageIndex{url: parsed}.redact([]byte(text))), err
}
