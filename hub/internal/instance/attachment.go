package instance

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// TenantShared is the tenant boundary of an instance that other projects of its org may be attached to.
const TenantShared = "tenant_shared"

// Attachment lets a project use an instance of another project of its org.
type Attachment struct {
	ID             string
	InstanceID     string
	OrgID          string
	OwnerProjectID string
	// ProjectID is the attached project.
	ProjectID     string
	RequestedBy   principal.Actor
	CorrelationID string
	CreatedAt     time.Time
}

// AttachedInstance is an attachment with its instance.
type AttachedInstance struct {
	Attachment
	Instance Instance
}

// OfOrg returns an instance of any project of the org.
func OfOrg(ctx context.Context, tx db.Tx, orgID, id string) (Instance, error) {
	return selectOne(ctx, tx, `WHERE i.org_id = $1 AND i.id = $2`, orgID, id)
}

// OfAttached returns an instance that the project is attached to.
func OfAttached(ctx context.Context, tx db.Tx, projectID, id string) (Instance, error) {
	return selectOne(ctx, tx, `WHERE i.id = (SELECT a.instance_id FROM instance_attachments a
		WHERE a.project_id = $1 AND a.instance_id = $2)`, projectID, id)
}

// Attach attaches a project to an instance that its owner shares with the org.
func Attach(ctx context.Context, tx db.Tx, i Instance, a Attachment) (AttachedInstance, error) {
	present, _ := i.Lifecycle.Status.Desired()
	switch {
	case i.ProjectID == a.ProjectID:
		return AttachedInstance{}, fault.New(fault.Conflict, codeAttachmentExists, "The app instance is this project's own.",
			nil).Permanent()
	case i.Modes.TenantBoundaryMode != TenantShared || !present || !i.hasMembers():
		return AttachedInstance{}, fault.New(fault.Conflict, codeNotShared, "The app instance is not shared with other "+
			"projects of its org, ends or has no members; its tenant_boundary_mode must be tenant_shared.", nil).Permanent()
	}
	a.InstanceID, a.OrgID, a.OwnerProjectID = i.ID, i.OrgID, i.ProjectID
	tag, err := tx.Exec(ctx, `INSERT INTO instance_attachments (id, instance_id, org_id, owner_project_id, project_id,
			requested_by_type, requested_by_id, correlation_id, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
		ON CONFLICT (instance_id, project_id) DO NOTHING`, a.ID, a.InstanceID, a.OrgID, a.OwnerProjectID, a.ProjectID,
		a.RequestedBy.Type, a.RequestedBy.ID, a.CorrelationID, a.CreatedAt)
	if err == nil && tag.RowsAffected() == 0 {
		err = fault.New(fault.Conflict, codeAttachmentExists, "The project is attached to the app instance already.",
			nil).Permanent()
	}
	if err != nil {
		return AttachedInstance{}, err
	}
	i, err = touch(ctx, tx, i, a.CreatedAt)
	return AttachedInstance{a, i}, err
}

// Detach ends an attachment.
func Detach(ctx context.Context, tx db.Tx, a AttachedInstance, now time.Time) (AttachedInstance, error) {
	if err := deleteAttachment(ctx, tx, a.ID); err != nil {
		return a, err
	}
	i, err := touch(ctx, tx, a.Instance, now)
	return AttachedInstance{a.Attachment, i}, err
}

// DetachAll ends the attachments of an instance that ends, and returns them.
func DetachAll(ctx context.Context, tx db.Tx, instanceID string) ([]Attachment, error) {
	all, err := selectAttachments(ctx, tx, `WHERE instance_id = $1 ORDER BY id`, instanceID)
	for _, a := range all {
		if err := deleteAttachment(ctx, tx, a.ID); err != nil {
			return nil, err
		}
	}
	return all, err
}

func deleteAttachment(ctx context.Context, tx db.Tx, id string) error {
	return tx.Queue(ctx, `DELETE FROM instance_attachments WHERE id = $1`, id)
}

// CheckDetached refuses the end of an instance that other projects use.
func CheckDetached(ctx context.Context, tx db.Tx, instanceID string) error {
	n, err := db.Value[int](ctx, tx, `SELECT count(*) FROM instance_attachments WHERE instance_id = $1`, instanceID)
	if err == nil && n > 0 {
		err = fault.New(fault.Conflict, codeAttached, "Other projects are attached to the app instance; detach them first.",
			nil)
	}
	return err
}

