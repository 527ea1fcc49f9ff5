// Package meter turns what the agent observes of its containers into usage records. It is pure: State, observation and
// time go in, State and records come out. It owns where an interval starts, grows and ends; it does not store, number,
// seal or send anything (agent/spool, agent/internal/state), and it does not list containers itself
// (agent/internal/runtime).
//
// The caller keeps to one order, which is what makes usage survive a kill at any moment:
//
//  1. Open, then make State durable, then start the container.
//  2. On every sample: list all containers, Sample, then make State and the records durable in one write.
//  3. Observe an exit through Sample before the container is removed from the runtime.
//  4. When nothing of a member is left on the node: Close, same single write.
//
// In doubt, the shorter time is billed.
package meter

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/protocol"
)

// PendingFor is how long an interval may wait for its container to come up. A start that never happened is forgotten
// then; a container that shows up even later is measured from when it is first seen.
const PendingFor = time.Hour

// DefaultCutEvery is how often a running interval is cut into records when nothing else cuts it.
const DefaultCutEvery = 30 * time.Second

// State is everything the meter remembers between two calls. It is plain data: store it as JSON.
type State struct {
	// Intervals are open, ordered by run id.
	Intervals []Interval `json:"intervals,omitempty"`
	// Members are those with time already cut, ordered by member id.
	Members []Member `json:"members,omitempty"`
}

// Interval is one start of one container, from before it is up until its end has been cut.
type Interval struct {
	RunID    string `json:"run_id"`
	MemberID string `json:"member_id"`
	Revision uint64 `json:"revision"`
	LeaseNo  uint64 `json:"lease_no"`
	// Accelerators is how many the container has to itself; known once it has been seen.
	Accelerators int64 `json:"accelerators,omitempty"`
	// OpenedAt is when the intent was made durable; the container cannot have run before.
	OpenedAt time.Time `json:"opened_at"`
	// StartedAt is zero until the container has been seen up.
	StartedAt time.Time `json:"started_at,omitzero"`
	// CutAt is the end of the last record, and so the start of the next.
	CutAt time.Time `json:"cut_at,omitzero"`
	// Until is the last sample that saw the container up.
	Until time.Time `json:"until,omitzero"`
	// Unknown says that the runtime could not tell at the last sample. An exit may then lie before that sample, where a
	// clock that was set since leaves no way to date it: it counts as unseen.
	Unknown bool `json:"unknown,omitempty"`
	// NoDevice says that an accelerator did not work at the last sample. What came before is in records.
	NoDevice bool `json:"no_device,omitempty"`
	// Unconfirmed is a sample that saw the container up, and whose time counts once a later scan finds its accelerators
	// working; zero where there is none.
	Unconfirmed Reading `json:"unconfirmed,omitzero"`
	// SeenAt is the last sample that saw the container up with its accelerators, whether its time counts yet or not.
	SeenAt time.Time `json:"seen_at,omitzero"`
	// ended says that the sample under way has seen its end.
	ended bool

	// CPUMicros is the container's own counter at the last sample, CPUCutMicros what of it is already in records.
	CPUMicros    int64 `json:"cpu_micros"`
	CPUCutMicros int64 `json:"cpu_cut_micros"`
	// CPUUnread says that what the counter shows first may be in records already.
	CPUUnread bool `json:"cpu_unread,omitempty"`
	// MemoryBytes is the last sample; MemoryByteSeconds and the rest (in byte-microseconds, below one byte-second) have
	// gathered since the last cut.
	MemoryBytes       int64 `json:"memory_bytes"`
	MemoryByteSeconds int64 `json:"memory_byte_seconds"`
	MemoryRest        int64 `json:"memory_rest"`
}

// Member remembers up to when a member's running time is in records, over all its containers: a second of a member
// counts once, however many containers it has and whatever the clock does.
type Member struct {
	ID       string    `json:"id"`
	Revision uint64    `json:"revision"`
	LeaseNo  uint64    `json:"lease_no"`
	Until    time.Time `json:"until"`
	// AcceleratorsUntil is the same for the time of its accelerators, which a container has to itself.
	AcceleratorsUntil time.Time `json:"accelerators_until,omitzero"`
}

// Intent is a start about to happen.
type Intent struct {
	// RunID names this one start of one container and is never used for another.
	RunID    string
	MemberID string
	Revision uint64
	LeaseNo  uint64
}

