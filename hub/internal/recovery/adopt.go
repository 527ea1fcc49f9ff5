package recovery

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// madeAfter is the text of findings about resources that the rows do not know.
const madeAfter = "was made after the backup; it goes on as it is"

// upload is what a node uploaded, with verified signatures, addressee and digests.
type upload struct {
	NodeID string
	// Epoch and Generation are of its accepted state; 0 where it has none.
	Epoch      uint64
	Generation uint64
	// Newer: the rows have no state as new as that one.
	Newer     bool
	Named     []string
	Workloads []*protocol.Workload
	Leases    []*protocol.Lease
	Volumes   []*protocol.ProjectVolume
	SSHKeys   []*protocol.SSHKey
	// Findings are the contradictions found so far.
	Findings []finding.Finding
}

// adoptNode updates the restored rows to the state that the node was sent after the backup, in the caller's
// transaction, and makes it syncable: a state that this hub signed wins over older rows. Nothing that runs is stopped;
// each contradiction is a finding.
func adoptNode(ctx context.Context, tx db.Tx, b upload, now time.Time) error {
	a := adopter{by: change.BySystem(b.NodeID, now), b: b}
	for _, f := range b.Findings {
		if err := change.AddFinding(ctx, tx, f); err != nil {
			return err
		}
	}
	named := slices.Clone(b.Named)
	for _, w := range b.Workloads {
		named = append(named, w.GetId())
	}
	members, err := instance.RecordedOn(ctx, tx, b.NodeID, named)
	if err != nil {
		return err
	}
	claims, err := capacity.ClaimsOn(ctx, tx, b.NodeID)
	if err != nil {
		return err
	}
	volumes, err := a.volumes(ctx, tx)
	if err != nil {
		return err
	}
	oneOrg, err := capacity.OneOrg(ctx, tx, b.NodeID)
	if err != nil {
		return err
	}
	todo := plan.Adopt(members, claims, oneOrg, plan.Upload{Newer: b.Newer, Named: b.Named, Workloads: b.Workloads})
	if err := a.apply(ctx, tx, todo); err != nil {
		return err
	}
	for _, c := range volumes {
		// After the workloads: they have the slug of the org.
		if err := a.owner(ctx, tx, c.Volume.OrgID, "", c.Volume.ProjectID); err != nil {
			return err
		}
	}
	if err := a.sshKeys(ctx, tx); err != nil {
		return err
	}
	for _, l := range b.Leases {
		if err := a.lease(ctx, tx, l); err != nil {
			return err
		}
	}
	// The next state is compiled from these rows.
	if err := fleet.BumpIntent(ctx, tx, b.NodeID); err != nil {
		return err
	}
	if err := endUpload(ctx, tx, b.NodeID, now); err != nil {
		return err
	}
	version, err := fleet.NextVersion(ctx, tx, b.NodeID)
	if err != nil {
		return err
	}
	data := map[string]any{
		"epoch": b.Epoch, "generation": b.Generation, "newer": b.Newer, "made": len(todo.Made), "changed": len(todo.Changed),
		"ended": len(todo.Ended),
	}
	adopted := change.Entry{
		Event: "fleet.node.recovered", Action: actionAdopt, ResourceType: resourceNode, ResourceID: b.NodeID,
		Version: version, Data: data, After: data,
	}
	if err := change.Append(ctx, tx, a.by, adopted); err != nil {
		return err
	}
	return change.Audit(ctx, tx, change.ByNode(b.NodeID, b.NodeID, now), adopted)
}

type adopter struct {
	by change.By
	b  upload
}

func (a adopter) addFinding(ctx context.Context, tx db.Tx, kind, resourceType, id, format string, args ...any) error {
	return change.AddFinding(ctx, tx, finding.Finding{
		NodeID: a.b.NodeID, Kind: kind, ResourceType: resourceType, ResourceID: id, Detail: fmt.Sprintf(format, args...),
		At: a.by.Now,
	})
}

