package agent

import "github.com/gpuaas/gpuaas/protocol"

// AcceleratorState says why an accelerator cannot be given to a container; zero for one that can.
type AcceleratorState int

// The states.
const (
	// AcceleratorAwaited: its driver has not been asked yet.
	AcceleratorAwaited AcceleratorState = iota + 1
	// AcceleratorUnanswered: a driver does not answer, and none that answers names it.
	AcceleratorUnanswered
	// AcceleratorFaulty: its driver says that it does not work.
	AcceleratorFaulty
	// AcceleratorNeedsReset: it was at fault. From here on its container is stopped.
	AcceleratorNeedsReset
	// AcceleratorWithoutMPS: the MPS daemon through which its containers use it has ended. They are started again.
	AcceleratorWithoutMPS
	// AcceleratorTesting: it was reset, and is watched.
	AcceleratorTesting
	// AcceleratorQuarantined: no reset helps.
	AcceleratorQuarantined
	// AcceleratorMissing: the drivers answer, and none names it. Its container is stopped: the kernel may give its device
	// numbers to another accelerator.
	AcceleratorMissing
)

// Detail is for people.
func (s AcceleratorState) Detail(id string) string {
	switch s {
	case AcceleratorAwaited, AcceleratorUnanswered:
		return "the driver of accelerator " + id + " does not answer"
	case AcceleratorFaulty:
		return "accelerator " + id + " does not work"
	case AcceleratorNeedsReset:
		return "accelerator " + id + " had a fault and waits for a reset"
	case AcceleratorWithoutMPS:
		return "the MPS daemon of accelerator " + id + " has ended"
	case AcceleratorTesting:
		return "accelerator " + id + " was reset and is being tested"
	case AcceleratorQuarantined:
		return "accelerator " + id + " is quarantined"
	case AcceleratorMissing:
		return "accelerator " + id + " is not found on the node any more"
	}
	return ""
}

// unusable returns the worst state of these accelerators, with the detail of its accelerator.
func (d *differ) unusable(ids []string) (worst AcceleratorState, detail string) {
	for _, id := range ids {
		if s := d.observed.Unusable[id]; s > worst {
			worst, detail = s, s.Detail(id)
		}
	}
	return worst, detail
}

// WithoutDevices returns the members with an accelerator that does not work: their time is not counted. A driver that
// does not answer says nothing about its accelerators.
func WithoutDevices(desired Desired, observed Observed) map[string]bool {
	out := map[string]bool{}
	note := func(memberID string, ids []string) {
		for _, id := range ids {
			if observed.Unusable[id] >= AcceleratorFaulty {
				out[memberID] = true
			}
		}
	}
	for _, signed := range desired.Workloads {
		for _, s := range signed.Effective(observed.Members[signed.MemberID]).Services {
			note(signed.MemberID, s.AcceleratorIDs)
		}
	}
	for _, c := range observed.Containers {
		note(c.MemberID, c.AcceleratorIDs)
	}
	return out
}

// lostDevice reports whether an accelerator of the container is missing, or out of use because of a fault.
func (d *differ) lostDevice(c Container) bool {
	worst, _ := d.unusable(c.AcceleratorIDs)
	return worst >= AcceleratorNeedsReset
}

// deviceStatus adds to a workload's status what its accelerators keep it from.
func (d *differ) deviceStatus(s *protocol.WorkloadStatus, w Workload) {
	for _, service := range w.Services {
		state, detail := d.unusable(service.AcceleratorIDs)
		runs := d.isRunning(w.MemberID, service.Name)
		if state == 0 || state == AcceleratorAwaited || runs && state == AcceleratorUnanswered {
			continue // a driver that hangs says nothing about what runs
		}
		s.Reason, s.Detail = protocol.WorkloadStatus_DEVICE_FAULT, ofService(w, service.Name, detail)
		switch {
		case runs && s.GetStatus() == protocol.WorkloadStatus_READY:
			s.Status = protocol.WorkloadStatus_DEGRADED
		case !runs && state != AcceleratorUnanswered:
			s.Status, s.ReadyAt = protocol.WorkloadStatus_FAILED, nil
		}
		return
	}
}

func (d *differ) isRunning(memberID, service string) bool {
	for _, c := range d.containers[memberID] {
		if c.Service == service && c.Status == Running {
			return true
		}
	}
	return false
}
