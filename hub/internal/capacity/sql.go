package capacity

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func insertAllocation(ctx context.Context, tx db.Tx, a Allocation) error {
	return tx.Queue(ctx,
		`INSERT INTO allocations (id, org_id, project_id, node_id, sku, capacity_shape, accelerator_count, accelerator_model,
			cpu_cores, memory_mib, status, requested_by_type, requested_by_id, correlation_id, resource_version, created_at,
			updated_at, activated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)`,
		a.ID, a.OrgID, a.ProjectID, a.NodeID, a.SKU, string(a.Shape), a.AcceleratorCount, a.AcceleratorModel,
		a.CPUCores, a.MemoryMiB, string(a.Status), a.RequestedBy.Type, a.RequestedBy.ID, a.CorrelationID, a.ResourceVersion,
		a.CreatedAt, a.UpdatedAt, a.ActivatedAt)
}

func updateAllocation(ctx context.Context, tx db.Tx, a Allocation) error {
	return tx.Queue(ctx,
		`UPDATE allocations SET status = $2, resource_version = $3, updated_at = $4, released_at = $5 WHERE id = $1`,
		a.ID, string(a.Status), a.ResourceVersion, a.UpdatedAt, db.OrNull(a.ReleasedAt))
}

// insertClaims relies on the unique index on active claims (law 14): a claim that placement overlooked fails here.
func insertClaims(ctx context.Context, tx db.Tx, a Allocation, acceleratorIDs []string, now time.Time) error {
	if len(acceleratorIDs) == 0 {
		return nil
	}
	tag, err := tx.Exec(ctx,
		`INSERT INTO claims (allocation_id, node_id, accelerator_id, claimed_at)
		SELECT $1::UUID, $2::UUID, x.id, $4::TIMESTAMPTZ FROM unnest($3::TEXT[]) AS x(id) ON CONFLICT DO NOTHING`,
		a.ID, a.NodeID, acceleratorIDs, now)
	if err == nil && tag.RowsAffected() != int64(len(acceleratorIDs)) {
		return fault.New(fault.Conflict, CodeInsufficient, "An accelerator was claimed by someone else just now; try again.",
			nil)
	}
	return err
}

func endClaims(ctx context.Context, tx db.Tx, allocationID string, now time.Time) error {
	return tx.Queue(ctx, `UPDATE claims SET released_at = $2 WHERE allocation_id = $1 AND released_at IS NULL`,
		allocationID, now)
}

func insertReservation(ctx context.Context, tx db.Tx, r Reservation, now time.Time) error {
	return tx.Queue(ctx,
		`INSERT INTO reservations (member_id, allocation_id, cpu_millis, memory_bytes, reserved_at)
			VALUES ($1, $2, $3, $4, $5)`,
		r.MemberID, r.AllocationID, r.Choice.Need.CPUMillis, r.Choice.Need.MemoryBytes, now)
}

func insertReservedAccelerators(ctx context.Context, tx db.Tx, r Reservation) error {
	ids := r.Choice.AcceleratorIDs
	if len(ids) == 0 {
		return nil
	}
	tag, err := tx.Exec(ctx,
		`INSERT INTO reserved_accelerators (member_id, allocation_id, node_id, accelerator_id)
		SELECT $1::UUID, $2::UUID, $3::UUID, x.id FROM unnest($4::TEXT[]) AS x(id) ON CONFLICT DO NOTHING`,
		r.MemberID, r.AllocationID, r.NodeID, ids)
	if err == nil && tag.RowsAffected() != int64(len(ids)) {
		return fault.New(fault.Conflict, CodeInsufficient, "An accelerator was taken by another instance just now; try "+
			"again.", nil)
	}
	return err
}

