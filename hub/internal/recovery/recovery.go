// Package recovery owns what a hub knows about its backups and, once it was restored from one, what it still waits for:
// which nodes have not brought what they have, and what they brought that contradicts the restored rows. It also keeps
// the findings about rows that could not be processed. It does not read a backup (backup), change what it finds
// (command.AdoptNode) or speak to nodes (intake, dispatch).
//
// A node waits from the restore until it has brought its accepted state and its leases. Meanwhile nothing is compiled
// for it, its leases are not renewed and its capacity stays reserved. It owes from then until its usage is in again up
// to the last segment that it had sealed: so long its silence about a member proves nothing.
package recovery

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// MaxFindings bounds a listing; there are rarely more than a few.
const MaxFindings = 1000

// What can be found after a restore. None of them stops anything; each is for an admin to look at.
const (
	// FindingNode: the node is enrolled, but the restored rows do not know it.
	FindingNode = "node_unknown"
	// FindingOrg and FindingProject: something runs for one that the restored rows do not know.
	FindingOrg     = "org_unknown"
	FindingProject = "project_unknown"
	// FindingInstance: an instance was made, or changed, after the backup.
	FindingInstance = "instance_unknown"
	FindingRevision = "revision_unknown"
	// FindingAllocation: an allocation was made after the backup; it is known only as far as it is used.
	FindingAllocation = "allocation_unknown"
	// FindingReleased: what the restored rows hold as in use is used by something newer.
	FindingReleased = "allocation_superseded"
	// FindingGone: an instance of the restored rows had been decommissioned.
	FindingGone = "instance_decommissioned"
	// FindingDocument: the node has accepted a document that it does not hold.
	FindingDocument = "document_missing"
	// FindingLease: leases were given that the restored rows do not know, and the wallet does not cover them any more.
	FindingLease = "lease_uncovered"
	// FindingUnverified: the uploaded state is signed by no key that this hub's root ever named.
	FindingUnverified = "state_unverified"
	// FindingBundle: the node holds a newer trust bundle than the backup: a key was revoked or added since.
	FindingBundle = "bundle_newer"
)

// What can be found at any time: a row that could not be processed and was set aside. Its finding goes when it is
// processed after all.
const (
	// FindingAccrual: an allocation's time cannot be billed.
	FindingAccrual = "accrual_failed"
	// FindingSettlement: the rest of a member's hold cannot go back to the wallet.
	FindingSettlement = "settlement_failed"
	// FindingPosting: usage that has been charged cannot be written to the journal.
	FindingPosting = "posting_failed"
	// FindingRelease: an allocation whose wallet is empty cannot be released.
	FindingRelease = "release_failed"
	// FindingRenewal: a member's lease cannot be renewed, for another reason than an empty wallet.
	FindingRenewal = "renewal_failed"
	// FindingUsage: a usage segment cannot be posted. It is kept as its node signed it, and what follows it is posted.
	FindingUsage = "usage_set_aside"
	// FindingContact: it cannot be recorded that a node is silent.
	FindingContact = "contact_failed"
	// FindingReport: what a node reports of a member cannot be taken over. The node repeats it, and what it reports of
	// others is taken over.
	FindingReport = "report_failed"
	// FindingMember: a member breaks a rule of its node's state and is left out of it.
	FindingMember = "member_left_out"
)

// Backup is one that was read back and found whole.
type Backup struct {
	ID        string
	TakenAt   time.Time
	SizeBytes int64
	At        time.Time
}

// Restore is the hub coming back from a backup.
type Restore struct {
	ID string
	// BackupID and TakenAt are of the backup.
	BackupID string
	TakenAt  time.Time
	// Epoch is what counts since.
	Epoch uint64
	At    time.Time
}

// Node is how far a node is.
type Node struct {
	NodeID string
	// Waiting: it has not brought what it has.
	Waiting bool
	// OwesIncarnation and OwesSegment say up to where its usage is missed.
	OwesIncarnation string
	OwesSegment     uint64
	UploadedAt      time.Time
}

// Finding is what an admin should look at: a contradiction between a node and the restored rows, or a row that was set
// aside.
type Finding struct {
	ID           string
	NodeID       string
	Kind         string
	ResourceType string
	ResourceID   string
	Detail       string
	At           time.Time
}

