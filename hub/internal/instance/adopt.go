package instance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// versionLeap raises the resource version of adopted instances above any that a client has seen before the restore: a
// client drops lower versions.
const versionLeap = 1000

// RecordedOn returns the rows of the node's members, for plan.Adopt: those that are not gone, and the named ones. What
// external workers operate is in no state of a node.
func RecordedOn(ctx context.Context, tx db.Tx, nodeID string, named []string) ([]plan.RecordedMember, error) {
	named = slices.DeleteFunc(slices.Clone(named), func(id string) bool { return !db.IsID(id) })
	var (
		m      plan.RecordedMember
		status lifecycle.Status
		out    []plan.RecordedMember
	)
	err := db.ForEach(ctx, tx, []any{&m.ID, &m.AllocationID, &m.Revision, &status, &m.Gone}, func() {
		m.Desired, m.Stopped = status.Desired()
		out = append(out, m)
	}, `SELECT m.id, m.allocation_id, i.revision, i.status, m.removed_at IS NOT NULL
		FROM instance_members m JOIN app_instances i ON i.id = m.instance_id WHERE m.id IN (
			SELECT l.id FROM instance_members l WHERE l.node_id = $1 AND l.removed_at IS NULL
				AND NOT l.external
			UNION ALL SELECT g.id FROM instance_members g WHERE g.id = ANY($2::UUID[]) AND g.node_id = $1) ORDER BY m.id`,
		nodeID, named)
	return out, err
}

// Adopted is a member as its signed document describes it.
type Adopted struct {
	Workload *protocol.Workload
	NodeID   string
	// Modes and DisplayName are those of an instance that the rows do not know.
	Modes       Modes
	DisplayName string
	OperationID string
	By          principal.Actor
}

// Adopt adds or updates the instance of a member that the rows of a restored hub lack, or know only in an older
// revision. Its status is one from which the node's next report continues.
func Adopt(ctx context.Context, tx db.Tx, a Adopted, now time.Time) (i Instance, made bool, err error) {
	w := a.Workload
	list, err := selectInstances(ctx, tx, `WHERE i.id = $1`, w.GetInstanceId())
	if err != nil {
		return Instance{}, false, err
	}
	ctx = telemetry.Continue(ctx, w.GetTraceparent())
	made = len(list) == 0
	if made {
		i = Instance{
			ID: w.GetInstanceId(), OrgID: w.GetOrgId(), OrgSlug: w.GetOrgSlug(), ProjectID: w.GetProjectId(),
			AppSlug: w.GetAppSlug(), DisplayName: a.DisplayName,
			Lifecycle: lifecycle.Adopted(w), Modes: a.Modes, Revision: int64(w.GetRevision()),
			PlacementAllocationIDs: []string{w.GetAllocationId()},
			RequestedBy:            a.By, CorrelationID: w.GetCorrelationId(), ResourceVersion: versionLeap, CreatedAt: now,
			UpdatedAt: now,
		}
		err = insertInstance(ctx, tx, i)
	} else {
		i = list[0]
		i.Lifecycle, i.UpdatedAt = lifecycle.Adopted(w), now
		i.Revision = max(i.Revision, int64(w.GetRevision()))
		i.ResourceVersion += versionLeap
		err = errors.Join(addLive(ctx, tx, i), updateInstance(ctx, tx, i))
	}
	if err != nil {
		return Instance{}, made, err
	}
	if err := adoptRevisions(ctx, tx, i, w, now); err != nil {
		return Instance{}, made, err
	}
	if err := supersede(ctx, tx, i.ID, i.Revision, now); err != nil {
		return Instance{}, made, err
	}
	if err := endOperations(ctx, tx, i.ID, operationAbandoned, 0, now); err != nil {
		return Instance{}, made, err
	}
	req := Request{OperationID: a.OperationID, By: a.By, CorrelationID: w.GetCorrelationId()}
	if err := insertOperation(ctx, tx, i, operationDeploy, req, now); err != nil {
		return Instance{}, made, err
	}
	member := Member{
		ID: w.GetId(), InstanceID: i.ID, AllocationID: w.GetAllocationId(), NodeID: a.NodeID, Role: RoleNode,
		Member: lifecycle.Member{Status: protocol.WorkloadStatus_PENDING},
	}
	if err := insertMember(ctx, tx, member, now); err != nil {
		return Instance{}, made, err
	}
	i, err = Get(ctx, tx, i.ProjectID, i.ID)
	return i, made, err
}

