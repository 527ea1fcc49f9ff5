package reconcile

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// endRunUnbilled is the end policy of a lease that lets its member go on without pay.
const endRunUnbilled = "run_unbilled"

// look is everything that a decision needs.
type look struct {
	desired  agent.Desired
	leases   agent.Leases
	observed agent.Observed
	members  map[string]state.Member
}

func (r *Reconciler) look(ctx context.Context) (look, error) {
	// Busy first: what ends after this is seen as still under way, never the other way round.
	busy := r.busyMembers(r.clock.Now())
	containers, err := r.list(ctx)
	if err != nil {
		return look{}, err
	}
	attached, err := r.network.List(ctx)
	if err != nil {
		return look{}, fmt.Errorf("list networks: %w", err)
	}
	if err := r.adopt(containers, attached); err != nil {
		return look{}, err
	}
	// Members before the state: one that a state brings in between would look as if it had left.
	l := look{members: r.store.Members()}
	l.desired, l.leases = r.desired(ctx), r.leases(l.members)
	l.observed = agent.Observed{
		Containers: r.containers(containers), Networks: networks(attached, l.members),
		Members: make(map[string]agent.Member, len(l.members)), Busy: busy,
	}
	for id, m := range l.members {
		l.observed.Members[id] = m.Member
	}
	l.observed.Images, err = r.images(ctx, l)
	if err != nil {
		return look{}, err
	}
	return l, r.sweep(containers, busy)
}

// list returns this agent's containers. One without a member was not made by it, and is left to whoever made it.
func (r *Reconciler) list(ctx context.Context) ([]runtime.Container, error) {
	all, err := r.runtime.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return slices.DeleteFunc(all, func(c runtime.Container) bool { return c.MemberID == "" }), nil
}

func (r *Reconciler) busyMembers(now time.Time) map[string]agent.Work {
	r.mu.Lock()
	defer r.mu.Unlock()
	busy := make(map[string]agent.Work, len(r.busy))
	for id, w := range r.busy {
		busy[id] = agent.Work{Pulling: w.pulling > 0, Other: w.other > 0}
	}
	for id, until := range r.hold {
		if until.After(now) {
			w := busy[id]
			w.Other = true
			busy[id] = w
		}
	}
	return busy
}

// adopt puts what is on the machine and unknown to the store into it, so that its removal is journalled and proven too.
func (r *Reconciler) adopt(containers []runtime.Container, attached []string) error {
	busy := r.busyMembers(r.clock.Now()) // before the journal: a start that has ended by now is noted there
	runs, members := r.store.Runs(), r.store.Members()
	for _, c := range containers {
		if run, known := runs[c.ID]; !known {
			run := state.Run{
				ID: c.ID, MemberID: c.MemberID, InstanceID: c.InstanceID, Service: c.Service, Revision: c.Revision,
				StartedAt: r.clock.Happened(c.StartedAt, time.Time{}),
			}
			if err := r.store.AdoptRun(run); err != nil {
				return err
			}
		} else if run.StartedAt.IsZero() && c.State == runtime.StateRunning && !busy[c.MemberID].Other {
			// The agent died between the start and the note of it. Later a clock that was set would tell another time.
			started := r.clock.Happened(c.StartedAt, run.OpenedAt)
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
		if _, known := members[id]; !known {
			if err := r.store.UpdateMember(id, func(*state.Member) {}); err != nil {
				return err
			}
		}
	}
	return nil
}

// sweep forgets journalled runs whose container is gone and whose usage is sealed.
func (r *Reconciler) sweep(containers []runtime.Container, busy map[string]agent.Work) error {
	there := make(map[string]bool, len(containers))
	for _, c := range containers {
		there[c.ID] = true
	}
	for id, run := range r.store.Runs() {
		if there[id] || busy[run.MemberID].Other || !r.store.Measured(id) {
			continue
		}
		if err := r.store.CloseRun(id); err != nil {
			return err
		}
	}
	return nil
}

// containers joins what the runtime sees with what the journal knows.
func (r *Reconciler) containers(seen []runtime.Container) []agent.Container {
	runs := r.store.Runs()
	out := make([]agent.Container, 0, len(seen))
	for _, c := range seen {
		run := runs[c.ID]
		x := agent.Container{
			ID: c.ID, MemberID: c.MemberID, InstanceID: c.InstanceID, Service: c.Service, Revision: c.Revision,
			SpecDigest: c.SpecDigest, RunID: c.ID, Status: statusOf(c.State), StartedAt: run.StartedAt, ExitedAt: run.ExitedAt,
			ExitCode: run.ExitCode, ExitRecorded: run.ExitRecorded, ReadyAt: run.ReadyAt, Failing: r.failing(c.ID),
		}
		if x.StartedAt.IsZero() {
			x.StartedAt = r.clock.Happened(c.StartedAt, run.OpenedAt)
		}
		out = append(out, x)
	}
	return out
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
		n := agent.Network{MemberID: id}
		if m := members[id]; m.NetworkReady {
			n.Revision = m.NetworkRevision
		}
		out = append(out, n)
	}
	return out
}