// Run is the runtime's state of one container.
type Run struct {
	RunID    string
	MemberID string
	Revision uint64
	// LeaseNo is the member's present lease. A new one cuts the interval, so that each record has one lease's prices.
	LeaseNo uint64
	// StartedAt is the runtime's own, zero when it does not know.
	StartedAt time.Time
	// Up says that the container's process lives, paused or not.
	Up bool
	// Unknown says that the runtime cannot tell at present. The interval stays as it is until a sample sees the container
	// up, which extends it, or ended, which ends it at the last sample that saw it up.
	Unknown bool
	// NoDevice says that an accelerator of its member does not work. The time since the last sample is not counted, nor is
	// any until the sample that finds it working again.
	NoDevice bool
	// NeedsDevice says that its member has accelerators, WorkedAt when the last scan began that found them working. What
	// came after counts once a later scan confirms it.
	NeedsDevice bool
	WorkedAt    time.Time
	// Crashed says that it ended by itself and without success, perhaps because an accelerator failed, or that nobody saw
	// how it ended.
	Crashed bool
	// Beside says that another copy of its service has run for longer: CPU and memory are counted for one of them.
	Beside bool
	// ExitedAt is the runtime's own exit time; zero while it is up, and when the exit was not seen (power cut).
	ExitedAt time.Time
	// Accelerators is how many the container has to itself.
	Accelerators int64
	// CPUMicros counts processor time since the container's start, MemoryBytes is held now; Sampled says both are known.
	CPUMicros   int64
	MemoryBytes int64
	Sampled     bool
}

// Observation is one complete listing of the node. A listing that failed is no observation; nothing is lost, because
// the next sample extends all that still runs.
type Observation struct {
	// At is the agent's clock when the listing began.
	At time.Time
	// Runs are all containers of this agent, up or not.
	Runs []Run
	// CutEvery bounds the length of a record; DefaultCutEvery when zero.
	CutEvery time.Duration
}

// Open notes that a container is about to be started. Opening the same run again changes nothing.
func Open(s State, in Intent, now time.Time) State {
	s = s.clone()
	if s.interval(in.RunID) != nil {
		return s
	}
	s.insert(Interval{
		RunID: in.RunID, MemberID: in.MemberID, Revision: in.Revision, LeaseNo: in.LeaseNo, OpenedAt: micros(now),
	})
	return s
}

// Cancel forgets a start that failed before its container was ever up. It does nothing to an interval that has begun.
func Cancel(s State, runID string) State {
	s = s.clone()
	s.Intervals = slices.DeleteFunc(s.Intervals, func(iv Interval) bool {
		return iv.RunID == runID && iv.StartedAt.IsZero()
	})
	return s
}

// Sample extends the intervals whose container is up, cuts those that are due, and cuts those whose container has
// exited for the last time.
func Sample(s State, o Observation) (State, []*protocol.UsageRecord) {
	s = s.clone()
	now := micros(o.At)
	cutEvery := cmp.Or(o.CutEvery, DefaultCutEvery)
	seen := make(map[string]Run, len(o.Runs))
	for _, r := range o.Runs {
		seen[r.RunID] = r
	}
	var gone, due, soon []string
	full := false
	for i := range s.Intervals {
		iv := &s.Intervals[i]
		r, ok := seen[iv.RunID]
		switch iv.ended = iv.observe(r, ok, now); {
		case iv.ended:
			gone = append(gone, iv.RunID)
			due = append(due, iv.MemberID)
		case iv.NoDevice:
			due = append(due, iv.MemberID)
		case iv.Until.Sub(iv.CutAt) >= cutEvery:
			full = true
			due = append(due, iv.MemberID)
		case ok && r.LeaseNo != 0 && iv.LeaseNo != r.LeaseNo:
			due = append(due, iv.MemberID)
		case !iv.StartedAt.IsZero() && iv.Until.Sub(iv.CutAt) >= cutEvery/2:
			soon = append(soon, iv.MemberID)
		}
	}
	if full {
		// All members come to be cut at the same samples, so that their records share segments, each with a signature and a
		// sync of its own.
		due = append(due, soon...)
	}
	records := s.cutMembers(due)
	s.Intervals = slices.DeleteFunc(s.Intervals, func(iv Interval) bool { return slices.Contains(gone, iv.RunID) })
	for i := range s.Intervals {
		iv := &s.Intervals[i]
		if r, ok := seen[iv.RunID]; ok && r.LeaseNo != 0 {
			iv.LeaseNo = r.LeaseNo
		}
	}
	s.openUnannounced(o.Runs, gone, now)
	return s, records
}

