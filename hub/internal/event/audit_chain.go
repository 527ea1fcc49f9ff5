package event

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/auditchain"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// auditBatch bounds one transaction of the sequencer; before and after may have maxStateBytes each.
const auditBatch = 200

// record is an audit row as it is hashed and exported: what is empty is left out. Members are added here, never
// renamed, or the hashes of old records would not fit.
type record struct {
	ID            string          `json:"id"`
	At            time.Time       `json:"at"`
	Actor         principal.Actor `json:"actor"`
	OnBehalfOf    principal.Actor `json:"on_behalf_of,omitzero"`
	Action        string          `json:"action"`
	Outcome       string          `json:"outcome"`
	Reason        string          `json:"reason,omitempty"`
	ResourceType  string          `json:"resource_type"`
	ResourceID    string          `json:"resource_id"`
	OrgID         string          `json:"org_id,omitempty"`
	ProjectID     string          `json:"project_id,omitempty"`
	CorrelationID string          `json:"correlation_id"`
	SourceAddress string          `json:"source_address,omitempty"`
	Before        any             `json:"before,omitempty"`
	After         any             `json:"after,omitempty"`
	Number        int64           `json:"number,omitempty"`
	PreviousHash  string          `json:"previous_hash,omitempty"`
	Hash          string          `json:"hash,omitempty"`
}

// JSON returns the row as it is hashed and exported.
func (r AuditRow) JSON() ([]byte, error) {
	raw, err := json.Marshal(record{
		ID: r.ID, At: r.At, Actor: r.Actor, OnBehalfOf: r.OnBehalfOf, Action: r.Action, Outcome: r.Outcome,
		Reason: r.Reason, ResourceType: r.ResourceType, ResourceID: r.ResourceID, OrgID: r.OrgID, ProjectID: r.ProjectID,
		CorrelationID: r.CorrelationID, SourceAddress: r.SourceAddress, Before: r.Before, After: r.After,
		Number: r.Number, PreviousHash: r.PreviousHash, Hash: r.Hash,
	})
	if err != nil {
		return nil, fmt.Errorf("audit row %s: %w", r.ID, err)
	}
	return auditchain.Canonical(raw)
}

// chainOf is the key of the chain that rows of an org are in; those of no org are in the platform's.
func chainOf(orgID string) string { return cmp.Or(orgID, uuid.Nil.String()) }

// chainAudit numbers the rows that have none yet, each in the chain of its org, and links them. It does so only while
// this hub numbers events, too.
func (s *Sequencer) chainAudit(ctx context.Context) (int, error) {
	return s.run(ctx, func(tx db.Tx) (int, error) {
		l, rows, err := underLease(ctx, tx, func(tx db.Tx) ([]AuditRow, error) {
			return selectAudit(ctx, tx, `WHERE number IS NULL ORDER BY id LIMIT $1`, auditBatch)
		})
		if err != nil || l.holder != s.Holder || len(rows) == 0 {
			return 0, err
		}
		heads, err := selectHeads(ctx, tx, rows)
		if err != nil {
			return 0, err
		}
		var linked links
		for _, r := range rows {
			head := heads[chainOf(r.OrgID)]
			r.Number, r.PreviousHash = head.Number+1, cmp.Or(head.Hash, auditchain.First)
			if err := linked.add(&r); err != nil {
				return 0, err
			}
			heads[chainOf(r.OrgID)] = auditchain.Head{Number: r.Number, Hash: r.Hash}
		}
		if err := linked.save(ctx, tx); err != nil {
			return 0, err
		}
		failpoint.Hit("hub/audit/linked")
		return len(rows), saveHeads(ctx, tx, heads)
	})
}

// links are columns of rows that get their place in a chain.
type links struct {
	ids, chains      []string
	numbers          []int64
	previous, hashes [][]byte
}

// add hashes a row that has its number and its predecessor's hash.
func (l *links) add(r *AuditRow) error {
	text, err := r.JSON()
	if err != nil {
		return err
	}
	if r.Hash, err = auditchain.Hash(text); err != nil {
		return fmt.Errorf("audit row %s: %w", r.ID, err)
	}
	previous, err := hex.DecodeString(r.PreviousHash)
	if err != nil {
		return err
	}
	hash, err := hex.DecodeString(r.Hash)
	if err != nil {
		return err
	}
	l.ids, l.chains, l.numbers = append(l.ids, r.ID), append(l.chains, chainOf(r.OrgID)), append(l.numbers, r.Number)
	l.previous, l.hashes = append(l.previous, previous), append(l.hashes, hash)
	return nil
}