func (a adopter) apply(ctx context.Context, tx db.Tx, todo plan.Adoption) error {
	for _, id := range todo.Missing {
		if err := a.addFinding(ctx, tx, finding.Document, "app_instance_member", id, "The node was told of this member "+
			"after the backup and does not hold its document; nothing of it ran. Deploy it again."); err != nil {
			return err
		}
	}
	for _, id := range todo.Ended {
		if err := a.end(ctx, tx, id); err != nil {
			return err
		}
	}
	for _, id := range todo.Left {
		if err := instance.RecordAlreadyAbsent(ctx, tx, id, a.b.Epoch, a.b.Generation, a.by.Now); err != nil {
			return err
		}
	}
	for _, w := range todo.Made {
		if err := a.made(ctx, tx, w); err != nil {
			return err
		}
	}
	for _, w := range todo.Changed {
		if err := a.changed(ctx, tx, w); err != nil {
			return err
		}
	}
	for _, c := range todo.Superseded {
		if err := a.superseded(ctx, tx, c); err != nil {
			return err
		}
	}
	return nil
}

// volumes adds the volumes that the rows do not know, without which the members that use them would be left out, and
// what was asked of the others after the backup.
func (a adopter) volumes(ctx context.Context, tx db.Tx) ([]capacity.VolumeChange, error) {
	adopted, err := capacity.AdoptVolumes(ctx, tx, a.b.NodeID, a.b.Volumes, a.b.Newer, a.by.CorrelationID, a.by.Now)
	if err != nil {
		return nil, err
	}
	for _, c := range adopted {
		v, detail := c.Volume, "The volume "+madeAfter+". Its name is lost."
		if c.Before != "" {
			detail = fmt.Sprintf("%q was enlarged or restored after the backup; it stays so.", v.Name)
		}
		if v.Status == capacity.VolumeDeleting {
			detail = fmt.Sprintf("%q was deleted after the backup; it stays so.", v.Name)
		}
		if err := change.RecordVolume(ctx, tx, a.by, actionAdopt, c); err != nil {
			return nil, err
		}
		if c.Before == "" && !v.ReadyAt.IsZero() {
			if err := ledger.OpenSubject(ctx, tx, change.VolumeSubject(v, a.by.Now)); err != nil {
				return nil, err
			}
		}
		if err := a.addFinding(ctx, tx, finding.Volume, resourceVolume, v.ID, "%s", detail); err != nil {
			return nil, err
		}
	}
	return adopted, nil
}

// sshKeys takes the sets of SSH keys over from a newer state: a key that was taken out after the backup stays out.
func (a adopter) sshKeys(ctx context.Context, tx db.Tx) error {
	if !a.b.Newer {
		return nil
	}
	adopted, err := capacity.AdoptSSHKeys(ctx, tx, a.b.NodeID, a.b.SSHKeys, a.by.Now)
	if err != nil {
		return err
	}
	for _, s := range adopted {
		if err := change.CompleteSSHKeys(ctx, tx, a.by, actionAdopt, s.Allocation, s.Before, s.After); err != nil {
			return err
		}
	}
	return nil
}

// end decommissions an instance that the node has removed: its end was requested after the backup.
func (a adopter) end(ctx context.Context, tx db.Tx, memberID string) error {
	i, err := instance.OfMember(ctx, tx, memberID)
	if err != nil {
		return err
	}
	ask := instance.Request{
		OperationID: db.NewID(), By: principal.Actor{Type: principal.System},
		CorrelationID: a.by.CorrelationID,
	}
	ended, err := instance.RequestDecommission(ctx, tx, i, ask, a.by.Now)
	if err != nil {
		return err
	}
	if err := change.RecordInstance(ctx, tx, a.by, actionAdopt, ended); err != nil {
		return err
	}
	return a.addFinding(ctx, tx, finding.Gone, resourceInstance, i.ID, "%q was decommissioned after the backup; it "+
		"stays so.", i.DisplayName)
}

// owner adds an org and a project that the rows do not know.
func (a adopter) owner(ctx context.Context, tx db.Tx, orgID, orgSlug, projectID string) error {
	madeOrg, madeProject, err := iam.Adopt(ctx, tx, orgID, orgSlug, projectID, a.by.Now)
	if err != nil {
		return err
	}
	if madeOrg {
		if err := a.addFinding(ctx, tx, finding.Org, resourceOrg, orgID, "The org %s %s; its users and its credit are lost.",
			cmp.Or(orgSlug, orgID), madeAfter); err != nil {
			return err
		}
	}
	if !madeProject {
		return nil
	}
	return a.addFinding(ctx, tx, finding.Project, resourceProject, projectID,
		"The project %s; its name, entitlements and service accounts are lost.", madeAfter)
}

