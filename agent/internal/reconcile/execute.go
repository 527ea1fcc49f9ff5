package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// start executes an action in parallel to others. Until it ends its member counts as busy, and Diff leaves it alone.
func (r *Reconciler) start(ctx context.Context, a agent.Action) {
	id := agent.MemberOf(a)
	if _, is := a.(agent.CancelPull); is {
		r.cancelPulls(id)
		return
	}
	pull, pulling := a.(agent.PullImage)
	_, stopping := a.(agent.StopContainer)
	ctx = r.workContext(ctx, id)
	acting, cancel := context.WithCancel(ctx)
	w := &work{image: pull.Image, service: agent.ServiceOf(a), cancel: cancel}
	r.markBusy(id, w)
	r.running.Go(func() {
		defer r.Wake()
		defer r.markDone(id, w)
		defer cancel()
		slots := r.actions
		if pulling {
			slots = r.pulls
			unlock, err := r.orgPulls.Lock(acting, pull.OrgID)
			if err != nil {
				return
			}
			defer unlock()
		}
		if !stopping { // how long a stop takes, the container decides: it delays no other member
			inSlot, giveBack, err := takeSlot(acting, slots)
			if err != nil {
				return
			}
			defer giveBack()
			acting = inSlot
		}
		began := time.Now()
		failpoint.Hit("agent/action/begun")
		err := traced(acting, a, func(ctx context.Context) error { return r.execute(ctx, a) })
		failpoint.Hit("agent/action/done")
		r.log.DebugContext(ctx, "action", slog.String("action", fmt.Sprintf("%T", a)), slog.String("member_id", id),
			slog.Duration("took", time.Since(began)), slog.Any("error", err))
		if err == nil || acting.Err() != nil {
			return
		}
		r.failed(ctx, a, err)
	})
}

func (r *Reconciler) markBusy(id string, w *work) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy[id] == nil {
		r.busy[id] = map[*work]bool{}
	}
	r.busy[id][w] = true
}

func (r *Reconciler) markDone(id string, w *work) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if delete(r.busy[id], w); len(r.busy[id]) == 0 {
		delete(r.busy, id)
	}
}

func (r *Reconciler) cancelPulls(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.busy[id] {
		if w.image != "" {
			w.cancel()
		}
	}
}

// failed stores why an action failed. An acquisition is retried after the backoff of its service or member; a release
// is retried after a pause, for ever.
func (r *Reconciler) failed(ctx context.Context, a agent.Action, err error) {
	id := agent.MemberOf(a)
	r.log.WarnContext(ctx, "action failed", slog.String("action", fmt.Sprintf("%T", a)), slog.String("member_id", id),
		slog.Any("error", err))
	if runtime.IsAway(err) {
		err = fault.New(fault.Unavailable, agent.CodeContainerdUnavailable, "containerd does not answer.", err)
	}
	storeErr := r.withClock(func(now time.Time) error {
		if pause := agent.PauseAfter(a, err); pause > 0 {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.retryAfter[heldWork{id, agent.ServiceOf(a)}] = now.Add(pause)
			return nil
		}
		return r.store.UpdateMember(id, func(m *state.Member) { m.Member = m.FailedBy(a, err, now) })
	})
	if storeErr != nil {
		r.log.ErrorContext(ctx, "cannot store a failure", slog.String("member_id", id), slog.Any("error", storeErr))
	}
}

func (r *Reconciler) execute(ctx context.Context, a agent.Action) error {
	switch a := a.(type) {
	case agent.ConfirmRevision:
		failpoint.Hit("agent/confirm/due")
		return r.store.UpdateMember(a.MemberID, func(m *state.Member) { a.Record(&m.Member) })
	case agent.FallBack:
		r.log.WarnContext(ctx, "a revision failed; its fallback runs instead", slog.String("member_id", a.MemberID),
			slog.Uint64("revision", a.Revision), slog.String("reason", a.Reason.Text()), slog.String("detail", a.Detail))
		failpoint.Hit("agent/fallback/due")
		return r.store.UpdateMember(a.MemberID, func(m *state.Member) { a.Record(&m.Member) })
	case agent.CancelPull:
		return nil // start has done it
	case agent.StopContainer:
		return r.stop(ctx, a)
	case agent.RecordExit:
		return r.recordExit(ctx, a)
	case agent.RemoveContainer:
		return r.removeContainer(ctx, a)
	case agent.RemoveNetwork:
		return r.removeNetwork(ctx, a)
	case agent.RetireMember:
		return r.retire(ctx, a)
	case agent.FetchPart:
		return r.fetch(ctx, a)
	case agent.PullImage:
		return r.pull(ctx, a)
	case agent.SetupNetwork:
		return r.launch(ctx, a)
	case agent.StartContainer:
		return r.startContainer(ctx, a, existingNetworks())
	case agent.PublishPorts:
		return r.publishPorts(ctx, a)
	case agent.DeliverConfig:
		return r.deliverConfig(ctx, a)
	case agent.DeliverSecrets:
		return r.deliverSecrets(ctx, a)
	}
	return fmt.Errorf("reconcile: unknown action %T", a)
}