// ClockStep applies a step of the clock, right after a sample. Every interval is cut at the sample and continues from
// the new time, so that the step is not billed; what is unconfirmed then moves with the clock. After a step back, an
// interval waits until the recorded time has come again.
func ClockStep(s State, from, to time.Time) (State, []*protocol.UsageRecord) {
	s = s.clone()
	to = micros(to)
	var members []string
	for i := range s.Intervals {
		iv := &s.Intervals[i]
		if iv.StartedAt.IsZero() {
			iv.OpenedAt = to // its container was not up yet
			continue
		}
		members = append(members, iv.MemberID)
	}
	if !to.After(from) {
		return s, nil
	}
	records := s.cutMembers(members)
	for i := range s.Intervals {
		iv := &s.Intervals[i]
		if iv.StartedAt.IsZero() {
			continue
		}
		resumes := to
		if !iv.Unconfirmed.At.IsZero() {
			resumes = to.Add(-max(micros(from).Sub(iv.Until), 0))
			iv.Unconfirmed.At = iv.Unconfirmed.At.Add(to.Sub(micros(from)))
			iv.SeenAt = iv.SeenAt.Add(to.Sub(micros(from)))
		}
		iv.CutAt, iv.Until = clock.Later(iv.CutAt, resumes), clock.Later(iv.Until, resumes)
	}
	return s, records
}

// Close ends all intervals of a member that has left the node, and returns its last records. The last record is final:
// without length and quantity, it tells the hub that no usage of the member follows. No container of the member may be
// up; an interval whose exit no sample has seen ends at its last sample.
func Close(s State, memberID string, now time.Time) (State, []*protocol.UsageRecord) {
	s = s.clone()
	last := Member{ID: memberID}
	for _, iv := range s.Intervals {
		if iv.MemberID == memberID {
			last.Revision, last.LeaseNo = max(last.Revision, iv.Revision), max(last.LeaseNo, iv.LeaseNo)
		}
	}
	records := s.cutMembers([]string{memberID})
	s.Intervals = slices.DeleteFunc(s.Intervals, func(iv Interval) bool { return iv.MemberID == memberID })
	if m := s.member(memberID); m != nil {
		last.Until = m.Until
		last.Revision, last.LeaseNo = max(last.Revision, m.Revision), max(last.LeaseNo, m.LeaseNo)
	}
	s.Members = slices.DeleteFunc(s.Members, func(m Member) bool { return m.ID == memberID })
	if last.Until.IsZero() {
		last.Until = micros(now)
	}
	return s, append(records, &protocol.UsageRecord{
		MemberId: memberID, Revision: last.Revision, LeaseNo: last.LeaseNo, Meter: protocol.MeterSessionSeconds,
		StartedAt: timestamppb.New(last.Until), EndedAt: timestamppb.New(last.Until), Final: true,
	})
}

// observe applies the runtime's state of this interval's container; ok is false when the runtime no longer knows it. It
// reports whether the interval has ended.
func (iv *Interval) observe(r Run, ok bool, now time.Time) (ended bool) {
	started := micros(r.StartedAt)
	if ok {
		iv.Accelerators = r.Accelerators
	}
	switch {
	case r.Unknown:
		iv.Unknown = true
		return false
	case ok && r.starting(), !ok && iv.StartedAt.IsZero():
		// The start is still running, or the daemon died during it. An earlier sample may have counted from it all the same:
		// a start that is tried again finds the container up.
		return iv.StartedAt.IsZero() && now.Sub(iv.OpenedAt) > PendingFor
	case !ok:
		// Vanished: it ran at least until its last sample; any more is unknown.
		return true
	case !iv.StartedAt.IsZero() && started.After(iv.Until):
		// The container was restarted under the same id without the meter; the end of the old process is unknown.
		return true
	case !r.Up:
		iv.exit(r, started)
		return true
	}
	if iv.StartedAt.IsZero() {
		if started.IsZero() {
			started = now
		}
		iv.begin(started)
	}
	if had := iv.NoDevice; had || r.NoDevice {
		if iv.NoDevice, iv.Unknown, iv.Unconfirmed = r.NoDevice, false, (Reading{}); had {
			iv.skip(r, now)
		}
		return false
	}
	iv.Unknown, iv.SeenAt = false, clock.Later(iv.SeenAt, now)
	iv.confirm(r)
	reading := Reading{now, r.CPUMicros, r.MemoryBytes, r.Sampled, r.Beside}
	switch {
	case !r.NeedsDevice || !now.After(r.WorkedAt):
		iv.count(reading)
	case iv.Unconfirmed.At.IsZero():
		iv.Unconfirmed = reading // not a later one: the scan that confirms it would come later, too
	}
	return false
}