// PlanBackup is called before a backup looks at the rows. From the first one on, nodes forget their usage only when it
// is in one: what is posted while the very first is being made must not be forgotten, because that backup does not have
// it.
func PlanBackup(ctx context.Context, tx db.Tx, id string, now time.Time) error {
	_, err := tx.Exec(ctx, `INSERT INTO backups (id, taken_at, size_bytes) VALUES ($1, $2, 0)`, id, now)
	return err
}

// RecordBackup notes that the backup was read back and is whole.
func RecordBackup(ctx context.Context, tx db.Tx, b Backup) error {
	_, err := tx.Exec(ctx, `UPDATE backups SET taken_at = $2, size_bytes = $3, verified_at = $4 WHERE id = $1`, b.ID,
		b.TakenAt, b.SizeBytes, b.At)
	return err
}

// Begin notes a restore and lets every node wait.
func Begin(ctx context.Context, tx db.Tx, r Restore, nodeIDs []string) error {
	if _, err := tx.Exec(ctx,
		`INSERT INTO restores (id, backup_id, taken_at, epoch, restored_at) VALUES ($1, $2, $3, $4, $5)`,
		r.ID, r.BackupID, r.TakenAt, int64(r.Epoch), r.At); err != nil {
		return err
	}
	// What an earlier restore was waiting for, this one waits for, too; what was found then is in the audit trail.
	for _, table := range []string{"recovery_parts", "recovering_nodes", "recovery_findings"} {
		if _, err := tx.Exec(ctx, `DELETE FROM `+table); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, `INSERT INTO recovering_nodes (node_id, waiting, owes_incarnation, owes_segment)
		SELECT x.id::uuid, true, '', 0 FROM unnest($1::text[]) AS x(id)`, nodeIDs)
	return err
}

// Last gives the newest restore; ok is false for a hub that was never restored.
func Last(ctx context.Context, tx db.Tx) (r Restore, ok bool, err error) {
	var epoch int64
	err = tx.QueryRow(ctx,
		`SELECT id, backup_id, taken_at, epoch, restored_at FROM restores ORDER BY restored_at DESC, id DESC LIMIT 1`).
		Scan(&r.ID, &r.BackupID, &r.TakenAt, &epoch, &r.At)
	if db.IsNoRows(err) {
		return Restore{}, false, nil
	}
	r.Epoch = uint64(epoch)
	return r, err == nil, err
}

// Await lets a node wait that the restored rows did not know.
func Await(ctx context.Context, tx db.Tx, nodeID string) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO recovering_nodes (node_id, waiting, owes_incarnation, owes_segment) VALUES ($1, true, '', 0)
			ON CONFLICT (node_id) DO NOTHING`, nodeID)
	return err
}

// Of says how far a node is; ok is false when nothing is missed of it.
func Of(ctx context.Context, tx db.Tx, nodeID string) (n Node, ok bool, err error) {
	list, err := selectNodes(ctx, tx, `WHERE node_id = $1`, nodeID)
	if err != nil || len(list) == 0 {
		return Node{}, false, err
	}
	return list[0], true, nil
}

// Among gives those of the nodes of which something is missed.
func Among(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]bool, error) {
	list, err := selectNodes(ctx, tx, `WHERE node_id = ANY($1::uuid[])`, nodeIDs)
	missed := map[string]bool{}
	for _, n := range list {
		missed[n.NodeID] = true
	}
	return missed, err
}

// Waiting gives those of the nodes that have not brought yet what they have.
func Waiting(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]bool, error) {
	list, err := selectNodes(ctx, tx, `WHERE node_id = ANY($1::uuid[])`, nodeIDs)
	waiting := map[string]bool{}
	for _, n := range list {
		waiting[n.NodeID] = n.Waiting
	}
	return waiting, err
}

// Waits reports whether the node has yet to bring what it has.
func Waits(ctx context.Context, tx db.Tx, nodeID string) (bool, error) {
	n, _, err := Of(ctx, tx, nodeID)
	return n.Waiting, err
}

// Nodes lists those of which something is missed.
func Nodes(ctx context.Context, tx db.Tx) ([]Node, error) {
	return selectNodes(ctx, tx, `ORDER BY node_id`)
}

func selectNodes(ctx context.Context, tx db.Tx, where string, args ...any) ([]Node, error) {
	rows, err := tx.Query(ctx,
		`SELECT node_id, waiting, owes_incarnation, owes_segment, brought_at FROM recovering_nodes `+where, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (n Node, err error) {
		var (
			segment  int64
			uploaded *time.Time
		)
		err = row.Scan(&n.NodeID, &n.Waiting, &n.OwesIncarnation, &segment, &uploaded)
		n.OwesSegment = uint64(segment)
		if uploaded != nil {
			n.UploadedAt = *uploaded
		}
		return n, err
	})
}

// Owe notes up to where the store that says hello has sealed usage. A store that takes a new name seals again what it
// owes.
func Owe(ctx context.Context, tx db.Tx, nodeID, incarnation string, segment uint64) error {
	_, err := tx.Exec(ctx,
		`UPDATE recovering_nodes SET owes_incarnation = $2, owes_segment = $3 WHERE node_id = $1 AND owes_incarnation <> $2`,
		nodeID, incarnation, int64(segment))
	return err
}

// Uploaded ends the waiting of a node.
func Uploaded(ctx context.Context, tx db.Tx, nodeID string, now time.Time) error {
	if _, err := tx.Exec(ctx, `DELETE FROM recovery_parts WHERE node_id = $1`, nodeID); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `UPDATE recovering_nodes SET waiting = false, brought_at = $2 WHERE node_id = $1`, nodeID, now)
	return err
}

// Recovered forgets a node of which nothing is missed any more.
func Recovered(ctx context.Context, tx db.Tx, nodeID string) error {
	_, err := tx.Exec(ctx, `DELETE FROM recovering_nodes WHERE node_id = $1`, nodeID)
	return err
}

// KeepPart keeps a document until the last of its state has come. The caller has checked that the state names it.
func KeepPart(ctx context.Context, tx db.Tx, nodeID string, sha256, data []byte) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO recovery_parts (node_id, sha256, data) VALUES ($1, $2, $3) ON CONFLICT (node_id, sha256) DO NOTHING`,
		nodeID, sha256, data)
	return err
}

