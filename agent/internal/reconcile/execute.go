package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// start executes an action beside the others. Until it has ended its member counts as busy, and Diff leaves it alone.
func (r *Reconciler) start(ctx context.Context, a agent.Action) {
	id := agent.MemberOf(a)
	if _, is := a.(agent.CancelPull); is {
		r.cancelPulls(id)
		return
	}
	_, pulling := a.(agent.PullImage)
	doing, cancel := context.WithCancel(ctx)
	r.begin(id, pulling, cancel)
	r.running.Go(func() {
		defer r.Wake()
		defer r.end(id, pulling)
		defer cancel()
		slots := r.actions
		if pulling {
			slots = r.pulls
		}
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case <-doing.Done():
			return
		}
		began := time.Now()
		failpoint.Hit("agent/action/begun")
		err := r.execute(doing, a)
		failpoint.Hit("agent/action/done")
		r.log.DebugContext(ctx, "action", "action", fmt.Sprintf("%T", a), "member", id, "took", time.Since(began), "error",
			err)
		if err == nil || doing.Err() != nil {
			return
		}
		r.failed(ctx, a, err)
	})
}

func (r *Reconciler) begin(id string, pulling bool, cancel context.CancelFunc) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.busy[id]
	if w == nil {
		w = &work{}
		r.busy[id] = w
	}
	if !pulling {
		w.other++
		return
	}
	w.pulling++
	w.cancelPulls = append(w.cancelPulls, cancel)
}

func (r *Reconciler) end(id string, pulling bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.busy[id]
	if pulling {
		w.pulling--
	} else {
		w.other--
	}
	if w.pulling == 0 {
		w.cancelPulls = nil
	}
	if w.pulling == 0 && w.other == 0 {
		delete(r.busy, id)
	}
}

func (r *Reconciler) cancelPulls(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w := r.busy[id]; w != nil {
		for _, cancel := range w.cancelPulls {
			cancel()
		}
	}
}

// failed remembers why an action did not work. What takes is tried again by its member's backoff; what gives back is
// tried again after a pause, for ever.
func (r *Reconciler) failed(ctx context.Context, a agent.Action, err error) {
	id := agent.MemberOf(a)
	r.log.WarnContext(ctx, "action failed", "action", fmt.Sprintf("%T", a), "member", id, "error", err)
	revision, counts := revisionOf(a)
	storeErr := r.timed(ctx, func(now time.Time) error {
		if !counts || isWaiting(err) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.hold[id] = now.Add(pauseAfter(err))
			return nil
		}
		return r.store.UpdateMember(id, func(m *state.Member) {
			m.Member = m.Failed(revision, reasonOf(a, err), fault.As(err).Public, fault.IsPermanent(err), 0, now)
		})
	})
	if storeErr != nil {
		r.log.ErrorContext(ctx, "cannot keep a failure", "member", id, "error", storeErr)
	}
}

// errWaiting marks what is no failure of the workload: the hub is away. The same goes for containerd and a full disk.
var errWaiting = errors.New("waiting for the hub")

func isWaiting(err error) bool {
	return errors.Is(err, errWaiting) || runtime.IsAway(err) || agent.IsDiskFull(err)
}

func pauseAfter(err error) time.Duration {
	if runtime.IsAway(err) || agent.IsHubAway(err) {
		return awayRetry
	}
	return releaseRetry
}

func revisionOf(a agent.Action) (revision uint64, acquires bool) {
	switch a := a.(type) {
	case agent.PullImage:
		return a.Revision, true
	case agent.SetupNetwork:
		return a.Revision, true
	case agent.StartContainer:
		return a.Revision, true
	case agent.Settle, agent.FallBack, agent.CancelPull, agent.StopContainer, agent.RecordExit, agent.RemoveContainer,
		agent.RemoveNetwork, agent.RetireMember, agent.FetchPart:
		return 0, false
	}
	return 0, false
}

// reasonOf keeps to the contract's closed list.
func reasonOf(a agent.Action, err error) string {
	switch code := fault.As(err).Code; code {
	case agent.ReasonFeatureMissing, agent.ReasonInsufficientCapacity, agent.ReasonDeviceFault:
		return code
	}
	if _, is := a.(agent.PullImage); is {
		return agent.ReasonImagePullFailed
	}
	return agent.ReasonInternal
}

func (r *Reconciler) execute(ctx context.Context, a agent.Action) error {
	switch a := a.(type) {
	case agent.Settle:
		failpoint.Hit("agent/settle/due")
		return r.store.UpdateMember(a.MemberID, func(m *state.Member) { m.SettledRevision = a.Revision })
	case agent.FallBack:
		r.log.WarnContext(ctx, "revision failed, going back", "member", a.MemberID, "revision", a.Revision, "reason",
			a.Reason, "detail", a.Detail)
		failpoint.Hit("agent/fallback/due")
		return r.store.UpdateMember(a.MemberID, func(m *state.Member) {
			m.FellBackFrom, m.FallbackReason, m.FallbackDetail = a.Revision, a.Reason, a.Detail
		})
	case agent.CancelPull:
		return nil // done in start
	case agent.StopContainer:
		return r.stop(ctx, a)
	case agent.RecordExit:
		return r.recordExit(ctx, a)
	case agent.RemoveContainer:
		return r.removeContainer(ctx, a)
	case agent.RemoveNetwork:
		return r.removeNetwork(ctx, a.MemberID)
	case agent.RetireMember:
		return r.retire(ctx, a)
	case agent.FetchPart:
		return r.fetch(ctx, a)
	case agent.PullImage:
		return r.pull(ctx, a)
	case agent.SetupNetwork:
		return r.launch(ctx, a)
	case agent.StartContainer:
		return r.startContainer(ctx, a, nil)
	}
	return fmt.Errorf("reconcile: unknown action %T", a)
}