// images asks only for those that a container may be started from: not for those of members with an action under way.
func (r *Reconciler) images(ctx context.Context, l look) (map[string]bool, error) {
	have := make(map[string]bool)
	up := make(map[string]bool)
	for _, c := range l.observed.Containers {
		up[fmt.Sprintf("%s/%s/%d/%s", c.MemberID, c.Service, c.Revision, c.SpecDigest)] = true
	}
	for _, wanted := range l.desired.Workloads {
		w := wanted.Effective(l.observed.Members[wanted.MemberID])
		if l.observed.Busy[w.MemberID].Other {
			continue
		}
		for _, s := range w.Services {
			if _, asked := have[s.Image]; asked || up[fmt.Sprintf("%s/%s/%d/%s", w.MemberID, s.Name, w.Revision,
				s.SpecDigest)] || w.Stopped || w.Refused != "" {
				continue
			}
			ref, err := runtime.ParseImage(s.Image)
			if err != nil {
				continue // pulling says what is wrong with it
			}
			ok, err := r.runtime.HasImage(ctx, ref)
			if err != nil {
				return nil, fmt.Errorf("look for image %s: %w", s.Image, err)
			}
			have[s.Image] = ok
		}
	}
	return have, nil
}

// maxJudgings bounds how often a newer state may come while its forerunner is judged; the next pass has the rest.
const maxJudgings = 8

// desired is the accepted state with the verdicts on its documents. A state may be accepted at any moment: one document
// that nobody has judged must neither be started nor be called refused, which would be the end of it at the hub. It
// counts as not here.
func (r *Reconciler) desired(ctx context.Context) agent.Desired {
	var d agent.Desired
	owner, err := r.cfg.Policy()
	r.note(protocol.ConditionPolicyInvalid, err)
	for range maxJudgings {
		r.judge(ctx)
		accepted := r.store.Accepted()
		owner = owner.ForOneOrg(firstOrg(accepted.Parts), r.cfg.WeakIsolation)
		d = agent.Desired{Epoch: accepted.Epoch, Generation: accepted.Generation, Unverified: len(accepted.SHA256) == 0}
		unjudged := false
		for _, p := range accepted.Parts {
			if p.Workload == nil || p.Verdict == nil {
				unjudged = unjudged || p.Workload != nil
				d.Missing = append(d.Missing, agent.MissingPart{MemberID: p.MemberID, SHA256: p.SHA256})
				continue
			}
			d.Workloads = append(d.Workloads, workloadOf(p, owner))
		}
		if !unjudged {
			break
		}
	}
	return d
}

// firstOrg is the org of the oldest member: member ids are ordered by the time when they were made.
func firstOrg(parts []state.Part) string {
	var first state.Part
	for _, p := range parts {
		if p.Workload != nil && (first.Workload == nil || p.MemberID < first.MemberID) {
			first = p
		}
	}
	return first.Workload.GetOrgSlug()
}

func workloadOf(p state.Part, owner policy.Policy) agent.Workload {
	w := workload(p.MemberID, p.Workload, owner)
	if !p.Verdict.Admitted && w.Refused == "" {
		w.Refused, w.RefusedDetail = p.Verdict.Reason, p.Verdict.Detail
	}
	if back := p.Workload.GetFallback(); back != nil && p.Verdict.FallbackAdmitted {
		f := workload(p.MemberID, back, owner)
		w.Fallback = &f
	}
	return w
}