// deliverConfig replaces the file and signals, then stores the digest: after a crash in between it does both again.
func (r *Reconciler) deliverConfig(ctx context.Context, a agent.DeliverConfig) error {
	r.log.InfoContext(ctx, "delivering a config", slog.String("member_id", a.MemberID),
		slog.String("container_id", a.ContainerID))
	if err := r.machine.Containers.DeliverConfig(ctx, a.ContainerID, a.Service.Spec.GetConfig()); err != nil {
		return err
	}
	failpoint.Hit("agent/config/delivered")
	return r.store.UpdateRun(a.ContainerID, a.Record)
}

// deliverSecrets does the same with the secret parameters.
func (r *Reconciler) deliverSecrets(ctx context.Context, a agent.DeliverSecrets) error {
	r.log.InfoContext(ctx, "delivering secret parameters", slog.String("member_id", a.MemberID),
		slog.String("container_id", a.ContainerID))
	secrets, err := r.secrets(a.Workload, a.Service)
	if err != nil {
		return err
	}
	if err := r.machine.Containers.DeliverSecrets(ctx, a.ContainerID, secrets, a.Service.Spec.GetSecrets()); err != nil {
		return err
	}
	failpoint.Hit("agent/secrets/delivered")
	return r.store.UpdateRun(a.ContainerID, a.Record)
}

func (r *Reconciler) stop(ctx context.Context, a agent.StopContainer) error {
	r.log.InfoContext(ctx, "stopping a container", slog.String("member_id", a.MemberID),
		slog.String("container_id", a.ContainerID), slog.String("reason", a.Why))
	if err := r.store.UpdateRun(a.ContainerID, a.RecordIntent); err != nil {
		// The container stops in any case; without the record its exit counts as a failure.
		r.log.ErrorContext(ctx, "cannot store that a stop was requested", slog.String("container_id", a.ContainerID),
			slog.Any("error", err))
	}
	failpoint.Hit("agent/stop/requested")
	grace := a.Grace
	if a.Drain {
		began := time.Now()
		if err := r.machine.Network.Drain(ctx, network.ID(a.MemberID, a.Attachment()), grace/2); err != nil {
			r.log.WarnContext(ctx, "cannot wait for a container's connections", slog.String("container_id", a.ContainerID),
				slog.Any("error", err))
		}
		grace -= time.Since(began)
	}
	return r.machine.Containers.Stop(ctx, a.ContainerID, max(grace, 0))
}

// recordExit stores usage first, then the exit: after a crash in between the exit is only recorded again, while usage
// sealed twice would be billed twice.
func (r *Reconciler) recordExit(ctx context.Context, a agent.RecordExit) error {
	containers, err := r.sample(ctx)
	if err != nil && !agent.IsDiskFull(err) { // the exit itself is stored on a full disk, too
		return err
	}
	i := slices.IndexFunc(containers, func(l agent.Listed) bool { return l.ID == a.ContainerID })
	if i < 0 {
		return nil // it is gone; the sample has closed its usage
	}
	l := containers[i]
	if l.Status != agent.Exited || !r.store.Measured(l.ID) {
		return nil
	}
	if err := r.finishInstallation(ctx, a, l); err != nil {
		return err
	}
	failpoint.Hit("agent/exit/measured")
	err = r.withClock(func(now time.Time) error { return r.storeExit(a, l, now) })
	failpoint.Hit("agent/exit/recorded")
	return err
}

func (r *Reconciler) storeExit(a agent.RecordExit, l agent.Listed, now time.Time) error {
	exited := r.clock.FromMachineTime(l.ExitedAt, r.store.Runs()[l.ID].StartedAt)
	return r.store.RecordExit(a.MemberID, l.ID,
		func(m *state.Member, run state.Run) { a.RecordMember(&m.Member, run, l, exited, now) },
		func(run *state.Run) { a.Record(run, l, exited) })
}