func (r *Reconciler) stop(ctx context.Context, a agent.StopContainer) error {
	r.log.InfoContext(ctx, "stopping", "member", a.MemberID, "container", a.ContainerID, "why", a.Why)
	if err := r.store.UpdateRun(a.ContainerID, func(run *state.Run) { run.StopAsked = true }); err != nil {
		// The container ends in any case; without the note its exit counts as a failure.
		r.log.ErrorContext(ctx, "cannot keep that a stop was asked for", "container", a.ContainerID, "error", err)
	}
	failpoint.Hit("agent/stop/asked")
	return r.runtime.Stop(ctx, a.ContainerID, a.Grace)
}

// recordExit makes exit and usage durable, in this order: usage that is sealed twice would be billed twice, an exit
// that is noted twice is only noted twice.
func (r *Reconciler) recordExit(ctx context.Context, a agent.RecordExit) error {
	containers, err := r.sample(ctx)
	if err != nil && !agent.IsDiskFull(err) { // the exit itself is kept on a full disk, too
		return err
	}
	i := slices.IndexFunc(containers, func(c runtime.Container) bool { return c.ID == a.ContainerID })
	if i < 0 {
		return nil // gone meanwhile; the sample has closed its usage
	}
	c := containers[i]
	if statusOf(c.State) != agent.Exited || !r.store.Measured(c.ID) {
		return nil
	}
	failpoint.Hit("agent/exit/measured")
	return r.timed(ctx, func(now time.Time) error { return r.noteExit(a, c, now) })
}

func (r *Reconciler) noteExit(a agent.RecordExit, c runtime.Container, now time.Time) error {
	run := r.store.Runs()[c.ID]
	exited := r.clock.Happened(c.ExitedAt, run.StartedAt)
	err := r.store.UpdateMember(a.MemberID, func(m *state.Member) {
		m.ExitedAt, m.ExitCode = exited, int32(c.ExitCode)
		if !a.Unasked || run.StopAsked {
			return
		}
		m.Restarts++
		if c.State == runtime.StateLost {
			return // the machine's doing, not the workload's: it starts again at once
		}
		reason, detail := agent.ReasonCrashLoop, "the container exited with code "+strconv.FormatUint(uint64(c.ExitCode), 10)
		switch {
		case run.OverDisk != "":
			reason, detail = agent.ReasonDiskLimit, run.OverDisk
		case c.OOMKilled:
			reason, detail = agent.ReasonOutOfMemory, "the container used more memory than it may"
		}
		m.Member = m.Failed(a.Revision, reason, detail, false, exited.Sub(run.StartedAt), now)
	})
	if err != nil {
		return err
	}
	failpoint.Hit("agent/exit/counted")
	return r.store.UpdateRun(c.ID, func(run *state.Run) {
		run.ExitRecorded, run.ExitedAt, run.ExitCode = true, exited, int32(c.ExitCode)
	})
}

func (r *Reconciler) removeContainer(ctx context.Context, a agent.RemoveContainer) error {
	if err := r.runtime.Remove(ctx, a.ContainerID); err != nil {
		return err
	}
	failpoint.Hit("agent/remove/gone")
	return r.store.CloseRun(a.ContainerID)
}

func (r *Reconciler) removeNetwork(ctx context.Context, memberID string) error {
	if err := r.network.Remove(ctx, memberID); err != nil {
		return err
	}
	failpoint.Hit("agent/network/gone")
	return r.store.UpdateMember(memberID, func(m *state.Member) {
		m.NetworkRevision, m.NetworkReady, m.NetNSPath, m.UserNSPath, m.IP = 0, false, "", "", ""
	})
}

// retire looks whether anything of the member is left, rather than trusting what was done, and only then gives the
// proof.
func (r *Reconciler) retire(ctx context.Context, a agent.RetireMember) error {
	left, err := r.runtime.Leftovers(ctx, a.MemberID)
	if err == nil && len(left) > 0 {
		// Something was cut short; it goes, and is looked for again.
		if err := r.runtime.RemoveMember(ctx, a.MemberID); err != nil {
			return err
		}
		left, err = r.runtime.Leftovers(ctx, a.MemberID)
	}
	if err != nil {
		return err
	}
	// In any case: the last member takes along what all shared.
	if err := r.network.Remove(ctx, a.MemberID); err != nil {
		return err
	}
	more, err := r.network.Leftovers(ctx, a.MemberID)
	if err != nil {
		return err
	}
	if left = append(left, more...); len(left) > 0 {
		return fmt.Errorf("still there of member %s: %v", a.MemberID, left)
	}
	failpoint.Hit("agent/retire/looked")
	if r.store.Metering(a.MemberID) {
		// One more look for the meter: whatever of the member it still holds open ends here.
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
		return waitIfAway(err)
	}
	tlsConf, err := r.hub.RegistryTLS()
	if err != nil {
		return waitIfAway(err)
	}
	failpoint.Hit("agent/pull/permitted")
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
	err = r.runtime.EnsureImage(ctx, ref, creds, tlsConf)
	if missing := runtime.SpaceMissing(err); missing > 0 {
		r.imageSpace.Store(missing)
		r.imageGC.Wake()
	}
	return err
}

func waitIfAway(err error) error {
	if fault.Is(err, fault.Unavailable) {
		return fmt.Errorf("%w: %w", errWaiting, err)
	}
	return err
}
