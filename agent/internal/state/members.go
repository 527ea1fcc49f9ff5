package state

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Member is the store's record of a member.
type Member struct {
	agent.Member
	// Ports are the host ports that the node or the tenant chose; kept from the first start until the member is retired.
	Ports []HostPort `json:",omitempty"`
	// Reported says that the hub has acknowledged a report that held Removal.
	Reported bool `json:",omitempty"`
}

// HostPort is a published port: Host on the node's 127.0.0.1 leads to Container inside.
type HostPort struct {
	Name string
	// Service is the one that listens.
	Service   string
	Protocol  string
	Host      uint16
	Container uint16
}

// Run is a run in the journal.
type Run = agent.Run

// Members returns all members, removed ones too.
func (s *Store) Members() map[string]Member {
	return view(s, func(d *data) map[string]Member { return maps.Clone(d.members) })
}

// Member returns one member; ok is false where the node remembers none of this id.
func (s *Store) Member(id string) (m Member, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok = s.d.members[id]
	return m, ok
}

// Runs returns the journal by run id.
func (s *Store) Runs() map[string]Run {
	return view(s, func(d *data) map[string]Run { return maps.Clone(d.runs) })
}

// NewestRun is the last run of one of a member's services, of the first where none is named; the fault NotFound when
// there is none.
func (s *Store) NewestRun(memberID, service string) (Run, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	services := s.d.servicesOf(memberID)
	if service == "" && len(services) > 0 {
		service = services[0]
	}
	var newest Run
	for _, run := range s.d.runs {
		if run.MemberID == memberID && (service == "" || run.Service == service) && !run.OpenedAt.Before(newest.OpenedAt) {
			newest = run
		}
	}
	if newest.ID != "" {
		return newest, nil
	}
	if service != "" && len(services) > 0 && !slices.Contains(services, service) {
		return Run{}, fault.New(fault.NotFound, codeNoService, fmt.Sprintf("The workload has no service %q; it has %s.",
			service, strings.Join(services, ", ")), nil)
	}
	return Run{}, fault.New(fault.NotFound, codeNoContainer, "This node has no container of the workload.", nil)
}

// servicesOf names the services of a member in the accepted state, in the workload's order.
func (d *data) servicesOf(memberID string) []string {
	var names []string
	for _, p := range d.accepted().Parts {
		if p.MemberID != memberID {
			continue
		}
		for _, s := range p.Workload.GetServices() {
			names = append(names, s.GetName())
		}
	}
	return names
}

// Leases returns the newest lease of each member. Callers do not change them.
func (s *Store) Leases() map[string]*protocol.Lease {
	return view(s, func(d *data) map[string]*protocol.Lease { return maps.Clone(d.leases) })
}

// UpdateMember changes a member, or adds an unknown one. change must not keep its argument.
func (s *Store) UpdateMember(id string, change func(*Member)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.d.members[id]
	m.ID = id
	m.Ports = slices.Clone(m.Ports)
	change(&m)
	return s.release(func(b *batch) { b.json(preMember+id, m) }, func(d *data) { d.members[id] = m })
}

// OpenRun stores a run and opens its usage interval, before the container is created.
func (s *Store) OpenRun(r Run) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.openRun(r)
}

// OpenRunIfDesired is OpenRun if the accepted state still contains the run; otherwise it changes nothing. A newer state
// may have been accepted since the decision to start.
func (s *Store) OpenRunIfDesired(r Run) (wanted bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wanted = slices.ContainsFunc(s.d.accepted().Parts, func(p Part) bool {
		if p.MemberID != r.MemberID || p.Workload.GetStopped() || p.Admission == nil {
			return false
		}
		own, back := p.Workload.GetRevision(), p.Workload.GetFallback().GetRevision()
		admitted := r.Revision == own && p.Admission.Admitted || r.Revision != own && p.Admission.FallbackAdmitted
		return admitted && s.d.members[r.MemberID].MayStart(r.Revision, own, back)
	})
	if !wanted {
		return false, nil
	}
	return true, s.openRun(r)
}

func (s *Store) openRun(r Run) error {
	metered := meter.Open(s.d.meter, meter.Intent{
		RunID: r.ID, MemberID: r.MemberID, Revision: r.Revision,
		LeaseNo: r.LeaseNo,
	}, r.OpenedAt)
	return s.write(func(b *batch) { b.json(preRun+r.ID, r); b.meter(&s.d, metered) },
		func(d *data) { d.runs[r.ID] = r; d.meter = metered })
}

