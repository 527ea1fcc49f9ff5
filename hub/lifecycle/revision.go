package lifecycle

import (
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Revision is one version of what the members of an instance run.
type Revision struct {
	No         int64
	AppVersion string
	// Previous is the target of a rollback without a version; 0 if there is none.
	Previous int64
	// Fallback is the revision to which a node rolls back while the upgrade is in progress.
	Fallback int64
	// RollsBack says that the tenant returns to AppVersion.
	RollsBack bool
	// ReadyAt is when this content was first ready; zero before.
	ReadyAt time.Time
}

// Worked reports whether the revision's content was ready once.
func (r Revision) Worked() bool { return !r.ReadyAt.IsZero() }

// Revisions are those of an instance, in the order of their numbers.
type Revisions []Revision

// Find returns the revision of a number; the zero revision where there is none.
func (r Revisions) Find(no int64) Revision {
	if i := slices.IndexFunc(r, func(x Revision) bool { return x.No == no }); i >= 0 {
		return r[i]
	}
	return Revision{}
}

// Newest returns the revision of the highest number.
func (r Revisions) Newest() Revision {
	if len(r) == 0 {
		return Revision{}
	}
	return r[len(r)-1]
}

// LastWorking is the revision to return to: the desired one if it worked, else the one before it; 0 if neither did.
func (r Revisions) LastWorking(desired int64) int64 {
	now := r.Find(desired)
	if now.Worked() {
		return now.No
	}
	if before := r.Find(now.Previous); before.Worked() {
		return before.No
	}
	return 0
}

// Upgrade returns the revision that an upgrade makes. If it is not ready in time, nodes return to the last one that
// worked.
func (r Revisions) Upgrade(desired int64) Revision {
	base := r.LastWorking(desired)
	return Revision{No: r.Newest().No + 1, Previous: base, Fallback: base}
}

// Restart returns the revision that a start makes: the same content again.
func (r Revisions) Restart(desired int64) Revision {
	stopped := r.Find(desired)
	return Revision{
		No: r.Newest().No + 1, AppVersion: stopped.AppVersion, Previous: stopped.Previous, ReadyAt: stopped.ReadyAt,
	}
}

// RollBack returns the revision that a rollback to an earlier one makes. The revision that serves is its fallback where
// both start beside each other.
func (r Revisions) RollBack(desired int64, target Revision, startsFirst bool) Revision {
	base := r.LastWorking(desired)
	made := Revision{
		No: r.Newest().No + 1, AppVersion: target.AppVersion, Previous: base,
		ReadyAt: target.ReadyAt, RollsBack: true,
	}
	if startsFirst {
		made.Fallback = base
	}
	if r.Find(base).AppVersion == target.AppVersion {
		made.Previous = target.Previous
	}
	return made
}

// Adopted returns the revisions of a node's document that are not among these: its own, and the one of its fallback,
// which has worked. The number of one that is among these is zero.
func (r Revisions) Adopted(w *protocol.Workload, now time.Time) (own, fallback Revision) {
	base := r.LastWorking(r.Newest().No)
	if back := w.GetFallback(); back != nil {
		base = int64(back.GetRevision())
		if r.Find(base).No == 0 {
			fallback = Revision{No: base, ReadyAt: now}
		}
	}
	if no := int64(w.GetRevision()); r.Find(no).No == 0 {
		own = Revision{No: no, Previous: base, RollsBack: w.GetRollsBack()}
		if w.GetFallback() != nil {
			own.Fallback = base
		}
	}
	return own, fallback
}

// RollbackTarget returns the revision whose content a rollback runs again: the newest that worked, other than the
// desired one; with a version, the newest of that version. A failed instance may also return to its desired revision,
// if that once worked.
func (r Revisions) RollbackTarget(desired int64, status Status, version string) (Revision, error) {
	now := r.Find(desired)
	if version == "" {
		if before := r.Find(now.Previous); before.Worked() {
			return before, nil
		}
		if status == Failed && now.Worked() {
			return now, nil
		}
		return Revision{}, fault.New(fault.Conflict, codeNoPreviousVersion, "There is no earlier version that this app "+
			"instance has been running.", nil)
	}
	if version == now.AppVersion && status == Running {
		return Revision{}, fault.New(fault.Conflict, CodeVersionUnchanged, "The app instance runs this version already.",
			nil).
			WithField("/target_version", "is the version that runs")
	}
	for _, before := range slices.Backward(r) {
		if before.AppVersion == version && before.Worked() {
			return before, nil
		}
	}
	return Revision{}, fault.New(fault.Unprocessable, fault.CodeReferenceUnknown, "This app instance has not been "+
		"running that "+
		"version, or so long ago that it is not kept.", nil).
		WithField("/target_version", "names no version that it was running within the retention").Permanent()
}
