package instance

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Revision is what the members of an instance ran, run or are to run at one time.
type Revision struct {
	No         int64
	AppVersion string
	// Previous is what a rollback without a target goes back to; 0 where there is nothing.
	Previous int64
	// Fallback is what a node goes back to by itself while the revision is an upgrade under way.
	Fallback int64
	// ReadyAt is when this content was first ready; zero while it never was.
	ReadyAt time.Time
}

// Worked reports whether the revision's content was ready once.
func (r Revision) Worked() bool { return !r.ReadyAt.IsZero() }

// Upgraded is the content of the revision that an upgrade makes.
type Upgraded struct {
	NewRevision
	// Services by member id.
	Services map[string][]*protocol.Service
	// FallbackDelegation is the delegation under which the fallback may start now; nil leaves it with the one that it has.
	FallbackDelegation []byte
}

// Fallback is the revision that a node goes back to from an upgrade that is asked for now; its number is 0 where none
// has worked.
func Fallback(ctx context.Context, tx db.Tx, i Instance) (Revision, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Revision{}, err
	}
	return findRevision(revisions, lastWorking(revisions, i.Revision)), nil
}

// RequestUpgrade asks for another version. What worked last is what the node goes back to if the new one is not ready
// in time.
func RequestUpgrade(ctx context.Context, tx db.Tx, i Instance, ask Request, u Upgraded, now time.Time) (Change, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	base := lastWorking(revisions, i.Revision)
	next, step, err := Upgrade(i.Lifecycle, i.history(base))
	if err != nil {
		return Change{}, err
	}
	if u.AppVersion == i.Version && i.Lifecycle.Status == Running {
		return Change{}, fault.New(fault.Conflict, codeVersionUnchanged, "The app instance runs this version already.", nil).
			WithField("/target_version", "is the version that runs")
	}
	i.Revision = newestRevision(revisions).No + 1
	made := Revision{No: i.Revision, AppVersion: u.AppVersion, Previous: base, Fallback: base}
	if err := insertRevision(ctx, tx, i.ID, made, u.NewRevision, ask.CorrelationID, now); err != nil {
		return Change{}, err
	}
	if base > 0 && u.FallbackDelegation != nil {
		if err := updateDelegation(ctx, tx, i.ID, base, u.FallbackDelegation); err != nil {
			return Change{}, err
		}
	}
	for _, m := range i.Members {
		if err := insertMemberRevision(ctx, tx, m.ID, i.Revision, u.Services[m.ID]); err != nil {
			return Change{}, err
		}
	}
	return begin(ctx, tx, i, ask, operationUpgrade, next, step, now)
}

// RollbackTarget finds the revision whose content a rollback runs again: the newest that worked and is not the one that
// is wanted now; with a version, the newest of that version. An instance that failed may also go back to what it wanted
// itself, if that once worked.
func RollbackTarget(ctx context.Context, tx db.Tx, i Instance, version string) (Revision, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Revision{}, err
	}
	if _, _, err := RollBack(i.Lifecycle, i.history(lastWorking(revisions, i.Revision))); err != nil {
		return Revision{}, err
	}
	return rollbackTarget(revisions, i.Revision, i.Lifecycle.Status, version)
}

// rollbackTarget chooses from revisions in the order of their numbers.
func rollbackTarget(revisions []Revision, wanted int64, status Status, version string) (Revision, error) {
	now := findRevision(revisions, wanted)
	if version == "" {
		if r := findRevision(revisions, now.Previous); r.Worked() {
			return r, nil
		}
		if status == Failed && now.Worked() {
			return now, nil
		}
		return Revision{}, fault.New(fault.Conflict, codeNoPreviousVersion, "There is no earlier version that this app "+
			"instance has been running.", nil)
	}
	if version == now.AppVersion && status == Running {
		return Revision{}, fault.New(fault.Conflict, codeVersionUnchanged, "The app instance runs this version already.",
			nil).
			WithField("/target_version", "is the version that runs")
	}
	for _, r := range slices.Backward(revisions) {
		if r.AppVersion == version && r.Worked() {
			return r, nil
		}
	}
	return Revision{}, fault.New(fault.Unprocessable, fault.CodeReferenceUnknown, "This app instance has not been "+
		"running that "+
		"version, or so long ago that it is not kept.", nil).
		WithField("/target_version", "names no version that it was running within the retention").Permanent()
}

