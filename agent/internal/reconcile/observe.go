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
)

// snapshot is everything that a decision needs.
type snapshot struct {
	desired  agent.Desired
	leases   agent.Leases
	observed agent.Observed
	members  map[string]state.Member
}

// observe reads the machine and the store, and journals what the store does not know.
func (r *Reconciler) observe(ctx context.Context) (snapshot, error) {
	// Busy first: an action that ends after this counts as running, never the other way round.
	busy := r.busyMembers(r.clock.Now())
	containers, err := r.list(ctx)
	if err != nil {
		return snapshot{}, err
	}
	attached, err := r.machine.Network.List()
	if err != nil {
		return snapshot{}, fmt.Errorf("list networks: %w", err)
	}
	if err := r.journalUnknown(containers, attached); err != nil {
		return snapshot{}, err
	}
	// Members before the state: a member that a new state adds in between would seem to have left.
	s := snapshot{members: r.store.Members()}
	s.desired, s.leases = r.desiredState(ctx), r.leases(s.members)
	s.observed = agent.Observed{
		Containers: r.containers(containers),
		Networks:   networks(attached, s.members),
		Members:    make(map[string]agent.Member, len(s.members)),
		Busy:       busy,
	}
	for id, m := range s.members {
		s.observed.Members[id] = m.Member
	}
	s.observed.Unusable = r.unusable(s)
	r.withoutDevices.Store(new(agent.WithoutDevices(s.desired, s.observed)))
	s.observed.Environments = r.environments(s)
	s.observed.Images, err = r.images(ctx, s)
	if err != nil {
		return snapshot{}, err
	}
	return s, r.closeMeasuredRuns(containers, busy)
}

// list returns this agent's containers. Containers without a member were made by other programs.
func (r *Reconciler) list(ctx context.Context) ([]agent.Listed, error) {
	all, err := r.machine.Containers.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	out := make([]agent.Listed, 0, len(all))
	for _, c := range all {
		if c.MemberID != "" {
			out = append(out, listed(c))
		}
	}
	return out, nil
}

func listed(c runtime.Container) agent.Listed {
	return agent.Listed{
		ID:             c.ID,
		MemberID:       c.MemberID,
		InstanceID:     c.InstanceID,
		Service:        c.Service,
		Copy:           c.Copy,
		Revision:       c.Revision,
		SpecDigest:     c.SpecDigest,
		AcceleratorIDs: c.AcceleratorIDs,
		DependsOn:      c.DependsOn,
		StopGrace:      c.StopGrace,
		Restart:        c.Restart,
		Environment:    c.Environment,
		Status:         statusOf(c.State),
		Lost:           c.State == runtime.StateLost,
		ExitedAt:       c.ExitedAt,
		ExitCode:       int32(c.ExitCode),
		OOMKilled:      c.OOMKilled,
		StartedAt:      c.StartedAt,
	}
}

func (r *Reconciler) busyMembers(now time.Time) map[string]agent.Work {
	r.mu.Lock()
	defer r.mu.Unlock()
	busy := make(map[string]agent.Work, len(r.busy))
	for id, actions := range r.busy {
		var w agent.Work
		for a := range actions {
			if a.image != "" {
				w.Pulling = append(w.Pulling, a.image)
			} else {
				w.Mark(a.service)
			}
		}
		slices.Sort(w.Pulling)
		busy[id] = w
	}
	for held, until := range r.retryAfter {
		if until.After(now) {
			w := busy[held.memberID]
			w.Mark(held.service)
			busy[held.memberID] = w
		}
	}
	return busy
}

// journalUnknown adds containers and networks that the store does not know to the journal: their removal is proven too.
func (r *Reconciler) journalUnknown(containers []agent.Listed, attached []string) error {
	busy := r.busyMembers(r.clock.Now()) // before the journal: a start that ended by now is in the journal
	runs, members := r.store.Runs(), r.store.Members()
	for _, c := range containers {
		if run, known := runs[c.ID]; !known {
			if err := r.store.JournalRun(c.UnknownRun(r.clock)); err != nil {
				return err
			}
		} else if c.StartUnrecorded(run, busy[c.MemberID]) {
			started := r.clock.FromMachineTime(c.StartedAt, run.OpenedAt)
			if err := r.store.UpdateRun(c.ID, func(run *state.Run) { run.StartedAt = started }); err != nil {
				return err
			}
		}
		if _, known := members[c.MemberID]; known {
			continue
		}
		if err := r.store.UpdateMember(c.MemberID, func(m *state.Member) { m.InstanceID = c.InstanceID }); err != nil {
			return err
		}
		members = r.store.Members()
	}
	for _, id := range attached {
		memberID, _ := network.ParseID(id)
		if _, known := members[memberID]; known {
			continue
		}
		if err := r.store.UpdateMember(memberID, func(*state.Member) {}); err != nil {
			return err
		}
		members = r.store.Members()
	}
	return nil
}

