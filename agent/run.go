package agent

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

// Run is one start of one container in the journal, from before the container exists until after it is gone.
type Run struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	// Copy is the service's, as it was started.
	Copy     string `json:",omitempty"`
	Revision uint64
	LeaseNo  uint64
	OpenedAt time.Time
	// StartedAt is the container's start on the agent's clock; zero until it was seen up.
	StartedAt time.Time `json:",omitzero"`
	// ConfigSHA256 is the digest of the config that the container has, in hex.
	ConfigSHA256 string `json:",omitempty"`
	// SecretsSHA256 is the digest of the sealed secret parameters that it has, in hex.
	SecretsSHA256 string `json:",omitempty"`
	// StopRequested says that the agent has stopped it, so that its exit is no failure.
	StopRequested bool `json:",omitempty"`
	// OverDisk says why the agent ended it: it exceeded its disk limit.
	OverDisk string `json:",omitempty"`
	// NotAlive says why the agent ends it: its liveness probe failed too often, or it cannot open its accelerators.
	NotAlive string `json:",omitempty"`
	// BuildFailed says why the environment that it installs was not.
	BuildFailed string `json:",omitempty"`
	// ReadyAt is when the readiness probe first succeeded.
	ReadyAt time.Time `json:",omitzero"`
	// ExitedAt and ExitCode are durable when ExitRecorded.
	ExitRecorded bool      `json:",omitempty"`
	ExitedAt     time.Time `json:",omitzero"`
	ExitCode     int32     `json:",omitempty"`
}

// NewRun is the run of a container that is about to be made.
func NewRun(a StartContainer, id string, now time.Time) Run {
	return Run{
		ID:         id,
		MemberID:   a.MemberID,
		InstanceID: a.Workload.InstanceID,
		Service:    a.Service.Name,
		Copy:       a.Service.Copy,
		Revision:   a.Revision,
		LeaseNo:    a.LeaseNo,
		OpenedAt:   now,
		// The files are there before the container is.
		ConfigSHA256:  a.Service.ConfigSHA256,
		SecretsSHA256: a.Service.SecretsSHA256,
	}
}

// Listed is a container as the machine lists it, in the time of the machine's own clock.
type Listed struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	Copy       string
	Revision   uint64
	SpecDigest string
	// AcceleratorIDs are those that the container has.
	AcceleratorIDs []string
	// DependsOn, StopGrace and Restart are its service's, as it was started.
	DependsOn []string
	StopGrace time.Duration
	Restart   protocol.Service_RestartPolicy
	// Environment is the id of the environment that it installs.
	Environment string
	Status      ContainerStatus
	// Lost says that it has exited and nobody saw how: the machine restarted or its shim was killed. The next three fields
	// are zero then.
	Lost      bool
	ExitedAt  time.Time
	ExitCode  int32
	OOMKilled bool
	// StartedAt is zero for a container that never started.
	StartedAt time.Time
}

// MachineTime converts times of the machine's own clock, which may be wrong, to the node's.
type MachineTime interface {
	// FromMachineTime converts the time of something that happened after the given time of the node.
	FromMachineTime(t, after time.Time) time.Time
	// Exited converts the time of an exit that no sample has seen yet; zero where it cannot be known.
	Exited(t time.Time) time.Time
}

// UnknownRun is the run of a container that the journal does not know, because the store was lost.
func (l Listed) UnknownRun(clock MachineTime) Run {
	return Run{
		ID:         l.ID,
		MemberID:   l.MemberID,
		InstanceID: l.InstanceID,
		Service:    l.Service,
		Copy:       l.Copy,
		Revision:   l.Revision,
		StartedAt:  clock.FromMachineTime(l.StartedAt, time.Time{}),
	}
}

// StartUnrecorded reports whether the agent died between the container's start and its record in the run. Once the
// clock is set, the start would convert to another time.
func (l Listed) StartUnrecorded(run Run, busy Work) bool {
	return run.StartedAt.IsZero() && l.Status == Running && !busy.With(l.Service)
}

