package agent

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// What an executor makes durable of each action. RecordIntent comes before the action's effect, Record after it.

// Record makes the fallback the workload that runs.
func (a FallBack) Record(m *Member) {
	m.FellBackFrom, m.FallbackReason, m.FallbackDetail = a.Revision, a.Reason, a.Detail
}

// Record rules a fallback out.
func (a ConfirmRevision) Record(m *Member) { m.ConfirmedRevision = a.Revision }

// RecordIntent keeps the exit that follows from counting as a failure, unless it is one.
func (a StopContainer) RecordIntent(r *Run) { r.StopRequested = r.StopRequested || a.Why != notAlive }

// RecordMember stores the exit of a listed container, converted to the node's time. An exit that the agent did not
// request completes the service or is a failed try of the revision, unless the machine ended the container: then it
// starts again at once.
func (a RecordExit) RecordMember(m *Member, run Run, l Listed, exited, now time.Time) {
	m.ExitedAt, m.ExitCode = exited, l.ExitCode
	// A service may become ready while its revision is left for not being so.
	wasReady := !run.ReadyAt.IsZero() && a.Revision != m.FellBackFrom
	m.updateService(a.Service, func(r *ServiceRecord) {
		if wasReady {
			r.ReadyRevision = a.Revision
		}
		a.recordService(r, run, l, exited, now)
	})
	if a.counts(run) && !a.completes(run, l) {
		m.Restarts++
	}
}

// counts reports whether the exit came unasked.
func (a RecordExit) counts(run Run) bool { return a.Unasked && !run.StopRequested }

// completes reports whether the service is done. Whatever happened to the workload meanwhile, it is not run again.
func (a RecordExit) completes(run Run, l Listed) bool {
	once := a.Restart == protocol.Service_ON_FAILURE || a.Restart == protocol.Service_NEVER
	return once && l.ExitCode == 0 && !l.Lost && !l.OOMKilled && !run.StopRequested && run.OverDisk == "" &&
		run.NotAlive == "" && run.BuildFailed == ""
}

func (a RecordExit) recordService(r *ServiceRecord, run Run, l Listed, exited, now time.Time) {
	r.ExitedAt, r.ExitCode = exited, l.ExitCode
	if a.completes(run, l) {
		all := append(slices.Clip(r.Completed), Completion{a.Revision, a.SpecDigest})
		r.Completed = all[max(len(all)-maxCompletions, 0):]
		return
	}
	if !a.counts(run) {
		return
	}
	r.Restarts++
	if l.Lost {
		return
	}
	reason, detail := protocol.WorkloadStatus_CRASH_LOOP, "the container exited with code "+
		strconv.FormatUint(uint64(uint32(l.ExitCode)), 10)
	switch {
	case run.OverDisk != "":
		reason, detail = protocol.WorkloadStatus_DISK_LIMIT, run.OverDisk
	case l.OOMKilled:
		reason, detail = protocol.WorkloadStatus_OUT_OF_MEMORY, "the container used more memory than it may"
	case run.BuildFailed != "":
		reason, detail = protocol.WorkloadStatus_ENVIRONMENT_FAILED, run.BuildFailed
	case run.NotAlive != "":
		detail = run.NotAlive
	}
	once := a.Restart == protocol.Service_NEVER
	r.Tries = r.failed(a.Revision, reason, detail, once, wasUp(run, l, exited), now)
}

// wasUp is how long the container was up: by the machine's times where the agent was killed before it stored the start.
func wasUp(run Run, l Listed, exited time.Time) time.Duration {
	switch {
	case !run.StartedAt.IsZero():
		return exited.Sub(run.StartedAt)
	case l.StartedAt.IsZero():
		return 0
	}
	return l.ExitedAt.Sub(l.StartedAt)
}

// Record lets the container be removed.
func (a RecordExit) Record(r *Run, l Listed, exited time.Time) {
	r.ExitRecorded, r.ExitedAt, r.ExitCode = true, exited, l.ExitCode
}

// Record forgets the network. What a service of a member that ends has completed counts for its revision, and no longer
// for another one with the same spec.
func (a RemoveNetwork) Record(m *Member) {
	if a.Copy != "" {
		m.Services = maps.Clone(m.Services)
		delete(m.Services, a.Attachment())
	}
	m.updateService(a.Service, func(r *ServiceRecord) {
		if a.Copy == "" {
			r.PortsDigest, r.NetworkReady, r.IP = "", false, ""
		}
		if r.Published == a.Copy {
			r.Published = ""
		}
		if a.Done > 0 {
			r.Completed = []Completion{{Revision: a.Done}}
		}
	})
}