// starting reports whether the container has neither started nor ended, as far as the runtime says.
func (r Run) starting() bool { return !r.Up && r.StartedAt.IsZero() && r.ExitedAt.IsZero() }

// exit ends the interval at the runtime's own exit time, and at the last sample that saw the container up where that
// time is not known.
func (iv *Interval) exit(r Run, started time.Time) {
	exited := micros(r.ExitedAt)
	if iv.StartedAt.IsZero() {
		if started.IsZero() {
			return
		}
		iv.begin(started)
	}
	if iv.NoDevice || r.NoDevice {
		return
	}
	iv.confirm(r)
	if !r.Crashed {
		iv.extend(iv.SeenAt) // its accelerators worked
	}
	if exited.IsZero() || iv.Unknown {
		return
	}
	if r.NeedsDevice && r.Crashed && exited.After(r.WorkedAt) {
		exited = micros(r.WorkedAt)
	}
	// It ran at the last sample, whatever a clock says that was set back in between.
	iv.Until = clock.Later(exited, iv.Until)
}

func (iv *Interval) begin(started time.Time) {
	iv.StartedAt = clock.Later(started, iv.OpenedAt)
	iv.CutAt, iv.Until = iv.StartedAt, iv.StartedAt
}

// extend never shortens: with a clock that was set back, an interval waits for it to catch up.
func (iv *Interval) extend(to time.Time) { iv.Until = clock.Later(iv.Until, to) }

// skip leaves out the time up to now. All before was cut.
func (iv *Interval) skip(r Run, now time.Time) {
	iv.extend(now)
	iv.CutAt = iv.Until
	if r.Sampled {
		iv.MemoryBytes, iv.CPUMicros = max(r.MemoryBytes, 0), max(iv.CPUMicros, r.CPUMicros)
		iv.CPUCutMicros, iv.CPUUnread = iv.CPUMicros, false
	}
}

// sample adds memory for the time since the last sample, at the lower of the two samples, and takes over the counter. A
// container beside another copy uses neither.
func (iv *Interval) sample(r Reading) {
	if held := min(iv.MemoryBytes, r.MemoryBytes); !r.Beside && r.At.After(iv.Until) && held > 0 {
		iv.addMemory(held, r.At.Sub(iv.Until).Microseconds())
	}
	used := max(r.CPUMicros-iv.CPUMicros, 0)
	iv.MemoryBytes, iv.CPUMicros = max(r.MemoryBytes, 0), iv.CPUMicros+used
	if r.Beside || iv.CPUUnread {
		iv.CPUCutMicros += used
	}
	if r.Beside {
		iv.MemoryBytes = 0
	}
	iv.CPUUnread = false
}

func (iv *Interval) addMemory(bytes, micros int64) {
	hi, lo := bits.Mul64(uint64(bytes), uint64(micros))
	lo, carry := bits.Add64(lo, uint64(iv.MemoryRest), 0)
	const microsPerSecond = 1_000_000
	if hi+carry >= microsPerSecond {
		iv.MemoryByteSeconds = math.MaxInt64
		return
	}
	q, rest := bits.Div64(hi+carry, lo, microsPerSecond)
	iv.MemoryRest = int64(rest)
	if sum := uint64(iv.MemoryByteSeconds) + q; q <= math.MaxInt64 && sum <= math.MaxInt64 {
		iv.MemoryByteSeconds = int64(sum)
		return
	}
	iv.MemoryByteSeconds = math.MaxInt64
}

// openUnannounced opens an interval for a container that is up and was never announced (its store was lost). What it
// ran before may have been billed already, so it counts from now.
func (s *State) openUnannounced(runs []Run, ended []string, now time.Time) {
	for _, r := range runs {
		if !r.Up || s.interval(r.RunID) != nil {
			continue
		}
		from := now
		if slices.Contains(ended, r.RunID) && !r.StartedAt.IsZero() {
			from = micros(r.StartedAt)
		}
		iv := Interval{
			RunID: r.RunID, MemberID: r.MemberID, Revision: r.Revision, LeaseNo: r.LeaseNo, OpenedAt: from,
			Accelerators: r.Accelerators,
		}
		iv.begin(from)
		if !r.NeedsDevice {
			iv.extend(now)
		}
		if r.Sampled {
			iv.MemoryBytes, iv.CPUMicros = max(r.MemoryBytes, 0), max(r.CPUMicros, 0)
			if from.Equal(now) {
				iv.CPUCutMicros = iv.CPUMicros
			}
		}
		iv.CPUUnread = !r.Sampled && from.Equal(now)
		s.insert(iv)
	}
}
