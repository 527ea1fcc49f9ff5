package instance

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

func insertInstance(ctx context.Context, tx db.Tx, i Instance) error {
	placement, err := json.Marshal(orEmpty(i.PlacementAllocationIDs))
	if err != nil {
		return err
	}
	hints, err := json.Marshal(orEmpty(i.HintResults))
	if err != nil {
		return err
	}
	if err := addLive(ctx, tx, i); err != nil {
		return err
	}
	return tx.Queue(ctx,
		`INSERT INTO app_instances (id, org_id, org_slug, project_id, app_slug, display_name, status, status_reason, health,
			operating_mode, control_plane_scope, runtime_backend, tenant_boundary_mode, revision, placement_allocation_ids,
			hint_results, requested_by_type, requested_by_id, correlation_id, resource_version, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22)`,
		i.ID, i.OrgID, i.OrgSlug, i.ProjectID, i.AppSlug, i.DisplayName, string(i.Lifecycle.Status),
		i.Lifecycle.Reason.Text(), string(i.Lifecycle.Health),
		i.Modes.OperatingMode, i.Modes.ControlPlaneScope, i.Modes.RuntimeBackend, i.Modes.TenantBoundaryMode, i.Revision,
		placement, hints,
		i.RequestedBy.Type, i.RequestedBy.ID, i.CorrelationID, i.ResourceVersion, i.CreatedAt, i.UpdatedAt)
}