// made adds a member that the rows do not know, with its org, project, allocation and billing subject.
func (a adopter) made(ctx context.Context, tx db.Tx, w *protocol.Workload) error {
	if err := a.owner(ctx, tx, w.GetOrgId(), w.GetOrgSlug(), w.GetProjectId()); err != nil {
		return err
	}
	use := useOf(w)
	owner, err := ownerOf(ctx, tx, w)
	if err != nil {
		return err
	}
	made, allocation, err := capacity.Adopt(ctx, tx, a.adopted(w, owner, use), a.by.Now)
	if err != nil {
		return err
	}
	if made {
		if err := a.allocation(ctx, tx, allocation); err != nil {
			return err
		}
	}
	modes := modesOf(w)
	if err := a.subject(ctx, tx, w, allocation, modes, use); err != nil {
		return err
	}
	i, err := a.instance(ctx, tx, w, modes)
	if err != nil {
		return err
	}
	return a.addFinding(ctx, tx, finding.Instance, resourceInstance, i.ID, "The instance of %s %s %s. Its name and "+
		"config are lost.", w.GetAppSlug(), w.GetAppVersion(), madeAfter)
}

// changed gives a member what a newer revision of it uses, beside what it used at the backup.
func (a adopter) changed(ctx context.Context, tx db.Tx, w *protocol.Workload) error {
	use := useOf(w)
	owner, err := ownerOf(ctx, tx, w)
	if err != nil {
		return err
	}
	if err := capacity.AdoptUse(ctx, tx, a.adopted(w, owner, use), a.by.Now); err != nil {
		return err
	}
	if err := ledger.AdoptLimits(ctx, tx, w.GetId(), use.CPUMillis, use.MemoryBytes, use.AcceleratorIDs); err != nil {
		return err
	}
	if _, err := a.instance(ctx, tx, w, catalog.Resolved{}); err != nil {
		return err
	}
	return a.addFinding(ctx, tx, finding.Revision, resourceInstance, w.GetInstanceId(),
		"Version %s, revision %d, was asked for after the backup; it goes on as it is.", w.GetAppVersion(), w.GetRevision())
}

// adopted is what a member uses, in the allocation of a project.
func (a adopter) adopted(w *protocol.Workload, owner iam.Project, use capacity.Use) capacity.Adopted {
	return capacity.Adopted{
		MemberID: w.GetId(), AllocationID: w.GetAllocationId(), NodeID: a.b.NodeID, OrgID: owner.OrgID,
		ProjectID: owner.ID, CorrelationID: w.GetCorrelationId(), Use: use,
	}
}

// ownerOf returns the project whose allocation a workload runs in: the platform's, where that manages it.
func ownerOf(ctx context.Context, tx db.Tx, w *protocol.Workload) (iam.Project, error) {
	own := iam.Project{ID: w.GetProjectId(), OrgID: w.GetOrgId()}
	if w.GetOperatingMode() != manifest.PlatformManaged {
		return own, nil
	}
	platform, err := iam.PlatformProject(ctx, tx)
	if err != nil || platform.ID == "" {
		return own, err
	}
	return platform, nil
}

// modesOf returns the modes that the hub had decided on when it signed the workload.
func modesOf(w *protocol.Workload) catalog.Resolved {
	modes := catalog.ModesOf(w.GetManifest().GetPayload())
	if boundary := manifest.TenantBoundaryMode(w.GetOperatingMode(), w.GetControlPlaneScope()); boundary != "" {
		modes.OperatingMode, modes.ControlPlaneScope = w.GetOperatingMode(), w.GetControlPlaneScope()
		modes.TenantBoundaryMode = boundary
	}
	return modes
}

// useOf returns what a member uses that may run one revision or go back to the other: the allocation has room for
// either, not for both.
func useOf(w *protocol.Workload) capacity.Use {
	now, back := w.GetServices(), w.GetFallback().GetServices()
	use, a, b := capacity.UseOf(slices.Concat(now, back)), capacity.UseOf(now), capacity.UseOf(back)
	use.CPUMillis, use.MemoryBytes = max(a.CPUMillis, b.CPUMillis), max(a.MemoryBytes, b.MemoryBytes)
	slices.Sort(use.AcceleratorIDs)
	use.AcceleratorIDs = slices.Compact(use.AcceleratorIDs)
	return use
}