func endReservation(ctx context.Context, tx db.Tx, memberID string) (allocationID string, freed bool, err error) {
	err = tx.QueryRow(ctx, `DELETE FROM reservations WHERE member_id = $1 RETURNING allocation_id`, memberID).Scan(
		&allocationID)
	if db.IsNoRows(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	if err := tx.Queue(ctx, `DELETE FROM reserved_ports WHERE member_id = $1`, memberID); err != nil {
		return "", false, err
	}
	if err := tx.Queue(ctx, `DELETE FROM reserved_volumes WHERE member_id = $1`, memberID); err != nil {
		return "", false, err
	}
	_, err = tx.Exec(ctx, `DELETE FROM reserved_accelerators WHERE member_id = $1`, memberID)
	return allocationID, true, err
}

// endReservations ends all reservations in an allocation.
func endReservations(ctx context.Context, tx db.Tx, allocationID string) error {
	if _, err := tx.Exec(ctx, `DELETE FROM reservations WHERE allocation_id = $1 AND freed_at IS NULL`,
		allocationID); err != nil {
		return err
	}
	if err := tx.Queue(ctx, `DELETE FROM reserved_ports WHERE allocation_id = $1`, allocationID); err != nil {
		return err
	}
	if err := tx.Queue(ctx, `DELETE FROM reserved_volumes WHERE allocation_id = $1`, allocationID); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `DELETE FROM reserved_accelerators WHERE allocation_id = $1`, allocationID)
	return err
}

func heldReservations(ctx context.Context, tx db.Tx, allocationID string) (int, error) {
	return db.Value[int](ctx, tx, `SELECT count(*) FROM reservations WHERE allocation_id = $1 AND freed_at IS NULL`,
		allocationID)
}

// MemberCounts returns how many members have reservations on each node; a node without such members is left out.
func MemberCounts(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]int, error) {
	return db.CollectMap[string, int](tx.Query(ctx,
		`SELECT a.node_id, count(*) FROM allocations a JOIN reservations r ON r.allocation_id = a.id
			WHERE a.node_id = ANY($1::uuid[]) AND a.released_at IS NULL AND r.freed_at IS NULL GROUP BY a.node_id`, nodeIDs))
}

// selectAllocations reads allocations with the accelerators that they claim; a released one shows its last claims.
func selectAllocations(ctx context.Context, tx db.Tx, where string, args ...any) ([]Allocation, error) {
	return db.Select(ctx, tx, scanAllocation,
		`SELECT a.id, a.org_id, a.project_id, a.node_id, a.sku, a.capacity_shape, a.accelerator_count, a.accelerator_model,
			a.cpu_cores, a.memory_mib, a.status, a.requested_by_type, a.requested_by_id, a.correlation_id, a.resource_version,
			a.created_at, a.updated_at, a.activated_at, a.released_at,
			(SELECT coalesce(sum(r.cpu_millis), 0)::INT8 FROM reservations r WHERE r.allocation_id = a.id
			AND r.freed_at IS NULL),
			(SELECT coalesce(sum(r.memory_bytes), 0)::INT8 FROM reservations r WHERE r.allocation_id = a.id
			AND r.freed_at IS NULL),
			ARRAY(SELECT c.accelerator_id FROM claims c WHERE c.allocation_id = a.id AND (c.released_at IS NULL
			OR a.released_at IS NOT NULL) ORDER BY c.accelerator_id)
		FROM allocations a `+where, args...)
}

func scanAllocation(row pgx.CollectableRow) (Allocation, error) {
	var (
		a           Allocation
		cpu, memory int64
	)
	err := row.Scan(&a.ID, &a.OrgID, &a.ProjectID, &a.NodeID, &a.SKU, &a.Shape, &a.AcceleratorCount, &a.AcceleratorModel,
		&a.CPUCores, &a.MemoryMiB, &a.Status, &a.RequestedBy.Type, &a.RequestedBy.ID, &a.CorrelationID, &a.ResourceVersion,
		&a.CreatedAt, &a.UpdatedAt, (*zeronull.Timestamptz)(&a.ActivatedAt), (*zeronull.Timestamptz)(&a.ReleasedAt), &cpu,
		&memory, &a.AcceleratorIDs)
	a.FreeCPUMillis, a.FreeMemoryBytes = a.CPUCores*millisPerCore-cpu, a.MemoryMiB*mebibyte-memory
	return a, err
}

// held sums up the allocations on a node.
type held struct {
	// foreign is how many of the allocations, and of the volumes that stay without one, belong to other orgs.
	allocations, foreign int
	cores, memoryMiB     int64
}

