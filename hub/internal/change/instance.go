package change

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// CompleteInstance does what a change of an instance means for the other slices, and records it: members that are
// removed free their capacity and close their bills, and nodes are to hold something else.
func CompleteInstance(ctx context.Context, tx db.Tx, by By, action string, c instance.Change) error {
	for _, removal := range c.Removed {
		if err := completeRemoval(ctx, tx, by, action, removal); err != nil {
			return err
		}
		if removal.Member.External {
			continue
		}
		// An instance has one member on a node.
		if err := endIdentity(ctx, tx, by, c.Instance.ID); err != nil {
			return err
		}
	}
	if c.Ends() {
		if err := detachAll(ctx, tx, by, c.Instance.ID); err != nil {
			return err
		}
	}
	if c.Instance.External() {
		return RecordInstance(ctx, tx, by, action, c)
	}
	if err := settleCapacity(ctx, tx, c); err != nil {
		return err
	}
	if err := bumpIntents(ctx, tx, by, c); err != nil {
		return err
	}
	return RecordInstance(ctx, tx, by, action, c)
}

// settleCapacity frees what the other revision of an upgrade or a rollback needed, once that is over. Where it failed,
// there stays room for either, so that the tenant can return.
func settleCapacity(ctx context.Context, tx db.Tx, c instance.Change) error {
	over := func(to lifecycle.Status) bool {
		return slices.ContainsFunc(c.Steps, func(s lifecycle.Step) bool {
			return s.To == to && (s.From == lifecycle.Upgrading || s.From == lifecycle.RollingBack)
		})
	}
	failed := over(lifecycle.Failed)
	if !failed && !over(lifecycle.Running) {
		return nil
	}
	for _, m := range c.Instance.Members {
		if m.Gone {
			continue
		}
		services, err := instance.Services(ctx, tx, m.ID, c.Instance.Revision)
		if err != nil {
			return err
		}
		use := capacity.UseOf(services)
		if failed {
			err = settleEither(ctx, tx, c.Instance, m.ID, use)
		} else {
			err = capacity.Settle(ctx, tx, m.ID, use)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// settleEither leaves a member with room for what it uses now or for what its last working revision used.
func settleEither(ctx context.Context, tx db.Tx, i instance.Instance, memberID string, use capacity.Use) error {
	back, err := instance.Fallback(ctx, tx, i)
	if err != nil || back.No == 0 {
		return err
	}
	before, err := instance.Services(ctx, tx, memberID, back.No)
	if err != nil {
		return err
	}
	return capacity.SettleEither(ctx, tx, memberID, use, capacity.UseOf(before))
}

// RecordInstance writes an event for each step of a change and an audit row for all of it; a change without a step
// writes none.
func RecordInstance(ctx context.Context, tx db.Tx, by By, action string, c instance.Change) error {
	i := c.Instance
	e := Entry{
		Action:       action,
		ResourceType: Instance,
		ResourceID:   i.ID,
		OrgID:        i.OrgID,
		ProjectID:    i.ProjectID,
		RequestedBy:  i.Operation.By,
		After:        map[string]any{"status": i.Lifecycle.Status, "revision": i.Revision, "version": i.Version},
	}
	for n, step := range c.Steps {
		e.Event, e.Version = step.EventType(), c.FirstVersion+int64(n)
		e.Data = map[string]any{"to": string(step.To)}
		if step.From != "" {
			e.Data["from"] = string(step.From)
		}
		if step.Reason != 0 {
			e.Data["reason"] = step.Reason.Text()
		}
		if service := i.FailingService(step.Reason); service != "" {
			e.Data["service"] = service
		}
		if n == 0 && c.Strategy != "" {
			e.Data["strategy"] = c.Strategy
		}
		if n == 0 && c.StrategyReason != "" {
			e.Data["strategy_reason"] = c.StrategyReason
		}
		if err := Append(ctx, tx, by, e); err != nil {
			return err
		}
	}
	if len(c.Steps) == 0 {
		return nil
	}
	if from := c.Steps[0].From; from != "" {
		before := map[string]any{"status": from}
		if c.Before.ID != "" {
			before["revision"], before["version"] = c.Before.Revision, c.Before.Version
		}
		e.Before = before
	}
	e.Reason = i.Lifecycle.Reason.Text()
	return Audit(ctx, tx, by, e)
}

// bumpIntents records that the desired state of the instance's nodes has changed. Members that are to run again become
// due for a lease.
func bumpIntents(ctx context.Context, tx db.Tx, by By, c instance.Change) error {
	if c.Resumed() {
		var ids []string
		for _, m := range c.Instance.Members {
			ids = append(ids, m.ID)
		}
		if err := ledger.ResumeRenewals(ctx, tx, ids, by.Now); err != nil {
			return err
		}
	}
	if !c.DesiredChanged {
		return nil
	}
	var nodes []string
	for _, m := range c.Instance.Members {
		if !m.Gone {
			nodes = append(nodes, m.NodeID)
		}
	}
	slices.Sort(nodes)
	for _, id := range slices.Compact(nodes) {
		if err := fleet.BumpIntent(ctx, tx, id); err != nil {
			return fmt.Errorf("bump the intent of node %s: %w", id, err)
		}
	}
	return nil
}

// completeRemoval frees the capacity of a member that is gone from its node, and closes its bill; the allocation is
// released when it was only waiting for that.
func completeRemoval(ctx context.Context, tx db.Tx, by By, action string, r instance.Removal) error {
	released, err := capacity.Free(ctx, tx, r.Member.ID, by.Now)
	if err != nil {
		return err
	}
	if released != nil {
		if err := ledger.CloseSubject(ctx, tx, released.ID, by.Now, by.Now); err != nil {
			return err
		}
		if err := RecordAllocation(ctx, tx, by, action, capacity.Releasing, *released); err != nil {
			return err
		}
	}
	if err := secret.Forget(ctx, tx, r.Member.ID); err != nil {
		return err
	}
	failpoint.Hit("hub/report/capacity_freed")
	if r.Member.External {
		return nil // its allocation is billed, and nothing else
	}
	end := by.Now
	if r.Proof != nil {
		end = r.Proof.GetAt().AsTime()
	}
	if err := ledger.CloseSubject(ctx, tx, r.Member.ID, end, by.Now); err != nil || r.Proof != nil || r.Lost {
		// What a lost node measured until now is still its tenant's to pay: the hold waits for the final record, or 30 days.
		return err
	}
	// No node has it, so no final record will come.
	return ledger.SettleSubject(ctx, tx, r.Member.ID, by.Now)
}