func (l *links) save(ctx context.Context, tx db.Tx) error {
	return tx.Queue(ctx, `
		UPDATE audit_rows SET chain = n.chain, number = n.number, previous_hash = n.previous_hash, hash = n.hash
		FROM (SELECT unnest($1::UUID[]) AS id, unnest($2::UUID[]) AS chain, unnest($3::INT8[]) AS number,
		      unnest($4::BYTEA[]) AS previous_hash, unnest($5::BYTEA[]) AS hash) AS n
		WHERE audit_rows.id = n.id`, l.ids, l.chains, l.numbers, l.previous, l.hashes)
}

// selectHeads returns the heads of the chains that rows belong to.
func selectHeads(ctx context.Context, tx db.Tx, rows []AuditRow) (map[string]auditchain.Head, error) {
	heads, chains := map[string]auditchain.Head{}, []string{}
	for _, r := range rows {
		chains = append(chains, chainOf(r.OrgID))
	}
	var chain string
	var head auditchain.Head
	err := db.ForEach(ctx, tx, []any{&chain, &head.Number, &head.Hash}, func() { heads[chain] = head },
		`SELECT chain, number, encode(hash, 'hex') FROM audit_heads WHERE chain = ANY($1::UUID[])`, chains)
	return heads, err
}

func saveHeads(ctx context.Context, tx db.Tx, heads map[string]auditchain.Head) error {
	var chains, hashes []string
	var numbers []int64
	for chain, head := range heads {
		chains, numbers, hashes = append(chains, chain), append(numbers, head.Number), append(hashes, head.Hash)
	}
	return tx.Queue(ctx, `
		INSERT INTO audit_heads (chain, number, hash)
		SELECT chain, number, decode(hash, 'hex')
		FROM (SELECT unnest($1::UUID[]) AS chain, unnest($2::INT8[]) AS number, unnest($3::TEXT[]) AS hash) AS n
		ON CONFLICT (chain) DO UPDATE SET number = excluded.number, hash = excluded.hash`, chains, numbers, hashes)
}

// AuditRange asks for records of one chain.
type AuditRange struct {
	// OrgID is whose chain; empty is the platform's.
	OrgID string
	// After and To bound the numbers: (After, To].
	After, To int64
	// Since and Until bound the run of numbers by times: it holds every record of [Since, Until). Zero is no bound.
	Since, Until time.Time
	Limit        int
}

// Bounded returns a range with the bounds in time as numbers. Records are numbered in about the order of their times: a
// run of numbers holds those of other times, too, where they lie between.
func Bounded(ctx context.Context, tx db.Tx, r AuditRange) (AuditRange, error) {
	if !r.Since.IsZero() {
		first, err := numberAt(ctx, tx, `SELECT min(number) FROM audit_rows WHERE chain = $1 AND at >= $2`, r.OrgID, r.Since)
		if err != nil || first == 0 {
			return AuditRange{OrgID: r.OrgID}, err
		}
		r.After = max(r.After, first-1)
	}
	if !r.Until.IsZero() {
		last, err := numberAt(ctx, tx, `SELECT max(number) FROM audit_rows WHERE chain = $1 AND at < $2`, r.OrgID, r.Until)
		if err != nil {
			return AuditRange{}, err
		}
		r.To = min(r.To, last)
	}
	return r, nil
}

// FirstAudit returns the number of the first record after After that is kept; 0 where there is none.
func FirstAudit(ctx context.Context, tx db.Tx, r AuditRange) (int64, error) {
	n, err := db.Value[*int64](ctx, tx, `SELECT min(number) FROM audit_rows WHERE chain = $1 AND number > $2`,
		chainOf(r.OrgID), r.After)
	if err != nil || n == nil {
		return 0, err
	}
	return *n, nil
}

// numberAt is the number that a query finds; 0 where there is none.
func numberAt(ctx context.Context, tx db.Tx, sql, orgID string, at time.Time) (int64, error) {
	n, err := db.Value[*int64](ctx, tx, sql, chainOf(orgID), at)
	if err != nil || n == nil {
		return 0, err
	}
	return *n, nil
}

// ChainedAudit lists records of a chain by their numbers.
func ChainedAudit(ctx context.Context, tx db.Tx, r AuditRange) ([]AuditRow, error) {
	return selectAudit(ctx, tx, `WHERE chain = $1 AND number > $2 AND number <= $3 ORDER BY number LIMIT $4`,
		chainOf(r.OrgID), r.After, r.To, r.Limit)
}

// AuditHead returns the last record of an org's chain, of the platform's where orgID is empty; zero where it has none.
func AuditHead(ctx context.Context, tx db.Tx, orgID string) (auditchain.Head, error) {
	head, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[auditchain.Head],
		`SELECT number, encode(hash, 'hex') FROM audit_heads WHERE chain = $1`, chainOf(orgID))
	if db.IsNoRows(err) {
		return auditchain.Head{}, nil
	}
	return head, err
}