func heldByNode(ctx context.Context, tx db.Tx, nodeIDs []string, orgID string) (map[string]held, error) {
	var (
		nodeID string
		h      held
	)
	out := map[string]held{}
	return out, db.ForEach(ctx, tx, []any{&nodeID, &h.allocations, &h.foreign, &h.cores, &h.memoryMiB},
		func() { out[nodeID] = h },
		`SELECT node_id, sum(held)::INT8, count(*) FILTER (WHERE org_id <> $2), sum(cores)::INT8, sum(memory)::INT8
		FROM (SELECT node_id, org_id, 1 AS held, cpu_cores AS cores, memory_mib AS memory FROM allocations
				WHERE node_id = ANY($1) AND released_at IS NULL
			UNION ALL SELECT node_id, org_id, 0, 0, 0 FROM volumes WHERE node_id = ANY($1) AND deleted_at IS NULL) AS h
		GROUP BY node_id`, nodeIDs, orgID)
}

// selectAccelerators returns the accelerators of nodes, by node and id, with what detects a change.
func selectAccelerators(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]map[string]accelerator, error) {
	var (
		node   string
		a      accelerator
		digest []byte
	)
	out := map[string]map[string]accelerator{}
	return out, db.ForEach(ctx, tx, []any{&node, &a.ID, &a.Health, &a.PartOf, &a.cause, &digest}, func() {
		if out[node] == nil {
			out[node] = map[string]accelerator{}
		}
		a.digest = string(digest)
		out[node][a.ID] = a
	}, `SELECT node_id, id, health, part_of, coalesce(description->>'healthReason', ''), description_sha256
		FROM accelerators WHERE node_id = ANY($1::uuid[])`, nodeIDs)
}

// MembersWith returns the members that have an accelerator of a node.
func MembersWith(ctx context.Context, tx db.Tx, nodeID, acceleratorID string) (memberIDs []string, err error) {
	var id string
	return memberIDs, db.ForEach(ctx, tx, []any{&id}, func() { memberIDs = append(memberIDs, id) },
		`SELECT member_id FROM reserved_accelerators WHERE node_id = $1 AND accelerator_id = $2 AND freed_at IS NULL`,
		nodeID, acceleratorID)
}

func upsertAccelerator(ctx context.Context, tx db.Tx, nodeID string, a accelerator) error {
	description, err := protojson.Marshal(a.description)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx,
		`INSERT INTO accelerators (node_id, id, vendor, model, memory_bytes, health, first_seen_at, updated_at, description,
			description_sha256, part_of, partitioned, sharing)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $7, $8, $9, $10, $11, $12)
		ON CONFLICT (node_id, id) DO UPDATE SET vendor = excluded.vendor, model = excluded.model, memory_bytes =
		excluded.memory_bytes,
			health = excluded.health, updated_at = excluded.updated_at, description = excluded.description,
			description_sha256 = excluded.description_sha256, part_of = excluded.part_of, partitioned = excluded.partitioned,
			sharing = excluded.sharing`,
		nodeID, a.ID, a.Vendor, a.Model, a.MemoryBytes, a.Health, a.at, description, []byte(a.digest), a.PartOf,
		len(a.description.GetPartitions()) > 0, a.Sharing)
	return err
}

// setMissing keeps the description: the accelerator may come back.
func setMissing(ctx context.Context, tx db.Tx, nodeID, id string, now time.Time) error {
	_, err := tx.Exec(ctx, `UPDATE accelerators SET health = $3, updated_at = $4 WHERE node_id = $1 AND id = $2`,
		nodeID, id, protocol.HealthMissing, now)
	return err
}