func workload(memberID string, p *protocol.Workload, owner policy.Policy) agent.Workload {
	w := agent.Workload{
		MemberID: memberID, InstanceID: p.GetInstanceId(), Revision: p.GetRevision(), CorrelationID: p.GetCorrelationId(),
		Stopped:          p.GetStopped(),
		ReadinessTimeout: time.Duration(p.GetReadinessTimeoutSeconds()) * time.Second,
	}
	if rule := owner.Refuses(p); rule != "" {
		w.Refused, w.RefusedDetail = agent.ReasonOwnerRefused, rule
	}
	for _, s := range p.GetServices() {
		w.Services = append(w.Services, agent.Service{
			Name: s.GetName(), Image: s.GetImage(), SpecDigest: specDigest(s), Spec: s,
			StopGrace:      time.Duration(s.GetStopGraceSeconds()) * time.Second,
			AcceleratorIDs: s.GetResources().GetAcceleratorIds(),
		})
	}
	return w
}

// specDigest changes whenever anything about the container must.
func specDigest(s *protocol.Service) string {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(s)
	if err != nil {
		return "" // only for invalid UTF-8, which decoding has refused
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

func (r *Reconciler) leases(members map[string]state.Member) agent.Leases {
	out := make(agent.Leases)
	if r.store.LeasesUnverified() {
		for id := range members {
			out[id] = agent.Lease{MemberID: id, Unverified: true}
		}
	}
	for id, l := range r.store.Leases() {
		spent := Spent(l, r.store.Consumed(id))
		out[id] = agent.Lease{
			MemberID: id, No: l.GetLeaseNo(), ExpiresAt: l.GetExpiresAt().AsTime(),
			Exhausted:    spent.Sign() > 0 && spent.Cmp(big.NewInt(l.GetCapNanos())) >= 0,
			RunsUnbilled: r.cfg.AllowUnbilled && l.GetEndPolicy() == endRunUnbilled,
			Unverified:   r.store.ConsumedUnverified(id),
		}
	}
	return out
}

// Spent is what a member's usage costs at the lease's frozen prices, in billionths, rounded up.
func Spent(l *protocol.Lease, used map[string]int64) *big.Int {
	total := new(big.Int)
	for _, p := range l.GetPrices() {
		if p.GetPerQuantity() <= 0 {
			continue
		}
		cost := new(big.Int).Mul(big.NewInt(used[p.GetMeter()]), big.NewInt(p.GetPriceNanos()))
		quotient, rest := new(big.Int).QuoRem(cost, big.NewInt(p.GetPerQuantity()), new(big.Int))
		if rest.Sign() > 0 {
			quotient.Add(quotient, big.NewInt(1))
		}
		total.Add(total, quotient)
	}
	return total
}

// judge checks the documents that have come since the last look; all of them again under a newer trust bundle.
func (r *Reconciler) judge(ctx context.Context) {
	bundles, accepted := r.store.Bundles(), r.store.Accepted()
	verdicts, parsed := map[string]state.Verdict{}, manifest.Parsed{}
	for _, p := range accepted.Parts {
		if p.Workload == nil || (p.Verdict != nil && p.Verdict.BundleVersion == r.store.Bundle().Version()) {
			continue
		}
		v := accept.Judge(p.Workload, bundles, accepted.IssuedAt, parsed)
		verdicts[p.SHA256Hex()] = v
		if !v.Admitted {
			r.log.WarnContext(ctx, "workload refused", "member", p.MemberID, "reason", v.Reason, "detail", v.Detail,
				"correlation_id", p.Workload.GetCorrelationId())
		}
	}
	if len(verdicts) == 0 {
		return
	}
	r.store.SetVerdicts(verdicts)
	failpoint.Hit("agent/accept/judged")
}

func (r *Reconciler) conditions() []string {
	seen := make(map[string]bool)
	for c := range r.trouble {
		seen[c] = true
	}
	for _, c := range slices.Concat(r.runtime.Conditions(), r.network.Conditions(), r.cfg.WeakIsolation) {
		seen[c] = true
	}
	if owner, _ := r.cfg.Policy(); owner.ShareWeakIsolation && len(r.cfg.WeakIsolation) > 0 {
		seen[protocol.ConditionWeakIsolationShared] = true
	}
	if len(r.store.Unverified()) > 0 {
		seen["state_unverified"] = true
	}
	if r.clock.MachineIsWrong() {
		seen["clock_untrusted"] = true
	}
	if r.store.Bundle().Expired(r.clock.Now()) {
		seen[protocol.ConditionBundleExpired] = true
	}
	return slices.Sorted(maps.Keys(seen))
}