// Parts are the documents that came.
func Parts(ctx context.Context, tx db.Tx, nodeID string) ([][]byte, error) {
	rows, err := tx.Query(ctx, `SELECT data FROM recovery_parts WHERE node_id = $1 ORDER BY sha256`, nodeID)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[[]byte])
}

// Find writes a finding down, once.
func Find(ctx context.Context, tx db.Tx, f Finding) (news bool, err error) {
	tag, err := tx.Exec(ctx,
		`INSERT INTO recovery_findings (id, node_id, kind, resource_type, resource_id, detail, found_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7)
		ON CONFLICT (node_id, kind, resource_id) DO NOTHING`, db.NewID(), f.NodeID, f.Kind, f.ResourceType, f.ResourceID,
		f.Detail, f.At)
	return tag.RowsAffected() == 1, err
}

// Findings lists what was found since the last restore and is not resolved, in order.
func Findings(ctx context.Context, tx db.Tx) ([]Finding, error) {
	rows, err := tx.Query(ctx,
		`SELECT id, node_id, kind, resource_type, resource_id, detail, found_at FROM recovery_findings ORDER BY id LIMIT $1`,
		MaxFindings)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (f Finding, err error) {
		err = row.Scan(&f.ID, &f.NodeID, &f.Kind, &f.ResourceType, &f.ResourceID, &f.Detail, &f.At)
		return f, err
	})
}

// Resolve forgets a finding whose row was processed after all; gone is false where there was none.
func Resolve(ctx context.Context, tx db.Tx, nodeID, kind, resourceID string) (gone bool, err error) {
	tag, err := tx.Exec(ctx, `DELETE FROM recovery_findings WHERE node_id = $1 AND kind = $2 AND resource_id = $3`, nodeID,
		kind, resourceID)
	return tag.RowsAffected() == 1, err
}

// ResolveOthers forgets a node's findings of a kind but for those about some resources.
func ResolveOthers(ctx context.Context, tx db.Tx, nodeID, kind string, still []string) error {
	return tx.Later(ctx,
		`DELETE FROM recovery_findings WHERE node_id = $1 AND kind = $2 AND resource_id <> ALL($3::text[])`, nodeID, kind,
		append([]string{}, still...))
}

// LastBackup gives the newest verified backup; ok is false where there is none.
func LastBackup(ctx context.Context, tx db.Tx) (b Backup, ok bool, err error) {
	err = tx.QueryRow(ctx,
		`SELECT id, taken_at, size_bytes, verified_at FROM backups WHERE verified_at IS NOT NULL
			ORDER BY taken_at DESC, id DESC LIMIT 1`).Scan(&b.ID, &b.TakenAt, &b.SizeBytes, &b.At)
	if db.IsNoRows(err) {
		return Backup{}, false, nil
	}
	return b, err == nil, err
}