// GetAttachment returns an attachment of the instance for one of its two projects; for others it is not found.
func GetAttachment(ctx context.Context, tx db.Tx, projectID, instanceID, id string) (AttachedInstance, error) {
	if !db.IsID(instanceID) || !db.IsID(id) {
		return AttachedInstance{}, errNoAttachment()
	}
	return oneAttached(ctx, tx, `WHERE id = $1 AND instance_id = $2 AND $3 IN (owner_project_id, project_id)`, id,
		instanceID, projectID)
}

// GetAnyAttachment returns an attachment of any project; commands on behalf of a principal use GetAttachment.
func GetAnyAttachment(ctx context.Context, tx db.Tx, id string) (AttachedInstance, error) {
	return oneAttached(ctx, tx, `WHERE id = $1`, id)
}

func oneAttached(ctx context.Context, tx db.Tx, where string, args ...any) (AttachedInstance, error) {
	list, err := withInstances(ctx, tx)(selectAttachments(ctx, tx, where, args...))
	if err == nil && len(list) == 0 {
		err = errNoAttachment()
	}
	if err != nil {
		return AttachedInstance{}, err
	}
	return list[0], nil
}

// AttachmentFilter selects a page of attachments, oldest first.
type AttachmentFilter struct {
	// ProjectID is the attached project, or with an InstanceID also the owner's.
	ProjectID, InstanceID string
	Page                  db.Page
}

// ListAttachments returns a page of attachments.
func ListAttachments(ctx context.Context, tx db.Tx, f AttachmentFilter) ([]AttachedInstance, error) {
	var w db.Where
	project := w.Arg(f.ProjectID)
	if f.InstanceID == "" {
		w.And("project_id = " + project)
	} else {
		w.And(project + " IN (owner_project_id, project_id)")
		w.Compare("instance_id =", f.InstanceID)
	}
	w.Compare("id >", f.Page.After)
	oldest := " ORDER BY id LIMIT " + w.Arg(f.Page.Limit)
	return withInstances(ctx, tx)(selectAttachments(ctx, tx, w.SQL()+oldest, w.Args...))
}

func selectAttachments(ctx context.Context, tx db.Tx, where string, args ...any) ([]Attachment, error) {
	return db.Select(ctx, tx, func(row pgx.CollectableRow) (a Attachment, err error) {
		err = row.Scan(&a.ID, &a.InstanceID, &a.OrgID, &a.OwnerProjectID, &a.ProjectID, &a.RequestedBy.Type,
			&a.RequestedBy.ID, &a.CorrelationID, &a.CreatedAt)
		return a, err
	}, `SELECT id, instance_id, org_id, owner_project_id, project_id, requested_by_type, requested_by_id, correlation_id,
			created_at FROM instance_attachments `+where, args...)
}

// withInstances adds their instances to attachments.
func withInstances(ctx context.Context, tx db.Tx) func([]Attachment, error) ([]AttachedInstance, error) {
	return func(attachments []Attachment, err error) ([]AttachedInstance, error) {
		if err != nil || len(attachments) == 0 {
			return nil, err
		}
		ids := make([]string, len(attachments))
		for n, a := range attachments {
			ids[n] = a.InstanceID
		}
		instances, err := selectInstances(ctx, tx, `WHERE i.id = ANY($1::UUID[])`, ids)
		if err != nil {
			return nil, err
		}
		byID := map[string]Instance{}
		for _, i := range instances {
			byID[i.ID] = i
		}
		out := make([]AttachedInstance, len(attachments))
		for n, a := range attachments {
			out[n] = AttachedInstance{a, byID[a.InstanceID]}
		}
		return out, nil
	}
}

// touch gives an event of the instance its number, so that readers who wait for the instance wake.
func touch(ctx context.Context, tx db.Tx, i Instance, now time.Time) (Instance, error) {
	i.ResourceVersion++
	i.UpdatedAt = now
	return i, updateInstance(ctx, tx, i)
}

// Node is that of the first member that is there.
func (i Instance) Node() string {
	for _, m := range i.Members {
		if !m.Gone {
			return m.NodeID
		}
	}
	return i.Members[0].NodeID
}

// Ends reports whether a change begins or completes the end of the instance, or has lost its last member with its node.
func (c Change) Ends() bool {
	for _, s := range c.Steps {
		if s.To == lifecycle.Decommissioning || s.To == lifecycle.Decommissioned {
			return true
		}
	}
	return slices.ContainsFunc(c.Removed, func(r Removal) bool { return r.Lost }) && !c.Instance.hasMembers()
}

func (i Instance) hasMembers() bool {
	return slices.ContainsFunc(i.Members, func(m Member) bool { return !m.Gone })
}

func errNoAttachment() error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such attachment of this project.", nil)
}
