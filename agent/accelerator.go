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

// lostDevice reports whether an accelerator of the container is missing.
func (d *differ) lostDevice(c Container) bool {
	worst, _ := d.unusable(c.AcceleratorIDs)
	return worst == AcceleratorMissing
}

// deviceStatus adds to a workload's status what its accelerators keep it from.
func (d *differ) deviceStatus(s *protocol.WorkloadStatus, w Workload) {
	for _, service := range w.Services {
		state, detail := d.unusable(service.AcceleratorIDs)
		runs := d.isRunning(w.MemberID, service.Name)
		if state == 0 || state == AcceleratorAwaited || runs && state == AcceleratorUnanswered {
			continue // a driver that hangs says nothing about what runs
		}
		s.Reason, s.Detail = protocol.WorkloadStatus_DEVICE_FAULT, detail
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