// Container joins the container with its run.
func (l Listed) Container(run Run, clock MachineTime) Container {
	c := Container{
		ID:             l.ID,
		MemberID:       l.MemberID,
		InstanceID:     l.InstanceID,
		Service:        l.Service,
		Copy:           l.Copy,
		Revision:       l.Revision,
		SpecDigest:     l.SpecDigest,
		Status:         l.Status,
		StartedAt:      run.StartedAt,
		ExitedAt:       run.ExitedAt,
		ExitCode:       run.ExitCode,
		ExitRecorded:   run.ExitRecorded,
		AcceleratorIDs: l.AcceleratorIDs,
		DependsOn:      l.DependsOn,
		StopGrace:      l.StopGrace,
		Restart:        l.Restart,
		ConfigSHA256:   run.ConfigSHA256,
		SecretsSHA256:  run.SecretsSHA256,
		Environment:    l.Environment,
		ReadyAt:        run.ReadyAt,
		NotAlive:       run.NotAlive != "",
	}
	if c.StartedAt.IsZero() {
		c.StartedAt = clock.FromMachineTime(l.StartedAt, run.OpenedAt)
	}
	return c
}

// CopiesBeside returns the running containers beside another one of their service that has run for longer.
func CopiesBeside(listed []Listed) map[string]bool {
	oldest := map[[2]string]Listed{}
	for _, l := range listed {
		first, known := oldest[l.service()]
		older := cmp.Or(l.StartedAt.Compare(first.StartedAt), cmp.Compare(l.ID, first.ID)) < 0
		if l.Status == Running && (!known || older) {
			oldest[l.service()] = l
		}
	}
	beside := map[string]bool{}
	for _, l := range listed {
		if l.Status == Running && oldest[l.service()].ID != l.ID {
			beside[l.ID] = true
		}
	}
	return beside
}

func (l Listed) service() [2]string { return [2]string{l.MemberID, l.Service} }

// MeterRun converts the container for the meter; before and run are its run before and after the listing.
func (l Listed) MeterRun(before, run Run, busy Work, clock MachineTime) meter.Run {
	out := meter.Run{
		RunID:        l.ID,
		MemberID:     l.MemberID,
		Revision:     l.Revision,
		StartedAt:    run.StartedAt,
		ExitedAt:     clock.Exited(l.ExitedAt),
		Accelerators: int64(len(l.AcceleratorIDs)),
		Up:           l.Status == Running,
		Unknown:      l.Status == Unknown && !run.ExitRecorded,
		Crashed:      l.Lost || l.ExitCode != 0 && !run.StopRequested,
	}
	// The listing may show a container half started whose start is in the journal by now; that is no exit.
	halfStarted := before.StartedAt.IsZero() && (l.Status == Created || l.Lost)
	switch {
	case halfStarted && !out.StartedAt.IsZero(), out.StartedAt.IsZero() && busy.With(l.Service):
		// It is starting: a later sample counts it from the journalled start.
		out.Up, out.Unknown, out.StartedAt, out.ExitedAt = false, false, time.Time{}, time.Time{}
	case out.StartedAt.IsZero():
		out.StartedAt = clock.FromMachineTime(l.StartedAt, run.OpenedAt)
	}
	return out
}

// Probed returns the service whose probes the container is subject to: it runs, and goes on under the workload or its
// fallback. One for which the revision is left just now, as it was not ready in time, becomes ready no more: that may
// decide whether it goes on under the fallback.
func (w Workload) Probed(c Container, m Member, now time.Time) (s Service, probed bool) {
	switch {
	case c.MemberID != w.MemberID || c.Status != Running:
		return Service{}, false
	case !isCurrent(w, c) && w.Fallback != nil:
		return w.Fallback.Probed(c, m, now)
	case !isCurrent(w, c):
		return Service{}, false
	}
	s, probed = serviceNamed(w, c.Service)
	mayBeLeft := w.Fallback != nil && !w.RollsBack && m.ConfirmedRevision != w.Revision && !s.BuildsEnvironment
	late := c.ReadyAt.IsZero() && isLate(w, c, now)
	return s, probed && (!mayBeLeft || !late)
}

// Resumed are the containers that go on although the agent has begun to stop them: a kill of the agent has cut that
// off, and they are desired again. Their exit is their own.
func Resumed(o Observed, runs map[string]Run, actions []Action) (ids []string) {
	for _, c := range o.Containers {
		stops := func(a Action) bool {
			stop, is := a.(StopContainer)
			return is && stop.ContainerID == c.ID
		}
		if c.Status == Running && runs[c.ID].StopRequested && !o.Busy[c.MemberID].With(c.Service) &&
			!slices.ContainsFunc(actions, stops) {
			ids = append(ids, c.ID)
		}
	}
	return ids
}