// adoptRevisions inserts the document's revision and that of its fallback, so that the same document is compiled again.
func adoptRevisions(ctx context.Context, tx db.Tx, i Instance, w *protocol.Workload, now time.Time) error {
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return err
	}
	own, fallback := revisions.Adopted(w, now)
	if back := w.GetFallback(); back != nil {
		if fallback.No != 0 {
			if err := adoptRevision(ctx, tx, i.ID, fallback, back, now); err != nil {
				return err
			}
		}
		if err := adoptServices(ctx, tx, back); err != nil {
			return err
		}
	}
	if own.No != 0 {
		if err := adoptRevision(ctx, tx, i.ID, own, w, now); err != nil {
			return err
		}
	}
	return adoptServices(ctx, tx, w)
}

func adoptRevision(ctx context.Context, tx db.Tx, instanceID string, made Revision, w *protocol.Workload,
	now time.Time,
) error {
	// One that this release cannot read has launchable_oci's one service, as far as the choice goes.
	m, _ := manifest.Parse(w.GetManifest().GetPayload())
	n := NewRevision{
		AppVersion: w.GetAppVersion(), ParametersJSON: w.GetParametersJson(), Features: w.GetFeatures(),
		ConfigJSON:       configOf(w),
		Resources:        m.ChoiceOf(w.GetServices()),
		ReadinessTimeout: time.Duration(w.GetReadinessTimeoutSeconds()) * time.Second,
	}
	var err error
	if n.ManifestEnvelope, err = proto.Marshal(w.GetManifest()); err != nil {
		return fmt.Errorf("member %s: manifest: %w", w.GetId(), err)
	}
	if w.GetDelegation() != nil {
		if n.DelegationEnvelope, err = proto.Marshal(w.GetDelegation()); err != nil {
			return fmt.Errorf("member %s: delegation: %w", w.GetId(), err)
		}
	}
	if t := dbTime(w.GetFirstNamedAt()); !t.IsZero() {
		now = t
	}
	return insertRevision(ctx, tx, instanceID, made, n, w.GetCorrelationId(), now)
}

// configOf is the config that each service of a document has.
func configOf(w *protocol.Workload) string {
	for _, s := range w.GetServices() {
		if s.GetConfig() != nil {
			return s.GetConfig().GetJson()
		}
	}
	return "{}"
}

func adoptServices(ctx context.Context, tx db.Tx, w *protocol.Workload) error {
	known, err := db.Value[bool](ctx, tx,
		`SELECT EXISTS (SELECT 1 FROM member_revisions WHERE member_id = $1 AND revision = $2)`, w.GetId(),
		int64(w.GetRevision()))
	if err != nil || known {
		return err
	}
	return saveMemberRevision(ctx, tx, w.GetId(), int64(w.GetRevision()), w.GetServices())
}

// OfMember returns the instance of a member.
func OfMember(ctx context.Context, tx db.Tx, memberID string) (Instance, error) {
	list, err := selectInstances(ctx, tx, `WHERE i.id = (SELECT m.instance_id FROM instance_members m WHERE m.id = $1)`,
		memberID)
	if err == nil && len(list) == 0 {
		err = errNotFound()
	}
	if err != nil {
		return Instance{}, err
	}
	return list[0], nil
}

// RecordAlreadyAbsent is for a member that the node's accepted state does not name: the node has removed it or is doing
// so, and need not report it again. Earlier reports on it are forgotten, so that its absence from a report is proof.
func RecordAlreadyAbsent(ctx context.Context, tx db.Tx, memberID string, epoch, generation uint64,
	now time.Time,
) error {
	var id string
	err := tx.QueryRow(ctx,
		`UPDATE instance_members SET absent_epoch = $2, absent_generation = $3, observed_revision = 0, status = 'pending',
			updated_at = $4
		WHERE id = $1 AND removed_at IS NULL RETURNING instance_id`, memberID, int64(epoch), int64(generation), now).Scan(&id)
	if err != nil {
		if db.IsNoRows(err) {
			return nil
		}
		return err
	}
	tx.Changed(id)
	return tx.Queue(ctx, `UPDATE app_instances SET updated_at = $2 WHERE id = $1`, id, now)
}