// JournalRun adds an existing container to the journal that does not know it, because the store was lost. The meter
// counts it from its first sample.
func (s *Store) JournalRun(r Run) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.d.runs[r.ID]; known {
		return nil
	}
	return s.release(func(b *batch) { b.json(preRun+r.ID, r) }, func(d *data) { d.runs[r.ID] = r })
}

// UpdateRun changes a run in the journal; an unknown id changes nothing.
func (s *Store) UpdateRun(id string, change func(*Run)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, known := s.d.runs[id]
	if !known {
		return nil
	}
	change(&r)
	return s.release(func(b *batch) { b.json(preRun+id, r) }, func(d *data) { d.runs[id] = r })
}

// RecordExit changes a member and one of its runs in one transaction: after a crash between two writes the exit would
// be counted again. An unknown run changes only the member.
func (s *Store) RecordExit(memberID, runID string, member func(*Member, Run), run func(*Run)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.d.members[memberID]
	r, known := s.d.runs[runID]
	m.ID, m.Ports = memberID, slices.Clone(m.Ports)
	member(&m, r)
	run(&r)
	return s.release(func(b *batch) {
		b.json(preMember+memberID, m)
		if known {
			b.json(preRun+runID, r)
		}
	}, func(d *data) {
		d.members[memberID] = m
		if known {
			d.runs[runID] = r
		}
	})
}

// CloseRun deletes a run whose container no longer exists, and the interval of a container that never ran.
func (s *Store) CloseRun(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	metered := meter.Cancel(s.d.meter, id)
	return s.release(func(b *batch) { b.delete(preRun + id); b.meter(&s.d, metered) },
		func(d *data) { delete(d.runs, id); d.meter = metered })
}

// AcknowledgeRemovals marks the proofs of these members as reported, and deletes the oldest acknowledged ones above the
// limit.
func (s *Store) AcknowledgeRemovals(ids []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := make(map[string]Member)
	for _, id := range ids {
		if m, known := s.d.members[id]; known && m.Removal != nil && !m.Reported {
			m.Reported = true
			changed[id] = m
		}
	}
	if len(changed) == 0 {
		return nil
	}
	forgotten := s.surplusTombstones()
	return s.release(func(b *batch) {
		for id, m := range changed {
			b.json(preMember+id, m)
		}
		for _, id := range forgotten {
			b.delete(preMember + id)
			b.delete(preConsumed + id)
		}
	}, func(d *data) {
		maps.Copy(d.members, changed)
		for _, id := range forgotten {
			delete(d.members, id)
			delete(d.consumed, id)
		}
	})
}

func (s *Store) surplusTombstones() []string {
	var old []Member
	for _, m := range s.d.members {
		if m.Removal != nil && m.Reported {
			old = append(old, m)
		}
	}
	if len(old) <= s.tombstones {
		return nil
	}
	slices.SortFunc(old, func(a, b Member) int { return a.Removal.GetAt().AsTime().Compare(b.Removal.GetAt().AsTime()) })
	ids := make([]string, 0, len(old)-s.tombstones)
	for _, m := range old[:len(old)-s.tombstones] {
		ids = append(ids, m.ID)
	}
	return ids
}

// Retire seals a removed member's last usage record, stores its proof and drops its lease and ports, in one
// transaction. Its consumption stays: a lease's cap counts from the member's beginning, also if a restored hub names it
// again. A member in the accepted state is not changed: usage after its final record would never be billed.
func (s *Store) Retire(memberID string, absent []string, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, known := s.d.members[memberID]
	named := slices.ContainsFunc(s.d.state.GetParts(), func(p *protocol.PartRef) bool { return p.GetId() == memberID })
	if !known || old.Removal != nil || named {
		return nil
	}
	metered, records := meter.Close(s.d.meter, memberID, now)
	sealed, err := s.seal(s.d.chain, metered, records, now)
	if err != nil {
		return err
	}
	m := Member{Member: agent.Member{
		ID: memberID, InstanceID: old.InstanceID, CorrelationID: old.CorrelationID, ExitedAt: old.ExitedAt,
		ExitCode: old.ExitCode,
		Removal: &protocol.RemovalProof{
			At: timestamppb.New(now), Absent: absent, LastUsageSequence: sealed.chain.Sequence,
			Incarnation: s.d.meta.Incarnation,
		},
	}}
	return s.release(func(b *batch) {
		sealed.fill(b)
		b.json(preMember+memberID, m)
	}, func(d *data) {
		sealed.apply(d)
		d.members[memberID] = m
		delete(d.leases, memberID)
		delete(d.leaseFrom, memberID)
	})
}