// RequestRollback asks for the content of an earlier revision again, under a new number. It has no fallback: where the
// old one will not start either, the instance fails.
func RequestRollback(ctx context.Context, tx db.Tx, i Instance, ask Request, target Revision, delegationEnvelope []byte,
	now time.Time,
) (Change, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	base := lastWorking(revisions, i.Revision)
	next, step, err := RollBack(i.Lifecycle, i.history(base))
	if err != nil {
		return Change{}, err
	}
	made := Revision{
		No: newestRevision(revisions).No + 1, AppVersion: target.AppVersion, Previous: base,
		ReadyAt: target.ReadyAt,
	}
	if findRevision(revisions, base).AppVersion == target.AppVersion {
		made.Previous = target.Previous
	}
	if err := copyRevision(ctx, tx, i, target.No, made, delegationEnvelope, ask.CorrelationID, now); err != nil {
		return Change{}, err
	}
	i.Revision = made.No
	return begin(ctx, tx, i, ask, operationRollback, next, step, now)
}

// RequestStop asks for the containers of an instance to end. It is stopped when its nodes have said so; until it is
// started again, nothing of it is measured.
func RequestStop(ctx context.Context, tx db.Tx, i Instance, ask Request, now time.Time) (Change, error) {
	next, step, err := Stop(i.Lifecycle)
	if err != nil {
		return Change{}, err
	}
	return begin(ctx, tx, i, ask, operationStop, next, step, now)
}

// RequestStart asks a stopped or failed instance to run again, as a new revision of the same content: what failed
// before it was stopped does not count against it.
func RequestStart(ctx context.Context, tx db.Tx, i Instance, ask Request, delegationEnvelope []byte,
	now time.Time,
) (Change, error) {
	next, step, err := Start(i.Lifecycle, i.History())
	if err != nil {
		return Change{}, err
	}
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	stopped := findRevision(revisions, i.Revision)
	made := Revision{
		No: newestRevision(revisions).No + 1, AppVersion: stopped.AppVersion, Previous: stopped.Previous,
		ReadyAt: stopped.ReadyAt,
	}
	if err := copyRevision(ctx, tx, i, stopped.No, made, delegationEnvelope, ask.CorrelationID, now); err != nil {
		return Change{}, err
	}
	i.Revision = made.No
	return begin(ctx, tx, i, ask, operationStart, next, step, now)
}

// begin opens the operation and takes the first step of an action.
func begin(ctx context.Context, tx db.Tx, i Instance, ask Request, kind string, next Lifecycle, step Step,
	now time.Time,
) (Change, error) {
	step.Reason = ask.Reason
	op := operation{
		ID: ask.OperationID, InstanceID: i.ID, Kind: kind, Revision: i.Revision, By: ask.By,
		CorrelationID: ask.CorrelationID,
	}
	if err := insertOperation(ctx, tx, op, now); err != nil {
		return Change{}, err
	}
	i.Operation = Operation{Kind: kind, By: ask.By, CorrelationID: ask.CorrelationID}
	for _, m := range i.Members {
		if m.Unreachable {
			// Said at once, not only when the node is lost again.
			next.Reason = protocol.WorkloadStatus_NODE_UNREACHABLE
		}
	}
	c, err := saveSteps(ctx, tx, i, next, []Step{step}, now)
	c.DesiredChanged = true
	if err != nil {
		return Change{}, err
	}
	if err := supersede(ctx, tx, i.ID, i.Revision, now); err != nil {
		return Change{}, err
	}
	// With the revision the version that is wanted has changed, too.
	c.Instance, err = Get(ctx, tx, i.ProjectID, i.ID)
	return c, err
}

// Settings are what may change of an instance without a new version; nil leaves a setting as it is.
type Settings struct {
	DisplayName *string
	ConfigJSON  *string
}

// UpdateSettings changes name and config. No node hears of it; it takes no step.
func UpdateSettings(ctx context.Context, tx db.Tx, i Instance, s Settings, now time.Time) (Instance, error) {
	if i.Lifecycle.Status == Decommissioning || i.Lifecycle.Status.Ended() {
		return Instance{}, notOpen(i.Lifecycle.Status, "changed")
	}
	if s.DisplayName != nil {
		i.DisplayName = *s.DisplayName
	}
	if s.ConfigJSON != nil {
		i.ConfigJSON = *s.ConfigJSON
	}
	i.ResourceVersion++
	i.UpdatedAt = now
	return i, updateInstance(ctx, tx, i)
}

// lastWorking is the revision to go back to: the wanted one if it worked, else the one before it; 0 where none did.
func lastWorking(revisions []Revision, wanted int64) int64 {
	now := findRevision(revisions, wanted)
	if now.Worked() {
		return now.No
	}
	if before := findRevision(revisions, now.Previous); before.Worked() {
		return before.No
	}
	return 0
}

func findRevision(revisions []Revision, no int64) Revision {
	for _, r := range revisions {
		if r.No == no {
			return r
		}
	}
	return Revision{}
}

func newestRevision(revisions []Revision) Revision {
	var last Revision
	for _, r := range revisions {
		if r.No > last.No {
			last = r
		}
	}
	return last
}
