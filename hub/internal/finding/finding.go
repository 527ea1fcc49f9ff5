// Package finding owns what an admin should check: contradictions between a node and the rows of a restored hub, and
// rows that could not be processed and were set aside. A finding stops nothing. Package command adds and resolves
// findings with their events.
package finding

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// MaxListed bounds a listing; there are rarely more than a few.
const MaxListed = 1000

// Kinds of findings after a restore. None stops anything; an admin checks each.
const (
	// Node: the node is enrolled, but the restored rows do not know it.
	Node = "node_unknown"
	// Org and Project: something runs for one that the restored rows do not know.
	Org     = "org_unknown"
	Project = "project_unknown"
	// Instance: an instance was made, or changed, after the backup.
	Instance = "instance_unknown"
	Revision = "revision_unknown"
	// Allocation: an allocation was made after the backup; it is known only as far as it is used.
	Allocation = "allocation_unknown"
	// Volume: the rows do not know a volume that a node keeps, or that it was enlarged or restored.
	Volume = "volume_unknown"
	// Snapshot: the rows do not know a snapshot of a volume.
	Snapshot = "volume_snapshot_unknown"
	// Secret: a secret was issued, rotated or revoked after the backup; the hub does not have its newest value.
	Secret = "secret_unknown"
	// Released: an accelerator of the restored rows belongs to a newer allocation.
	Released = "allocation_superseded"
	// Gone: an instance of the restored rows had been decommissioned.
	Gone = "instance_decommissioned"
	// Document: the node accepted a document and does not have it.
	Document = "document_missing"
	// Lease: leases were issued after the backup, and the wallet does not cover them any more.
	Lease = "lease_uncovered"
	// Unverified: the uploaded state is signed by no key that this hub's root ever named.
	Unverified = "state_unverified"
	// Bundle: the node holds a newer trust bundle than the backup: a key was revoked or added since.
	Bundle = "bundle_newer"
)

// Kinds of findings at any time: a row that could not be processed and was set aside. The finding is deleted when the
// row is processed after all.
const (
	// Accrual: an allocation's time cannot be billed.
	Accrual = "accrual_failed"
	// Settlement: the rest of a member's hold cannot go back to the wallet.
	Settlement = "settlement_failed"
	// Posting: usage that has been charged cannot be written to the journal.
	Posting = "posting_failed"
	// Release: an allocation or attachment whose wallet is empty cannot be ended.
	Release = "release_failed"
	// Renewal: a member's lease cannot be renewed, for another reason than an empty wallet.
	Renewal = "renewal_failed"
	// Identity: the service account of an app instance cannot be renewed.
	Identity = "identity_failed"
	// Usage: a usage segment cannot be posted. It is kept as its node signed it, and what follows it is posted.
	Usage = "usage_set_aside"
	// Contact: it cannot be recorded that a node is silent.
	Contact = "contact_failed"
	// Report: a node's report on a member or a volume cannot be applied. The node repeats it; its reports on others are
	// applied.
	Report = "report_failed"
	// Member: a member breaks a rule of its node's state and is left out of it.
	Member = "member_left_out"
)

// Finding is a contradiction, or a row that was set aside.
type Finding struct {
	ID           string
	NodeID       string
	Kind         string
	ResourceType string
	ResourceID   string
	Detail       string
	At           time.Time
}

// Add stores a finding once; news is false for a known one.
func Add(ctx context.Context, tx db.Tx, f Finding) (news bool, err error) {
	tag, err := tx.Exec(ctx,
		`INSERT INTO recovery_findings (id, node_id, kind, resource_type, resource_id, detail, found_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7)
		ON CONFLICT (node_id, kind, resource_id) DO NOTHING`, db.NewID(), f.NodeID, f.Kind, f.ResourceType, f.ResourceID,
		f.Detail, f.At)
	return tag.RowsAffected() == 1, err
}

// List returns the unresolved findings, oldest first.
func List(ctx context.Context, tx db.Tx) ([]Finding, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Finding],
		`SELECT id, node_id, kind, resource_type, resource_id, detail, found_at FROM recovery_findings ORDER BY id LIMIT $1`,
		MaxListed)
}

// ListAbout returns the findings of a kind about resources of these types.
func ListAbout(ctx context.Context, tx db.Tx, kind string, resourceTypes ...string) ([]Finding, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Finding],
		`SELECT id, node_id, kind, resource_type, resource_id, detail, found_at FROM recovery_findings
		WHERE kind = $1 AND resource_type = ANY($2) ORDER BY id`, kind, resourceTypes)
}

// Resolve deletes a finding whose row was processed after all; resolved is false where there was none.
func Resolve(ctx context.Context, tx db.Tx, nodeID, kind, resourceID string) (resolved bool, err error) {
	tag, err := tx.Exec(ctx, `DELETE FROM recovery_findings WHERE node_id = $1 AND kind = $2 AND resource_id = $3`, nodeID,
		kind, resourceID)
	return tag.RowsAffected() == 1, err
}

// ResolveUnpaid deletes what was found of an allocation or attachment because of an empty wallet: it has ended. It
// returns the findings.
func ResolveUnpaid(ctx context.Context, tx db.Tx, resourceID string) ([]Finding, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Finding],
		`DELETE FROM recovery_findings WHERE kind IN ($1, $2) AND resource_id = $3
		RETURNING id, node_id, kind, resource_type, resource_id, detail, found_at`, Release, Lease, resourceID)
}

// ResolveOthers deletes a node's findings of a kind except those about some resources. It returns the findings.
func ResolveOthers(ctx context.Context, tx db.Tx, nodeID, kind string, still []string) ([]Finding, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Finding],
		`DELETE FROM recovery_findings WHERE node_id = $1 AND kind = $2 AND resource_id <> ALL($3::text[])
		RETURNING id, node_id, kind, resource_type, resource_id, detail, found_at`, nodeID, kind,
		append([]string{}, still...))
}

// DeleteOldSetAside deletes usage segments that were set aside before a moment, with their findings: by then their
// usage cannot be disputed any more. It returns how many they were, and when the last of them was set aside.
func DeleteOldSetAside(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	var (
		nodes        []pgtype.UUID
		incarnations []string
		numbers      []int64
		node         pgtype.UUID
		incarnation  string
		number       int64
	)
	if err := db.ForEach(ctx, tx, []any{&node, &incarnation, &number, &last}, func() {
		nodes, incarnations, numbers = append(nodes, node), append(incarnations, incarnation), append(numbers, number)
	}, `SELECT node_id, incarnation, number, set_aside_at FROM usage_set_aside
		WHERE set_aside_at >= $1 AND set_aside_at < $2 ORDER BY set_aside_at LIMIT $3`, o.After, o.Before,
		o.Limit); err != nil || len(nodes) == 0 {
		return last, 0, err
	}
	for _, statement := range []string{
		`DELETE FROM recovery_findings WHERE (node_id, kind, resource_id) IN (SELECT x.node, 'usage_set_aside', x.store || '/'
			|| x.no::TEXT
			FROM unnest($1::UUID[], $2::TEXT[], $3::INT8[]) AS x(node, store, no))`,
		`DELETE FROM usage_set_aside WHERE (node_id, incarnation, number) IN (SELECT x.node, x.store, x.no
			FROM unnest($1::UUID[], $2::TEXT[], $3::INT8[]) AS x(node, store, no))`,
	} {
		if err := tx.Queue(ctx, statement, nodes, incarnations, numbers); err != nil {
			return last, 0, err
		}
	}
	return last, len(nodes), nil
}
