package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// secondProject is another project of the org.
func (w *world) secondProject() (p iam.Project) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		p, err = iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: w.Project.OrgID, Slug: "second", DisplayName: "Second", CreatedAt: w.Now,
		})
		return err
	})
	return p
}

// shared is a running instance that its project shares with the org.
func (w *world) shared() instance.Instance {
	i := w.Running()
	w.Exec(`UPDATE app_instances SET control_plane_scope = 'tenant', tenant_boundary_mode = 'tenant_shared'
		WHERE id = $1`, i.ID)
	return w.Get(i.ID)
}

func (w *world) attached(project string, i instance.Instance) instance.AttachedInstance {
	w.T.Helper()
	a, err := w.Commands().AttachInstance(w.T.Context(), w.Meta("attach"+db.NewID()), project, i.ID)
	require.NoError(w.T, err)
	return a
}

func TestASharedInstanceIsAttachedOnceAndDetachedByEitherProject(t *testing.T) {
	w := newWorld(t)
	i, second := w.shared(), w.secondProject()
	a := w.attached(second.ID, i)
	require.Equal(t, second.ID, a.ProjectID)
	require.Equal(t, w.Project.ID, a.OwnerProjectID)
	require.Equal(t, i.ResourceVersion+1, w.Get(i.ID).ResourceVersion, "who waits for the instance wakes")
	replayed, err := w.Commands().AttachInstance(t.Context(), w.Meta("attach once"), second.ID, i.ID)
	require.EqualValues(t, "attachment_exists", fault.As(err).Code, replayed)
	_, err = w.Commands().AttachInstance(t.Context(), w.Meta("own"), w.Project.ID, i.ID)
	require.EqualValues(t, "attachment_exists", fault.As(err).Code)

	for n, project := range []string{second.ID, w.Project.ID} {
		require.NoError(t, w.Commands().DetachInstance(t.Context(), w.Meta(""), project, i.ID, a.ID), n)
		require.Equal(t, []string{"apps.attachment.created", "apps.attachment.deleted"}, w.EventTypes(a.ID))
		require.Equal(t, "apps.attachment.delete", w.auditOf("attachment", a.ID).Action)
		a = w.attached(second.ID, i)
	}
	require.Equal(t, []string{"apps.instance.attached", "apps.instance.detached"}, w.EventTypes(i.ID)[3:5])
}

func TestOnlyATenantSharedInstanceIsAttached(t *testing.T) {
	w := newWorld(t)
	i, second := w.Running(), w.secondProject()
	_, err := w.Commands().AttachInstance(t.Context(), w.Meta("k"), second.ID, i.ID)
	require.EqualValues(t, "instance_not_shared", fault.As(err).Code)
	m := w.Meta("k2")
	m.Principal.Bindings = []iam.Binding{{Role: iam.AppOperator, ProjectID: second.ID}}
	_, err = w.Commands().AttachInstance(t.Context(), m, second.ID, i.ID)
	require.True(t, fault.Is(err, fault.NotFound), "it is not known there: %v", err)

	w.Exec(`UPDATE app_instances SET tenant_boundary_mode = 'tenant_shared' WHERE id = $1`, i.ID)
	_, err = w.Commands().AttachInstance(t.Context(), m, second.ID, i.ID)
	require.NoError(t, err, "what is shared with the org is known there")
}

func TestAnInstanceThatOthersUseIsNotDecommissioned(t *testing.T) {
	w := newWorld(t)
	i, second := w.shared(), w.secondProject()
	a := w.attached(second.ID, i)
	_, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.EqualValues(t, "instance_attached", fault.As(err).Code)
	require.NoError(t, w.Commands().DetachInstance(t.Context(), w.Meta(""), w.Project.ID, i.ID, a.ID))
	ending, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end 2"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Decommissioning, ending.Lifecycle.Status)
	_, err = w.Commands().AttachInstance(t.Context(), w.Meta("late"), second.ID, i.ID)
	require.EqualValues(t, "instance_not_shared", fault.As(err).Code)
}

