package agent

import (
	"time"

	"github.com/gpuaas/gpuaas/agent/meter"
)

// Run is one start of one container in the journal, from before the container exists until after it is gone.
type Run struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	Revision   uint64
	LeaseNo    uint64
	OpenedAt   time.Time
	// StartedAt is the container's start on the agent's clock; zero until it was seen up.
	StartedAt time.Time `json:",omitzero"`
	// ConfigSHA256 is the digest of the config that the container has, in hex.
	ConfigSHA256 string `json:",omitempty"`
	// StopRequested says that the agent has stopped it, so that its exit is no failure.
	StopRequested bool `json:",omitempty"`
	// OverDisk says why the agent ended it: it exceeded its disk limit.
	OverDisk string `json:",omitempty"`
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
		Revision:   a.Revision,
		LeaseNo:    a.LeaseNo,
		OpenedAt:   now,
		// The file is there before the container is.
		ConfigSHA256: a.Service.ConfigSHA256,
	}
}

// Listed is a container as the machine lists it, in the time of the machine's own clock.
type Listed struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	Revision   uint64
	SpecDigest string
	// AcceleratorIDs are those that the container has.
	AcceleratorIDs []string
	Status         ContainerStatus
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
		Revision:   l.Revision,
		StartedAt:  clock.FromMachineTime(l.StartedAt, time.Time{}),
	}
}

// StartUnrecorded reports whether the agent died between the container's start and its record in the run. Once the
// clock is set, the start would convert to another time.
func (l Listed) StartUnrecorded(run Run, busy Work) bool {
	return run.StartedAt.IsZero() && l.Status == Running && !busy.Other
}

// Container joins the container with its run.
func (l Listed) Container(run Run, clock MachineTime) Container {
	c := Container{
		ID:             l.ID,
		MemberID:       l.MemberID,
		InstanceID:     l.InstanceID,
		Service:        l.Service,
		Revision:       l.Revision,
		SpecDigest:     l.SpecDigest,
		Status:         l.Status,
		StartedAt:      run.StartedAt,
		ExitedAt:       run.ExitedAt,
		ExitCode:       run.ExitCode,
		ExitRecorded:   run.ExitRecorded,
		AcceleratorIDs: l.AcceleratorIDs,
		ConfigSHA256:   run.ConfigSHA256,
		ReadyAt:        run.ReadyAt,
	}
	if c.StartedAt.IsZero() {
		c.StartedAt = clock.FromMachineTime(l.StartedAt, run.OpenedAt)
	}
	return c
}

// MeterRun converts the container for the meter; before and run are its run before and after the listing.
func (l Listed) MeterRun(before, run Run, busy Work, clock MachineTime) meter.Run {
	out := meter.Run{
		RunID:     l.ID,
		MemberID:  l.MemberID,
		Revision:  l.Revision,
		StartedAt: run.StartedAt,
		ExitedAt:  clock.Exited(l.ExitedAt),
		// A container that does not answer was up before and has no exit: it counts on until its state is known.
		Up: l.Status == Running || (l.Status == Unknown && !run.ExitRecorded),
	}
	// The listing may show a container half started whose start is in the journal by now; that is no exit.
	halfStarted := before.StartedAt.IsZero() && (l.Status == Created || l.Lost)
	switch {
	case halfStarted && !out.StartedAt.IsZero(), out.StartedAt.IsZero() && busy.Other:
		// It is starting: a later sample counts it from the journalled start.
		out.Up, out.StartedAt, out.ExitedAt = false, time.Time{}, time.Time{}
	case out.StartedAt.IsZero():
		out.StartedAt = clock.FromMachineTime(l.StartedAt, run.OpenedAt)
	}
	return out
}

// Probed returns the service whose readiness probe the container is subject to: it runs and is of the workload's
// revision.
func (w Workload) Probed(c Container) (s Service, probed bool) {
	if c.MemberID != w.MemberID || c.Revision != w.Revision || c.Status != Running {
		return Service{}, false
	}
	return serviceNamed(w, c.Service)
}