// closeMeasuredRuns removes runs from the journal whose container is gone and whose usage is sealed.
func (r *Reconciler) closeMeasuredRuns(containers []agent.Listed, busy map[string]agent.Work) error {
	exists := make(map[string]bool, len(containers))
	for _, c := range containers {
		exists[c.ID] = true
	}
	for id, run := range r.store.Runs() {
		if exists[id] || busy[run.MemberID].With(run.Service) || !r.store.Measured(id) {
			continue
		}
		if err := r.store.CloseRun(id); err != nil {
			return err
		}
	}
	return nil
}

// containers joins the listed containers with the journal.
func (r *Reconciler) containers(listed []agent.Listed) []agent.Container {
	runs := r.store.Runs()
	watchedSince := *r.watchedSince.Load()
	out := make([]agent.Container, 0, len(listed))
	for _, l := range listed {
		c := l.Container(runs[l.ID], r.clock)
		c.WatchedSince, c.Failing = watchedSince, r.failing(l.ID)
		out = append(out, c)
	}
	return out
}

// forgetStops takes back what is stored of stops that were cut off.
func (r *Reconciler) forgetStops(ctx context.Context, s snapshot, actions []agent.Action) {
	for _, id := range agent.Resumed(s.observed, r.store.Runs(), actions) {
		if err := r.store.UpdateRun(id, func(run *state.Run) { run.StopRequested = false }); err != nil {
			r.log.WarnContext(ctx, "cannot store that a container goes on", slog.String("container_id", id),
				slog.Any("error", err))
		}
	}
}

func statusOf(s runtime.State) agent.ContainerStatus {
	switch s {
	case runtime.StateCreated:
		return agent.Created
	case runtime.StateRunning:
		return agent.Running
	case runtime.StateExited, runtime.StateLost:
		return agent.Exited
	case runtime.StateUnknown:
		return agent.Unknown
	}
	return agent.Unknown
}

func networks(attached []string, members map[string]state.Member) []agent.Network {
	out := make([]agent.Network, 0, len(attached))
	for _, id := range attached {
		memberID, service := network.ParseID(id)
		m := members[memberID].Member
		m.ID = memberID
		out = append(out, m.Network(service))
	}
	return out
}

// images reports, for each image that a container may be started from next, whether it is ready. It skips busy members.
func (r *Reconciler) images(ctx context.Context, snap snapshot) (map[string]bool, error) {
	have := make(map[string]bool)
	containers := make(map[string][]agent.Container)
	for _, c := range snap.observed.Containers {
		containers[c.MemberID] = append(containers[c.MemberID], c)
	}
	for _, signed := range snap.desired.Workloads {
		w := signed.Effective(snap.observed.Members[signed.MemberID])
		if snap.observed.Busy[w.MemberID].Other || w.Stopped || w.Refused != 0 {
			continue
		}
		for _, may := range w.MayRun() {
			for _, s := range may.Services {
				if may.Keeps(s, containers[w.MemberID]) {
					continue
				}
				for _, image := range s.Images {
					if err := r.hasImage(ctx, image, have); err != nil {
						return nil, err
					}
				}
			}
		}
	}
	return have, nil
}

func (r *Reconciler) hasImage(ctx context.Context, image string, have map[string]bool) error {
	if _, asked := have[image]; asked {
		return nil
	}
	ref, err := runtime.ParseImage(image)
	if err != nil {
		return nil //nolint:nilerr // the pull reports the error
	}
	have[image], err = r.machine.Images.HasImage(ctx, ref)
	if err != nil && (ctx.Err() != nil || runtime.IsAway(err)) {
		return fmt.Errorf("find image %s: %w", image, err)
	}
	return nil // an image that is damaged is not there: the pull reports the error, to its members alone
}

// unusable has the accelerators that are named and cannot be used.
func (r *Reconciler) unusable(snap snapshot) map[string]agent.AcceleratorState {
	var named [][]string
	for _, signed := range snap.desired.Workloads {
		for _, w := range signed.Effective(snap.observed.Members[signed.MemberID]).MayRun() {
			for _, s := range w.Services {
				named = append(named, s.AcceleratorIDs)
			}
		}
	}
	var used []string
	for _, c := range snap.observed.Containers {
		named = append(named, c.AcceleratorIDs)
		if c.Status != agent.Exited {
			used = append(used, c.AcceleratorIDs...)
		}
	}
	r.machine.Accelerators.SetUsed(used)
	var found map[string]agent.AcceleratorState
	for _, id := range slices.Concat(named...) {
		if state := r.machine.Accelerators.State(id); state != 0 {
			if found == nil {
				found = map[string]agent.AcceleratorState{}
			}
			found[id] = state
		}
	}
	return found
}