// RecordIntent stores the attachments as not ready: after a crash before Record they are made again.
func (a SetupNetwork) RecordIntent(m *Member) {
	for _, name := range a.Services {
		s, _ := serviceNamed(a.Workload, name)
		m.updateService(s.Attachment(), func(r *ServiceRecord) { r.PortsDigest, r.NetworkReady = s.PortsDigest, false })
	}
}

// RecordAddress stores the address of a service.
func (a SetupNetwork) RecordAddress(m *Member, service, address string) {
	m.updateService(a.Attachment(service), func(r *ServiceRecord) { r.IP = address })
}

// Record makes the networks usable. Earlier failures to make them say nothing of the containers that use them.
func (a SetupNetwork) Record(m *Member) {
	m.forgetTries(a.Revision)
	for _, name := range a.Services {
		s, _ := serviceNamed(a.Workload, name)
		m.updateService(a.Attachment(name), func(r *ServiceRecord) { r.NetworkReady = true })
		if !slices.Contains(a.Unpublished, name) {
			m.updateService(name, func(r *ServiceRecord) { r.Published = s.Copy })
		}
	}
}

// RecordIntent stores that nobody knows where the ports lead.
func (a PublishPorts) RecordIntent(m *Member) {
	m.updateService(a.Service.Name, func(r *ServiceRecord) { r.Published = nowhere })
}

// Record keeps which containers the published ports lead to.
func (a PublishPorts) Record(m *Member) {
	m.forgetTries(a.Revision)
	m.updateService(a.Service.Name, func(r *ServiceRecord) { r.Published = a.Service.Copy })
}

// Record stores which config the container has.
func (a DeliverConfig) Record(r *Run) { r.ConfigSHA256 = a.Service.ConfigSHA256 }

// Record stores which secret parameters the container has.
func (a DeliverSecrets) Record(r *Run) { r.SecretsSHA256 = a.Service.SecretsSHA256 }

// ErrHubAway marks an action that only lacked a session to the hub.
var ErrHubAway = errors.New("waiting for the hub")

// PauseAfter is the pause of the member after an action that failed through no fault of the workload: a release, or an
// acquisition while hub or containerd is away or the disk is full. It is zero for a failed try, see FailedBy.
func PauseAfter(a Action, err error) time.Duration {
	_, acquires := revisionOf(a)
	away := hasCode(err, CodeContainerdUnavailable)
	switch transient := errors.Is(err, ErrHubAway) || away || IsDiskFull(err); {
	case acquires && !transient:
		return 0
	case away, hasCode(err, CodeHubAway):
		return AwayRetry
	default:
		return ReleaseRetry
	}
}

// FailedBy returns the member after an acquisition that failed by fault of the workload.
func (m Member) FailedBy(a Action, err error, now time.Time) Member {
	revision, _ := revisionOf(a)
	failed := func(t Tries) Tries {
		return t.failed(revision, reasonOf(a, err), fault.As(err).Public, fault.IsPermanent(err), 0, now)
	}
	var services []string
	switch a := a.(type) {
	case PullImage:
		if services = a.Services; a.Beside {
			m.Tries, services = failed(m.Tries), nil
		}
	case StartContainer:
		services = []string{a.Service.Name}
	default:
		m.Tries = failed(m.Tries)
	}
	for _, name := range services {
		m.updateService(name, func(r *ServiceRecord) { r.Tries = failed(r.Tries) })
	}
	return m
}

func revisionOf(a Action) (revision uint64, acquires bool) {
	switch a := a.(type) {
	case PullImage:
		return a.Revision, true
	case SetupNetwork:
		return a.Revision, true
	case StartContainer:
		return a.Revision, true
	case PublishPorts:
		return a.Revision, true
	case ConfirmRevision, FallBack, CancelPull, StopContainer, RecordExit, RemoveContainer, RemoveNetwork, RetireMember,
		FetchPart, DeliverConfig, DeliverSecrets:
	}
	return 0, false
}

// reasonOf returns a reason of the contract's closed list.
func reasonOf(a Action, err error) protocol.WorkloadStatus_Reason {
	switch {
	case IsFeatureMissing(err):
		return protocol.WorkloadStatus_FEATURE_MISSING
	case IsAcceleratorUnusable(err):
		return protocol.WorkloadStatus_DEVICE_FAULT
	case hasCode(err, CodeSecretUnreadable):
		return protocol.WorkloadStatus_SECRET_UNREADABLE
	case IsAcceleratorInUse(err), IsPortTaken(err), lacksVolume(err):
		return protocol.WorkloadStatus_INSUFFICIENT_CAPACITY
	}
	if _, is := a.(PullImage); is {
		return protocol.WorkloadStatus_IMAGE_PULL_FAILED
	}
	return protocol.WorkloadStatus_INTERNAL
}
