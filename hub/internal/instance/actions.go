package instance

import (
	"context"
	"reflect"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Revision is one version of what the members of an instance run.
type Revision = lifecycle.Revision

// Fallback returns the revision to which nodes roll back from an upgrade that is requested now; its number is 0 if none
// has worked.
func Fallback(ctx context.Context, tx db.Tx, i Instance) (Revision, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Revision{}, err
	}
	return revisions.Find(revisions.LastWorking(i.Revision)), nil
}

// RequestUpgrade makes a revision with another version. If that is not ready in time, the node rolls back to the last
// one that worked, whose delegation fallbackDelegation replaces; nil keeps the current one.
func RequestUpgrade(ctx context.Context, tx db.Tx, i Instance, req Request, n NewRevision, fallbackDelegation []byte,
	now time.Time,
) (Change, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	made := revisions.Upgrade(i.Revision)
	next, step, err := lifecycle.Upgrade(i.Lifecycle, i.history(made.Fallback))
	if err != nil {
		return Change{}, err
	}
	if i.Lifecycle.Status == lifecycle.Running && n.same(i) {
		return Change{}, fault.New(fault.Conflict, lifecycle.CodeVersionUnchanged,
			"The app instance runs this version already.", nil).WithField("/target_version", "is the version that runs")
	}
	i.Revision = made.No
	if err := insertRevision(ctx, tx, i.ID, made, n, req.CorrelationID, now); err != nil {
		return Change{}, err
	}
	if made.Fallback > 0 && fallbackDelegation != nil {
		if err := updateDelegation(ctx, tx, i.ID, made.Fallback, fallbackDelegation); err != nil {
			return Change{}, err
		}
	}
	for _, m := range i.Members {
		if m.External {
			continue
		}
		if err := saveMemberRevision(ctx, tx, m.ID, i.Revision, n.Services[m.ID]); err != nil {
			return Change{}, err
		}
	}
	return begin(ctx, tx, i, req, operationUpgrade, next, step, now)
}

// same reports whether the instance runs this already.
func (n NewRevision) same(i Instance) bool {
	return n.AppVersion == i.Version && n.ParametersJSON == i.ParametersJSON && n.ConfigJSON == i.ConfigJSON &&
		reflect.DeepEqual(n.Resources, i.Resources)
}

// RollbackTarget returns the revision whose content a rollback runs again: the newest that worked, other than the
// desired one; with a version, the newest of that version. A failed instance may also return to its desired revision,
// if that once worked.
func RollbackTarget(ctx context.Context, tx db.Tx, i Instance, version string) (Revision, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Revision{}, err
	}
	if _, _, err := lifecycle.RollBack(i.Lifecycle, i.history(revisions.LastWorking(i.Revision))); err != nil {
		return Revision{}, err
	}
	return revisions.RollbackTarget(i.Revision, i.Lifecycle.Status, version)
}

// RequestRollback makes a revision with the content of an earlier one, and these services of its members. The revision
// that serves is its fallback where both start beside each other. No node goes back to that: where the old content does
// not start either, the instance fails.
func RequestRollback(ctx context.Context, tx db.Tx, i Instance, req Request, target Revision,
	services map[string][]*protocol.Service, startsFirst bool, delegationEnvelope []byte, now time.Time,
) (Change, error) {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	next, step, err := lifecycle.RollBack(i.Lifecycle, i.history(revisions.LastWorking(i.Revision)))
	if err != nil {
		return Change{}, err
	}
	made := revisions.RollBack(i.Revision, target, startsFirst)
	if err := copyRevision(ctx, tx, i, target.No, made, delegationEnvelope, req.CorrelationID, now); err != nil {
		return Change{}, err
	}
	for memberID, s := range services {
		if err := saveMemberRevision(ctx, tx, memberID, made.No, s); err != nil {
			return Change{}, err
		}
	}
	i.Revision = made.No
	return begin(ctx, tx, i, req, operationRollback, next, step, now)
}

// RequestStop ends the containers of an instance. It is stopped when its nodes have reported that; until it is started
// again, nothing of it is metered.
func RequestStop(ctx context.Context, tx db.Tx, i Instance, req Request, now time.Time) (Change, error) {
	next, step, err := lifecycle.Stop(i.Lifecycle)
	if err != nil {
		return Change{}, err
	}
	return begin(ctx, tx, i, req, operationStop, next, step, now)
}

// RequestStart runs a stopped or failed instance again, as a new revision with the same content: earlier failures do
// not count against it.
func RequestStart(ctx context.Context, tx db.Tx, i Instance, req Request, delegationEnvelope []byte,
	now time.Time,
) (Change, error) {
	next, step, err := lifecycle.Start(i.Lifecycle, i.History())
	if err != nil {
		return Change{}, err
	}
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return Change{}, err
	}
	made := revisions.Restart(i.Revision)
	if err := copyRevision(ctx, tx, i, i.Revision, made, delegationEnvelope, req.CorrelationID, now); err != nil {
		return Change{}, err
	}
	i.Revision = made.No
	return begin(ctx, tx, i, req, operationStart, next, step, now)
}

// begin opens the operation and takes the first step of an action.
func begin(ctx context.Context, tx db.Tx, i Instance, req Request, kind string, next lifecycle.Lifecycle,
	step lifecycle.Step,
	now time.Time,
) (Change, error) {
	step.Reason = req.Reason
	if err := insertOperation(ctx, tx, i, kind, req, now); err != nil {
		return Change{}, err
	}
	i.Operation = operationOf(ctx, kind, req)
	for _, m := range i.Members {
		if m.Unreachable && !m.External {
			// An unreachable node shows at once.
			next.Reason = protocol.WorkloadStatus_NODE_UNREACHABLE
		}
	}
	c, err := saveSteps(ctx, tx, i, next, []lifecycle.Step{step}, now)
	c.DesiredChanged = true
	if err != nil {
		return Change{}, err
	}
	if err := supersede(ctx, tx, i.ID, i.Revision, now); err != nil {
		return Change{}, err
	}
	// The new revision has another version.
	c.Instance, err = Get(ctx, tx, i.ProjectID, i.ID)
	return c, err
}

// Settings are what may change of an instance without a new version; nil leaves a setting unchanged.
type Settings struct {
	DisplayName *string
	ConfigJSON  *string
}

// UpdateSettings changes name and config, and takes no step. A new config changes the nodes' desired state.
func UpdateSettings(ctx context.Context, tx db.Tx, i Instance, s Settings, now time.Time) (Change, error) {
	if err := lifecycle.ChangeSettings(i.Lifecycle); err != nil {
		return Change{}, err
	}
	c := Change{DesiredChanged: s.ConfigJSON != nil && *s.ConfigJSON != i.ConfigJSON}
	if s.DisplayName != nil {
		i.DisplayName = *s.DisplayName
	}
	if s.ConfigJSON != nil {
		i.ConfigJSON = *s.ConfigJSON
		if err := updateConfig(ctx, tx, i); err != nil {
			return Change{}, err
		}
	}
	i.ResourceVersion++
	i.UpdatedAt = now
	c.Instance = i
	return c, updateInstance(ctx, tx, i)
}