func (a adopter) allocation(ctx context.Context, tx db.Tx, at capacity.Allocation) error {
	err := ledger.OpenSubject(ctx, tx, ledger.Subject{
		ID: at.ID, Kind: ledger.Allocation, OrgID: at.OrgID, ProjectID: at.ProjectID, AllocationID: at.ID, NodeID: at.NodeID,
		CorrelationID: a.by.CorrelationID, OpenedAt: a.by.Now,
	})
	if err != nil && !fault.Is(err, fault.Conflict) {
		return err
	}
	if err := change.RecordAllocation(ctx, tx, a.by, actionAdopt, "", at); err != nil {
		return err
	}
	return a.addFinding(ctx, tx, finding.Allocation, resourceAllocation, at.ID, "The allocation %s. Only what its "+
		"instances take of it is known.", madeAfter)
}

func (a adopter) subject(ctx context.Context, tx db.Tx, w *protocol.Workload, at capacity.Allocation,
	modes catalog.Resolved, use capacity.Use,
) error {
	s := ledger.Subject{
		ID: w.GetId(), Kind: ledger.Member, OrgID: w.GetOrgId(), ProjectID: w.GetProjectId(),
		AppInstanceID: w.GetInstanceId(), AppSlug: w.GetAppSlug(),
		AllocationID: at.ID, NodeID: a.b.NodeID, SKU: at.SKU, OperatingMode: modes.OperatingMode,
		ControlPlaneScope: modes.ControlPlaneScope,
		RuntimeBackend:    modes.RuntimeBackend, CorrelationID: w.GetCorrelationId(), CPUMillis: use.CPUMillis,
		MemoryBytes: use.MemoryBytes, OpenedAt: a.by.Now,
	}
	s.SetAccelerators(use.AcceleratorIDs)
	return ledger.OpenSubject(ctx, tx, s)
}

// instance adds or updates the instance, with its event and audit row.
func (a adopter) instance(ctx context.Context, tx db.Tx, w *protocol.Workload,
	modes catalog.Resolved,
) (instance.Instance, error) {
	w, err := a.references(ctx, tx, w)
	if err != nil {
		return instance.Instance{}, err
	}
	i, made, err := instance.Adopt(ctx, tx, instance.Adopted{
		Workload: w, NodeID: a.b.NodeID, DisplayName: "recovered " + w.GetAppSlug(), OperationID: db.NewID(),
		By: principal.Actor{Type: principal.System},
		Modes: instance.Modes{
			OperatingMode: modes.OperatingMode, ControlPlaneScope: modes.ControlPlaneScope, RuntimeBackend: modes.RuntimeBackend,
			TenantBoundaryMode: modes.TenantBoundaryMode,
		},
	}, a.by.Now)
	if err != nil {
		return instance.Instance{}, err
	}
	data := map[string]any{
		"to": string(i.Lifecycle.Status), "requested_by": i.RequestedBy, "revision": i.Revision,
		"made": made,
	}
	return i, change.Record(ctx, tx, a.by, change.Entry{
		Event: "apps.instance.adopted", Action: actionAdopt, ResourceType: resourceInstance, ResourceID: i.ID,
		Version: i.ResourceVersion, OrgID: i.OrgID, ProjectID: i.ProjectID, Data: data, After: data,
	})
}

// superseded releases an allocation whose accelerator belongs to a newer one: it was released after the backup. An
// allocation with live instances stays.
func (a adopter) superseded(ctx context.Context, tx db.Tx, c plan.RecordedClaim) error {
	if err := capacity.EndClaim(ctx, tx, a.b.NodeID, c, a.by.Now); err != nil {
		return err
	}
	before, err := capacity.GetAny(ctx, tx, c.AllocationID)
	if err != nil || before.Status != capacity.Active {
		return err
	}
	live, err := instance.LiveInAllocation(ctx, tx, before.ID)
	if err != nil {
		return err
	}
	if len(live) == 0 {
		if _, err := change.ReleaseAllocation(ctx, tx, a.by, before, 0); err != nil {
			return err
		}
	}
	return a.addFinding(ctx, tx, finding.Released, resourceAllocation, before.ID, "Its accelerator %s, or the GPU of "+
		"that, belongs to a newer allocation; this one was given back after the backup.", c.AcceleratorID)
}

func (a adopter) lease(ctx context.Context, tx db.Tx, l *protocol.Lease) error {
	_, uncovered, err := ledger.AdoptLease(ctx, tx, a.b.NodeID, l, a.by.Now)
	if err != nil || !uncovered {
		return err
	}
	return a.addFinding(ctx, tx, finding.Lease, "lease", l.GetMemberId(), "Lease %d was given after the backup and "+
		"the wallet does not cover it any more; grant credit.", l.GetLeaseNo())
}