func TestAnInstanceThatEndsByItselfEndsItsAttachments(t *testing.T) {
	w := newWorld(t)
	i, second := w.shared(), w.secondProject()
	a := w.attached(second.ID, i)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return periodic.ReleaseUnpaid(ctx, tx, i.Members[0].AllocationID, "unpaid", w.Now)
	})
	require.Equal(t, lifecycle.Decommissioning, w.Get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{"apps.attachment.created", "apps.attachment.deleted"}, w.EventTypes(a.ID))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM subjects WHERE id = $1 AND settled_at IS NOT NULL`, a.ID))
}

// Nothing is left that an attached project could use, or pay for.
func TestAnInstanceThatIsLostWithItsNodeEndsItsAttachments(t *testing.T) {
	w := newWorld(t)
	i, second := w.shared(), w.secondProject()
	a := w.attached(second.ID, i)
	w.silent()
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true, Reason: "burnt"}))
	require.Equal(t, lifecycle.Failed, w.Get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{"apps.attachment.created", "apps.attachment.deleted"}, w.EventTypes(a.ID))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM subjects WHERE id = $1 AND settled_at IS NOT NULL`, a.ID))
	_, err := w.Commands().AttachInstance(t.Context(), w.Meta("again"), second.ID, i.ID)
	require.EqualValues(t, "instance_not_shared", fault.As(err).Code)
}