// unclaimedAccelerators returns the accelerators of nodes that an org may claim. A GPU may be partitioned, or made
// whole, while it is claimed: neither it nor its partitions can be claimed again before that claim ends. Of the
// partitions of one GPU, only MIG instances may belong to different orgs: their memory and their paths to it are apart
// in hardware. A GPU may also have slices that are claimed and gone.
func unclaimedAccelerators(ctx context.Context, tx db.Tx, nodeIDs []string, orgID string) (
	map[string][]plan.Accelerator, error,
) {
	return collectAccelerators(ctx, tx, `SELECT g.node_id, `+acceleratorColumns+` FROM accelerators g
		WHERE g.node_id = ANY($1) AND NOT g.partitioned AND NOT EXISTS (
			SELECT 1 FROM claims c WHERE c.node_id = g.node_id AND c.accelerator_id IN (g.id, g.part_of)
			AND c.released_at IS NULL)
		AND NOT EXISTS (
			SELECT 1 FROM accelerators p
			JOIN claims c ON c.node_id = p.node_id AND c.accelerator_id = p.id AND c.released_at IS NULL
			JOIN allocations a ON a.id = c.allocation_id
			WHERE p.node_id = g.node_id AND p.part_of <> '' AND (p.part_of = g.id
			OR p.part_of = g.part_of AND (g.vendor <> $3 OR g.sharing <> '' OR p.sharing <> '') AND a.org_id <> $2))
		ORDER BY g.node_id, g.id`, nodeIDs, orgID, protocol.VendorNVIDIA)
}

// OneOrg returns the GPU of each partition of a node that no hardware keeps apart from the others.
func OneOrg(ctx context.Context, tx db.Tx, nodeID string) (map[string]string, error) {
	var id, whole string
	out := map[string]string{}
	return out, db.ForEach(ctx, tx, []any{&id, &whole}, func() { out[id] = whole },
		`SELECT id, part_of FROM accelerators WHERE node_id = $1 AND part_of <> '' AND (vendor <> $2 OR sharing <> '')`,
		nodeID, protocol.VendorNVIDIA)
}

// freeAccelerators returns the accelerators of allocations that no member has reserved, by allocation.
func freeAccelerators(ctx context.Context, tx db.Tx, allocationIDs []string) (map[string][]plan.Accelerator, error) {
	return collectAccelerators(ctx, tx, `SELECT c.allocation_id, `+acceleratorColumns+`
		FROM claims c JOIN accelerators g ON g.node_id = c.node_id AND g.id = c.accelerator_id
		WHERE c.allocation_id = ANY($1::uuid[]) AND c.released_at IS NULL AND NOT EXISTS (
			SELECT 1 FROM reserved_accelerators r WHERE r.node_id = g.node_id AND r.accelerator_id = g.id AND r.freed_at IS NULL)
		ORDER BY g.id`, allocationIDs)
}

// collectAccelerators reads rows of accelerators, by their first column.
func collectAccelerators(ctx context.Context, tx db.Tx, sql string,
	args ...any,
) (map[string][]plan.Accelerator, error) {
	var (
		key string
		row acceleratorRow
	)
	out := map[string][]plan.Accelerator{}
	return out, db.ForEach(ctx, tx, append([]any{&key}, row.targets()...), func() {
		out[key] = append(out[key], row.free())
	}, sql, args...)
}

// acceleratorColumns are those of accelerators g that an acceleratorRow reads.
const acceleratorColumns = `g.id, g.vendor, g.model, g.memory_bytes, g.health, g.part_of, g.sharing, g.description`

type acceleratorRow struct {
	id, vendor, model, health, partOf, sharing string
	memoryBytes                                int64
	description                                []byte
}

func (r *acceleratorRow) targets() []any {
	return []any{&r.id, &r.vendor, &r.model, &r.memoryBytes, &r.health, &r.partOf, &r.sharing, &r.description}
}

// free is the accelerator for the planner. A description that cannot be read, which none is, only lacks its place.
func (r *acceleratorRow) free() plan.Accelerator {
	a := plan.Accelerator{
		ID: r.id, Vendor: r.vendor, Model: r.model, MemoryBytes: uint64(r.memoryBytes),
		Healthy: r.health == protocol.HealthOK, PartOf: r.partOf, Sharing: r.sharing,
	}
	var d struct {
		NUMANode      *int   `json:"numaNode"`
		DriverVersion string `json:"driverVersion"`
		Links         []struct {
			PeerID string `json:"peerId"`
			Count  int    `json:"count"`
		} `json:"links"`
	}
	if err := json.Unmarshal(r.description, &d); err != nil {
		return a
	}
	a.NUMANode, a.DriverVersion = d.NUMANode, d.DriverVersion
	for _, l := range d.Links {
		a.Links = append(a.Links, plan.Link{Peer: l.PeerID, Count: l.Count})
	}
	return a
}