func (r *Reconciler) removeContainer(ctx context.Context, a agent.RemoveContainer) error {
	if err := r.remove(ctx, a.ContainerID); err != nil {
		return err
	}
	failpoint.Hit("agent/remove/done")
	return r.store.CloseRun(a.ContainerID)
}

// remove removes a container and the environment that it has not finished.
func (r *Reconciler) remove(ctx context.Context, id string) error {
	if err := r.machine.Containers.Remove(ctx, id); err != nil {
		return err
	}
	return r.machine.Environments.Discard(ctx, id)
}

func (r *Reconciler) removeNetwork(ctx context.Context, a agent.RemoveNetwork) error {
	if err := r.machine.Network.Remove(ctx, network.ID(a.MemberID, a.Attachment())); err != nil {
		return err
	}
	if a.Ends {
		err := onVolumes(ctx, func() error { return r.machine.Volumes.Detach(ctx, a.MemberID) })
		if err != nil {
			return err
		}
	}
	failpoint.Hit("agent/network/removed")
	return r.store.UpdateMember(a.MemberID, func(m *state.Member) { a.Record(&m.Member) })
}

// retire checks the machine for anything that is left of the member, and only then stores the proof of removal.
func (r *Reconciler) retire(ctx context.Context, a agent.RetireMember) error {
	left, err := r.machine.Containers.Leftovers(ctx, a.MemberID)
	if err == nil && len(left) > 0 {
		// A crash interrupted a removal.
		if err := r.machine.Containers.RemoveMember(ctx, a.MemberID); err != nil {
			return err
		}
		left, err = r.machine.Containers.Leftovers(ctx, a.MemberID)
	}
	if err != nil {
		return err
	}
	// In any case: the last member's removal also removes the shared network.
	if err := r.machine.Network.RemoveMember(ctx, a.MemberID); err != nil {
		return err
	}
	more, err := r.machine.Network.Leftovers(ctx, a.MemberID)
	if err != nil {
		return err
	}
	volumes, err := r.removeVolumes(ctx, a.MemberID)
	if err != nil {
		return err
	}
	if left = slices.Concat(left, more, volumes); len(left) > 0 {
		return fmt.Errorf("still there of member %s: %v", a.MemberID, left)
	}
	failpoint.Hit("agent/retire/checked")
	if r.store.Metering(a.MemberID) {
		// One more sample ends the intervals that the meter still has open for the member.
		if _, err := r.sample(ctx); err != nil && !agent.IsDiskFull(err) {
			return err
		}
	}
	failpoint.Hit("agent/retire/measured")
	return r.store.Retire(a.MemberID, protocol.RemovalKinds(), r.clock.Now())
}

func (r *Reconciler) fetch(ctx context.Context, a agent.FetchPart) error {
	raw, err := r.hub.Part(ctx, a.SHA256)
	if err != nil {
		return err
	}
	return r.store.AcceptPart(raw)
}

func (r *Reconciler) pull(ctx context.Context, a agent.PullImage) error {
	ref, err := runtime.ParseImage(a.Image)
	if err != nil {
		return err
	}
	credential, err := r.hub.PullCredential(ctx, ref.Repository)
	if err != nil {
		return markHubAway(err)
	}
	tlsConf, err := r.hub.RegistryTLS()
	if err != nil {
		return markHubAway(err)
	}
	failpoint.Hit("agent/pull/credential_received")
	ref.RegistryHost = credential.GetRegistryHost()
	creds := func(ctx context.Context, repository string) (string, string, error) {
		// A long pull outlives its first credential.
		if !r.clock.Now().Before(credential.GetExpiresAt().AsTime().Add(-time.Minute)) {
			fresh, err := r.hub.PullCredential(ctx, repository)
			if err != nil {
				return "", "", err
			}
			credential = fresh
		}
		return credential.GetUsername(), credential.GetPassword(), nil
	}
	defer r.notePull(a)()
	err = r.machine.Images.EnsureImage(ctx, ref, creds, tlsConf)
	if missing := runtime.SpaceMissing(err); missing > 0 {
		r.imageSpace.Store(missing)
		r.imageGC.Wake()
	}
	return err
}

func markHubAway(err error) error {
	if fault.Is(err, fault.Unavailable) {
		return fmt.Errorf("%w: %w", agent.ErrHubAway, err)
	}
	return err
}