// TestTheOwnerPaysTheRuntimeAndTheAttachedProjectItsAttachment: each has usage of its own.
func TestTheOwnerPaysTheRuntimeAndTheAttachedProjectItsAttachment(t *testing.T) {
	w := newWorld(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: ledger.MeterAttachmentSeconds, AppSlug: "demo", Currency: "EUR", Nanos: 3_600_000_000,
			Per: "hour", From: w.Now.Add(-time.Hour),
		}, w.Now.Add(-2*time.Hour))
		return err
	})
	i, second := w.shared(), w.secondProject()
	a := w.attached(second.ID, i)
	w.Now = w.Now.Add(time.Hour)
	require.NoError(t, w.Commands().DetachInstance(t.Context(), w.Meta(""), second.ID, i.ID, a.ID))
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		hours, _, err := ledger.ListHours(ctx, tx, ledger.Filter{ProjectID: second.ID})
		require.NoError(t, err)
		var charged int64
		for _, h := range hours {
			require.Equal(t, ledger.SourceAttachment, h.UsageSource)
			require.Equal(t, i.ID, h.AppInstanceID)
			charged += h.ChargedNanos
		}
		require.EqualValues(t, 3_600_000_000, charged)
		raw, _, err := ledger.ListUsage(ctx, tx, ledger.Filter{
			AppInstanceID: i.ID, UsageSource: ledger.SourceAttachment,
		})
		require.NoError(t, err)
		require.Len(t, raw, 1)
		require.Equal(t, second.ID, raw[0].ProjectID)
		return err
	})
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM subjects WHERE kind = 'member' AND id = $1 AND project_id = $2`,
		i.Members[0].ID, w.Project.ID))
}

func TestAnAttachmentThatIsNotPaidEnds(t *testing.T) {
	w := newWorld(t)
	i, second := w.shared(), w.secondProject()
	a := w.attached(second.ID, i)
	unpaid := func(ctx context.Context, tx db.Tx) error {
		return periodic.DetachUnpaid(ctx, tx, a.ID, "unpaid", w.Now)
	}
	w.Tx(unpaid)
	require.Equal(t, []string{"apps.attachment.created", "apps.attachment.deleted"}, w.EventTypes(a.ID))
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)
	w.Tx(unpaid) // the pass that found it exhausted may come after its tenant's detachment
}

// The finding about an attachment that could not be ended is resolved with its end, by the hub or by its tenant.
func TestAnUnpaidAttachmentThatEndsAfterAllLeavesNoFinding(t *testing.T) {
	w := newWorld(t)
	i, second := w.shared(), w.secondProject()
	for _, end := range []func(id string) error{
		func(id string) error {
			return db.WriteTx(t.Context(), w.DB, func(tx db.Tx) error {
				return periodic.DetachUnpaid(t.Context(), tx, id, "unpaid", w.Now)
			})
		},
		func(id string) error {
			return w.Commands().DetachInstance(t.Context(), w.Meta("detach"), second.ID, i.ID, id)
		},
	} {
		a := w.attached(second.ID, i)
		w.unpaid(finding.Release, change.Attachment, a.ID)
		require.NoError(t, end(a.ID))
		require.Zero(t, w.Count(`SELECT count(*) FROM recovery_findings`))
	}
}

// Nor is what he was told of an allocation that its tenant releases.
func TestAReleasedAllocationLeavesNoFinding(t *testing.T) {
	w := newWorld(t)
	for _, kind := range []string{finding.Release, finding.Lease} {
		a := w.Allocation()
		w.unpaid(kind, change.Allocation, a.ID)
		_, err := w.Commands().ReleaseAllocation(t.Context(), w.Meta("release-"+kind), w.Project.ID, a.ID)
		require.NoError(t, err)
		require.Zero(t, w.Count(`SELECT count(*) FROM recovery_findings`), kind)
	}
}

// unpaid is what the passes find where a wallet is empty.
func (w *world) unpaid(kind, resourceType, id string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return change.AddFinding(ctx, tx, finding.Finding{
			NodeID: w.Node, Kind: kind, ResourceType: resourceType, ResourceID: id, At: w.Now,
		})
	})
}

// TestLaw10AnAttachmentNeverCrossesOrgs: another org's instance and attachment answer as if they were absent.
func TestLaw10AnAttachmentNeverCrossesOrgs(t *testing.T) {
	w := newWorld(t)
	i, to := w.shared(), w.secondProject()
	a := w.attached(to.ID, i)
	own, outsider := w.NewTenant("other")
	m := w.Meta("k")
	m.Principal = outsider
	before := w.Contents()
	for _, project := range []string{own.ID, w.Project.ID, to.ID} {
		foreign := []error{
			second(w.Commands().AttachInstance(t.Context(), m, project, i.ID)),
			w.Commands().DetachInstance(t.Context(), m, project, i.ID, a.ID),
		}
		absent := []error{
			second(w.Commands().AttachInstance(t.Context(), m, project, db.NewID())),
			w.Commands().DetachInstance(t.Context(), m, project, db.NewID(), db.NewID()),
		}
		for n := range foreign {
			require.True(t, fault.Is(foreign[n], fault.NotFound), foreign[n])
			require.Equal(t, absent[n].Error(), foreign[n].Error())
		}
	}
	m.Principal = iam.Principal{Type: outsider.Type, ID: outsider.ID, PlatformAdmin: true}
	_, err := w.Commands().AttachInstance(t.Context(), m, own.ID, i.ID)
	require.True(t, fault.Is(err, fault.NotFound), "not even by a platform admin: %v", err)
	require.Equal(t, before, w.Contents())
}

func law08ChangesOfAttachmentsAreOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{
		{"attach", "instance_attachments", func(w *world) func(commandtest.Around) error {
			i, to, m := w.shared(), w.secondProject(), w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.AttachInstance(ctx, m, to.ID, i.ID))
			})
		}},
		{"detach", "instance_attachments", func(w *world) func(commandtest.Around) error {
			i, second, m := w.shared(), w.secondProject(), w.Meta("")
			a := w.attached(second.ID, i)
			return w.command(func(ctx context.Context, s *command.Service) error {
				return s.DetachInstance(ctx, m, second.ID, i.ID, a.ID)
			})
		}},
	})
}