// addLive has the instance counted by CountLive.
func addLive(ctx context.Context, tx db.Tx, i Instance) error {
	return tx.Queue(ctx, `INSERT INTO live_instances (org_id, instance_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		i.OrgID, i.ID)
}

func updateInstance(ctx context.Context, tx db.Tx, i Instance) error {
	tx.Changed(i.ID)
	if i.Lifecycle.Status.Ended() {
		if err := tx.Queue(ctx, `DELETE FROM live_instances WHERE org_id = $1 AND instance_id = $2`, i.OrgID,
			i.ID); err != nil {
			return err
		}
	}
	return tx.Queue(ctx,
		`UPDATE app_instances SET status = $2, status_reason = $3, health = $4, revision = $5, correlation_id = $6,
			resource_version = $7, updated_at = $8, activated_at = $9, display_name = $10,
			history_deleted = false WHERE id = $1`,
		i.ID, string(i.Lifecycle.Status), i.Lifecycle.Reason.Text(), string(i.Lifecycle.Health), i.Revision, i.CorrelationID,
		i.ResourceVersion, i.UpdatedAt, zeronull.Timestamptz(i.ActivatedAt), i.DisplayName)
}

func insertRevision(ctx context.Context, tx db.Tx, instanceID string, made Revision, r NewRevision,
	correlationID string, now time.Time,
) error {
	features, err := json.Marshal(orEmpty(r.Features))
	if err != nil {
		return err
	}
	resources, err := json.Marshal(r.Resources)
	if err != nil {
		return err
	}
	return tx.Queue(ctx,
		`INSERT INTO instance_revisions (instance_id, revision, app_version, parameters, config, manifest_envelope,
			delegation_envelope, features, readiness_timeout_ms, correlation_id, created_at, previous_revision,
			fallback_revision, ready_at, resources, rolls_back, traceparent)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)`,
		instanceID, made.No, r.AppVersion, r.ParametersJSON, r.ConfigJSON, r.ManifestEnvelope,
		orEmpty(r.DelegationEnvelope), features, r.ReadinessTimeout.Milliseconds(),
		correlationID, now, made.Previous, made.Fallback, zeronull.Timestamptz(made.ReadyAt), resources, made.RollsBack,
		telemetry.Traceparent(ctx))
}

// copyRevision makes a revision with the content of an earlier one, for all members, under the current delegation.
func copyRevision(ctx context.Context, tx db.Tx, i Instance, from int64, made Revision, delegation []byte,
	correlationID string, now time.Time,
) error {
	if _, err := tx.Exec(ctx,
		`INSERT INTO instance_revisions (instance_id, revision, app_version, parameters, config, manifest_envelope,
			delegation_envelope, features, readiness_timeout_ms, correlation_id, created_at, previous_revision,
			fallback_revision, rolls_back, ready_at, resources, traceparent)
		SELECT instance_id, $3, app_version, parameters, config, manifest_envelope, $9,
			features, readiness_timeout_ms, $4, $5, $6, $7, $10, $8, resources, $11
		FROM instance_revisions WHERE instance_id = $1 AND revision = $2`,
		i.ID, from, made.No, correlationID, now, made.Previous, made.Fallback, zeronull.Timestamptz(made.ReadyAt),
		orEmpty(delegation), made.RollsBack, telemetry.Traceparent(ctx)); err != nil {
		return err
	}
	ids := make([]string, 0, len(i.Members))
	for _, m := range i.Members {
		ids = append(ids, m.ID)
	}
	_, err := tx.Exec(ctx, `INSERT INTO member_revisions (member_id, revision, services)
		SELECT member_id, $3, services FROM member_revisions WHERE member_id = ANY($1::UUID[]) AND revision = $2`, ids, from,
		made.No)
	return err
}

// updateConfig replaces the config of a revision, and in what its members run.
func updateConfig(ctx context.Context, tx db.Tx, i Instance) error {
	for _, m := range i.Members {
		if m.Gone || m.External {
			continue
		}
		services, err := Services(ctx, tx, m.ID, i.Revision)
		if err != nil {
			return err
		}
		for _, s := range services {
			if s.GetConfig() != nil {
				s.Config.Json = i.ConfigJSON
			}
		}
		if err := saveMemberRevision(ctx, tx, m.ID, i.Revision, services); err != nil {
			return err
		}
	}
	return tx.Queue(ctx, `UPDATE instance_revisions SET config = $3 WHERE instance_id = $1 AND revision = $2`, i.ID,
		i.Revision, i.ConfigJSON)
}

// updateDelegation replaces the delegation of a revision with a newer one of the same publisher.
func updateDelegation(ctx context.Context, tx db.Tx, instanceID string, revision int64, delegation []byte) error {
	return tx.Queue(ctx, `UPDATE instance_revisions SET delegation_envelope = $3 WHERE instance_id = $1 AND revision = $2`,
		instanceID, revision, orEmpty(delegation))
}

// selectRevisions returns all revisions of an instance in the order of their numbers.
func selectRevisions(ctx context.Context, tx db.Tx, instanceID string) (lifecycle.Revisions, error) {
	return db.Select(ctx, tx, func(row pgx.CollectableRow) (r Revision, err error) {
		err = row.Scan(&r.No, &r.AppVersion, &r.Previous, &r.Fallback, (*zeronull.Timestamptz)(&r.ReadyAt))
		return r, err
	}, `SELECT revision, app_version, previous_revision, fallback_revision, ready_at
		FROM instance_revisions WHERE instance_id = $1 ORDER BY revision`, instanceID)
}

func markReady(ctx context.Context, tx db.Tx, instanceID string, revision int64, now time.Time) error {
	return tx.Queue(ctx,
		`UPDATE instance_revisions SET ready_at = $3 WHERE instance_id = $1 AND revision = $2 AND ready_at IS NULL`,
		instanceID, revision, now)
}

// insertMember leaves an existing member as it is: a restored hub may adopt it again.
func insertMember(ctx context.Context, tx db.Tx, m Member, now time.Time) error {
	return tx.Queue(ctx,
		`INSERT INTO instance_members (id, instance_id, allocation_id, node_id, role, status, status_reason, detail,
			observed_revision, unreachable, endpoints, restarts, exit_code, created_at, updated_at, external)
		VALUES ($1, $2, $3, $4, $5, $6, '', '', 0, $7, '[]', 0, 0, $8, $8, $9) ON CONFLICT (id) DO NOTHING`,
		m.ID, m.InstanceID, m.AllocationID, m.NodeID, m.Role, m.Status.Text(), m.Unreachable, now, m.External)
}

func saveMemberRevision(ctx context.Context, tx db.Tx, memberID string, revision int64,
	services []*protocol.Service,
) error {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(&protocol.Workload{Services: services})
	if err != nil {
		return fmt.Errorf("member %s: services: %w", memberID, err)
	}
	return tx.Queue(ctx, `INSERT INTO member_revisions (member_id, revision, services) VALUES ($1, $2, $3)
		ON CONFLICT (member_id, revision) DO UPDATE SET services = excluded.services`, memberID, revision, data)
}

// Services returns what a member is to run at a revision.
func Services(ctx context.Context, tx db.Tx, memberID string, revision int64) ([]*protocol.Service, error) {
	var data []byte
	if err := tx.QueryRow(ctx, `SELECT services FROM member_revisions WHERE member_id = $1 AND revision = $2`, memberID,
		revision).Scan(&data); err != nil {
		return nil, fmt.Errorf("member %s: services of revision %d: %w", memberID, revision, err)
	}
	return decodeServices(memberID, data)
}

// ParametersOf returns the parameters of a revision.
func ParametersOf(ctx context.Context, tx db.Tx, instanceID string, revision int64) (parameters string, err error) {
	err = tx.QueryRow(ctx, `SELECT parameters FROM instance_revisions WHERE instance_id = $1 AND revision = $2`,
		instanceID, revision).Scan(&parameters)
	return parameters, err
}

func decodeServices(memberID string, data []byte) ([]*protocol.Service, error) {
	w := &protocol.Workload{}
	if err := proto.Unmarshal(data, w); err != nil {
		return nil, fmt.Errorf("member %s: services: %w", memberID, err)
	}
	return w.GetServices(), nil
}

func updateMember(ctx context.Context, tx db.Tx, m Member, removal *Removal, now time.Time) error {
	endpoints, endpointsErr := json.Marshal(orEmpty(m.Endpoints))
	services, err := json.Marshal(orEmpty(m.Services))
	if err := errors.Join(endpointsErr, err); err != nil {
		return err
	}
	var proof []byte
	if removal != nil && removal.Proof != nil {
		if proof, err = proto.Marshal(removal.Proof); err != nil {
			return err
		}
	}
	return tx.Queue(ctx,
		`UPDATE instance_members SET status = $2, status_reason = $3, detail = $4, observed_revision = $5, unreachable = $6,
			endpoints = $7, restarts = $8, exit_code = $9, started_at = $10, ready_at = $11, exited_at = $12,
			removal_proof = $13, removed_at = $14, updated_at = $15, fallback_from_revision = $16,
			observed_incarnation = $17, owner_refusal = $18, failing_since = $19, failure_confirmed = $20,
			config_sha256 = $21, services = $22, heartbeat_at = $23 WHERE id = $1`,
		m.ID, m.Status.Text(), m.Reason.Text(), m.Detail, m.ObservedRevision, m.Unreachable,
		endpoints, m.Restarts, m.ExitCode, zeronull.Timestamptz(m.StartedAt), zeronull.Timestamptz(m.ReadyAt),
		zeronull.Timestamptz(m.ExitedAt), proof, zeronull.Timestamptz(m.RemovedAt), now, m.FallbackFrom,
		m.ObservedIncarnation, m.OwnerRefusal, zeronull.Timestamptz(m.FailingSince), m.FailureConfirmed, m.ConfigSHA256,
		services, zeronull.Timestamptz(m.HeartbeatAt))
}

func updateReachable(ctx context.Context, tx db.Tx, nodeID string, reachable bool, now time.Time) ([]string, error) {
	return db.CollectColumn[string](tx.Query(ctx, `UPDATE instance_members SET unreachable = $2, updated_at = $3
		WHERE node_id = $1 AND removed_at IS NULL AND NOT external AND unreachable <> $2 RETURNING instance_id`,
		nodeID, !reachable, now))
}

// newestReport is the newest report of a node; zero before the first. The row stays locked.
func newestReport(ctx context.Context, tx db.Tx, nodeID string) (n lifecycle.ReportNo, err error) {
	err = db.ForEach(ctx, tx, []any{&n.Session, &n.Counter}, func() {},
		`SELECT session_no, counter FROM instance_reports WHERE node_id = $1 FOR UPDATE`, nodeID)
	return n, err
}

// advanceReport reports whether r is newer than every report before, and records it if so. Two first reports of a node
// are kept apart by the row of its session, which package fleet updates before.
func advanceReport(ctx context.Context, tx db.Tx, r Report, now time.Time) (bool, error) {
	newest, err := newestReport(ctx, tx, r.NodeID)
	if err != nil || !r.no().Follows(newest) {
		return false, err
	}
	return true, tx.Queue(ctx, `INSERT INTO instance_reports (node_id, session_no, counter, reported_at)
		VALUES ($1, $2, $3, $4) ON CONFLICT (node_id) DO UPDATE SET session_no = excluded.session_no,
			counter = excluded.counter, reported_at = excluded.reported_at`,
		r.NodeID, int64(r.SessionNo), int64(r.Counter), now)
}

// MemberCounts returns how many members of each node are not gone; a node without such members is left out.
func MemberCounts(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]int, error) {
	return db.CollectMap[string, int](tx.Query(ctx,
		`SELECT node_id, count(*) FROM instance_members WHERE node_id = ANY($1::uuid[]) AND removed_at IS NULL
			GROUP BY node_id`, nodeIDs))
}

// IsDown reports whether a member is not to run: its instance is stopped, failed or ending. An unknown member is not
// down.
func IsDown(ctx context.Context, tx db.Tx, memberID string) (bool, error) {
	var status lifecycle.Status
	err := tx.QueryRow(ctx,
		`SELECT i.status FROM instance_members m JOIN app_instances i ON i.id = m.instance_id WHERE m.id = $1`,
		memberID).Scan(&status)
	if db.IsNoRows(err) {
		return false, nil
	}
	present, stopped := status.Desired()
	return !present || stopped, err
}

const memberColumns = `m.id, m.instance_id, m.allocation_id, m.node_id, m.role, m.status, m.status_reason, m.detail,
	m.observed_revision,
	m.unreachable, m.endpoints, m.restarts, m.exit_code, m.started_at, m.ready_at, m.exited_at, m.removed_at,
	m.fallback_from_revision,
	m.observed_incarnation, m.owner_refusal, m.failing_since, m.failure_confirmed, m.config_sha256, m.services,
	m.external, m.heartbeat_at`

// scanMember reads memberColumns and the columns that the query selects after them.
func scanMember(row pgx.CollectableRow, m *Member, more ...any) error {
	var endpoints, services []byte
	into := append([]any{
		&m.ID, &m.InstanceID, &m.AllocationID, &m.NodeID, &m.Role,
		textColumn{&m.Status},
		textColumn{&m.Reason},
		&m.Detail,
		&m.ObservedRevision, &m.Unreachable, &endpoints, &m.Restarts, &m.ExitCode,
		(*zeronull.Timestamptz)(&m.StartedAt), (*zeronull.Timestamptz)(&m.ReadyAt), (*zeronull.Timestamptz)(&m.ExitedAt),
		(*zeronull.Timestamptz)(&m.RemovedAt), &m.FallbackFrom, &m.ObservedIncarnation, &m.OwnerRefusal,
		(*zeronull.Timestamptz)(&m.FailingSince), &m.FailureConfirmed, &m.ConfigSHA256, &services, &m.External,
		(*zeronull.Timestamptz)(&m.HeartbeatAt),
	}, more...)
	if err := row.Scan(into...); err != nil {
		return err
	}
	m.Gone = !m.RemovedAt.IsZero()
	if err := errors.Join(json.Unmarshal(endpoints, &m.Endpoints), json.Unmarshal(services, &m.Services)); err != nil {
		return fmt.Errorf("member %s: endpoints and services: %w", m.ID, err)
	}
	if len(m.Endpoints) == 0 {
		m.Endpoints = nil
	}
	if len(m.Services) == 0 {
		m.Services = nil
	}
	return nil
}

// selectMembersOf returns the members of a node that are not gone: the named ones, or all where only is nil.
func selectMembersOf(ctx context.Context, tx db.Tx, nodeID string, only []string) ([]placedMember, error) {
	return db.Select(ctx, tx, func(row pgx.CollectableRow) (h placedMember, err error) {
		err = scanMember(row, &h.Member, &h.desired, &h.stopping, &h.absentEpoch, &h.absentGeneration)
		return h, err
	}, `SELECT `+memberColumns+
		`, i.status <> 'decommissioning', i.status = 'stopping', coalesce(m.absent_epoch, 0),
			coalesce(m.absent_generation, 0)
		FROM instance_members m JOIN app_instances i ON i.id = m.instance_id
		WHERE m.node_id = $1 AND m.removed_at IS NULL AND ($2::UUID[] IS NULL OR m.id = ANY($2::UUID[])) ORDER BY m.id`,
		nodeID, only)
}

// selectInstances returns the instances of a condition with their members, in the order of their ids. Each instance has
// at least one member.
func selectInstances(ctx context.Context, tx db.Tx, where string, args ...any) ([]Instance, error) {
	rows, err := db.Select(ctx, tx, scanInstance, `SELECT `+memberColumns+
		`, i.id, i.org_id, i.org_slug, i.project_id, i.app_slug, i.display_name, i.status, i.status_reason, i.health,
			i.operating_mode, i.control_plane_scope, i.runtime_backend, i.tenant_boundary_mode, i.revision,
			i.placement_allocation_ids,
			i.hint_results, i.requested_by_type, i.requested_by_id, i.correlation_id, i.resource_version, i.created_at,
			i.updated_at, i.activated_at,
			r.app_version, r.parameters, r.config, r.resources,
			coalesce((SELECT p.app_version FROM instance_revisions p WHERE p.instance_id = i.id
			AND p.revision = r.previous_revision), ''),
			o.kind, o.requested_by_type, o.requested_by_id, o.correlation_id, o.traceparent
		FROM app_instances i
		JOIN instance_revisions r ON r.instance_id = i.id AND r.revision = i.revision
		JOIN instance_operations o ON o.id = (SELECT l.id FROM instance_operations l WHERE l.instance_id = i.id
		ORDER BY l.id DESC LIMIT 1)
		JOIN instance_members m ON m.instance_id = i.id `+where+` ORDER BY i.id, m.id`, args...)
	var list []Instance
	for _, i := range rows {
		if n := len(list); n > 0 && list[n-1].ID == i.ID {
			list[n-1].Members = append(list[n-1].Members, i.Members...)
		} else {
			list = append(list, i)
		}
	}
	return list, err
}

// scanInstance reads an instance with one of its members.
func scanInstance(row pgx.CollectableRow) (Instance, error) {
	var (
		i                           Instance
		m                           Member
		placement, hints, resources []byte
	)
	if err := scanMember(row, &m, &i.ID, &i.OrgID, &i.OrgSlug, &i.ProjectID, &i.AppSlug, &i.DisplayName,
		&i.Lifecycle.Status, textColumn{&i.Lifecycle.Reason}, &i.Lifecycle.Health,
		&i.Modes.OperatingMode, &i.Modes.ControlPlaneScope, &i.Modes.RuntimeBackend, &i.Modes.TenantBoundaryMode, &i.Revision,
		&placement,
		&hints, &i.RequestedBy.Type, &i.RequestedBy.ID, &i.CorrelationID, &i.ResourceVersion, &i.CreatedAt, &i.UpdatedAt,
		(*zeronull.Timestamptz)(&i.ActivatedAt),
		&i.Version, &i.ParametersJSON, &i.ConfigJSON, &resources, &i.PreviousVersion,
		&i.Operation.Kind, &i.Operation.By.Type, &i.Operation.By.ID, &i.Operation.CorrelationID,
		&i.Operation.Traceparent); err != nil {
		return Instance{}, err
	}
	i.Members = []Member{m}
	if err := json.Unmarshal(placement, &i.PlacementAllocationIDs); err != nil {
		return Instance{}, fmt.Errorf("instance %s: placement: %w", i.ID, err)
	}
	if err := json.Unmarshal(resources, &i.Resources); err != nil {
		return Instance{}, fmt.Errorf("instance %s: resources: %w", i.ID, err)
	}
	if err := json.Unmarshal(hints, &i.HintResults); err != nil {
		return Instance{}, fmt.Errorf("instance %s: hints: %w", i.ID, err)
	}
	return i, nil
}

// selectDesired returns the members of a condition that nodes are to run.
func selectDesired(ctx context.Context, tx db.Tx, where, id string) ([]plan.Member, error) {
	const revision = `%[1]s.app_version, %[1]s.revision, %[1]s.correlation_id, %[1]s.traceparent, %[1]s.manifest_envelope,
		%[1]s.delegation_envelope, %[1]s.parameters,
		%[1]s.features, %[1]s.readiness_timeout_ms, %[1]s.created_at, %[1]s.rolls_back, %[2]s.services`
	return db.Select(ctx, tx, scanDesired,
		`SELECT m.id, m.instance_id, m.allocation_id, i.org_id, i.org_slug, i.project_id, i.app_slug, i.status,
			i.operating_mode, i.control_plane_scope, i.runtime_backend,
			`+fmt.Sprintf(revision, "r", "s")+`, `+fmt.Sprintf(revision, "f", "fs")+`
		FROM instance_members m
		JOIN app_instances i ON i.id = m.instance_id
		JOIN instance_revisions r ON r.instance_id = i.id AND r.revision = i.revision
		JOIN member_revisions s ON s.member_id = m.id AND s.revision = i.revision
		LEFT JOIN instance_revisions f ON f.instance_id = i.id AND f.revision = r.fallback_revision
			AND (i.status = 'upgrading' OR i.status = 'rolling_back' AND r.rolls_back)
		LEFT JOIN member_revisions fs ON fs.member_id = m.id AND fs.revision = f.revision
		WHERE `+where+` AND m.removed_at IS NULL AND i.status NOT IN ('decommissioning', 'decommissioned')
		ORDER BY m.id`, id)
}

// content receives the columns of one revision; all nil where there is none.
type content struct {
	version, correlationID, parameters       *string
	traceparent                              *string
	manifest, delegation, features, services []byte
	revision, timeoutMillis                  *int64
	createdAt                                *time.Time
	rollsBack                                *bool
}

func (c *content) into() []any {
	return []any{
		&c.version, &c.revision, &c.correlationID, &c.traceparent, &c.manifest, &c.delegation, &c.parameters, &c.features,
		&c.timeoutMillis, &c.createdAt, &c.rollsBack, &c.services,
	}
}

func (c *content) fill(m *plan.Member) (err error) {
	m.AppVersion, m.CorrelationID, m.ParametersJSON = *c.version, *c.correlationID, *c.parameters
	m.ManifestEnvelope, m.DelegationEnvelope, m.NamedAt = c.manifest, c.delegation, c.createdAt.UTC()
	m.RollsBack, m.Traceparent = *c.rollsBack, *c.traceparent
	m.Revision, m.ReadinessTimeout = uint64(*c.revision), time.Duration(*c.timeoutMillis)*time.Millisecond
	if err := json.Unmarshal(c.features, &m.Features); err != nil {
		return fmt.Errorf("member %s: features: %w", m.ID, err)
	}
	m.Services, err = decodeServices(m.ID, c.services)
	return err
}

func scanDesired(row pgx.CollectableRow) (plan.Member, error) {
	var (
		m              plan.Member
		status         lifecycle.Status
		main, fallback content
	)
	into := append([]any{
		&m.ID, &m.InstanceID, &m.AllocationID, &m.OrgID, &m.OrgSlug, &m.ProjectID, &m.AppSlug, &status,
		&m.OperatingMode, &m.ControlPlaneScope, &m.RuntimeBackend,
	}, main.into()...)
	if err := row.Scan(append(into, fallback.into()...)...); err != nil {
		return plan.Member{}, err
	}
	_, m.Stopped = status.Desired()
	if fallback.services != nil {
		back := m
		if err := fallback.fill(&back); err != nil {
			return plan.Member{}, err
		}
		m.Fallback = &back
	}
	return m, main.fill(&m)
}

// textColumn scans a text column into a value that reads itself from text.
type textColumn struct{ encoding.TextUnmarshaler }

// Scan implements sql.Scanner.
func (c textColumn) Scan(src any) error {
	text, ok := src.(string)
	if !ok {
		return fmt.Errorf("a column of text holds a %T", src)
	}
	return c.UnmarshalText([]byte(text))
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// dbTime truncates a node's time to the precision of the database, so that a stored value compares equal.
func dbTime(t *timestamppb.Timestamp) time.Time {
	if t == nil || !t.IsValid() {
		return time.Time{}
	}
	return t.AsTime().Truncate(time.Microsecond)
}

// truncate shortens a node's text and makes it valid for the database: UTF-8 without NUL.
func truncate(s string, maxBytes int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) <= maxBytes {
		return s
	}
	s = s[:maxBytes]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s
}
