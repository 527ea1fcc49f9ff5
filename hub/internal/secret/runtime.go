package secret

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Statuses of a secret.
const (
	StatusActive  = "active"
	StatusRevoked = "revoked"
)

// maxPerProject bounds the secrets of a project, the revoked ones included.
const maxPerProject = 1000

// Secret is a named value of a project, which nobody reads but the nodes that run its instances.
type Secret struct {
	ID, OrgID, ProjectID, Name string
	// Version grows with each value and with a revocation.
	Version         int64
	Status          string
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
	// UsedBy are the instances that refer to it, or have.
	UsedBy []string
}

// AAD binds the sealed value of a secret to its row and version.
func (s Secret) AAD() []byte { return fmt.Appendf(nil, "runtime_secret\x00%s\x00%d", s.ID, s.Version) }

const columns = `s.id, s.org_id, s.project_id, s.name, s.version, s.status, s.resource_version, s.created_at,
	s.updated_at, ARRAY(SELECT DISTINCT d.instance_id::TEXT FROM runtime_secret_deliveries d
		WHERE d.secret_id = s.id ORDER BY 1)`

func scanSecret(row pgx.CollectableRow) (s Secret, err error) {
	err = row.Scan(&s.ID, &s.OrgID, &s.ProjectID, &s.Name, &s.Version, &s.Status, &s.ResourceVersion, &s.CreatedAt,
		&s.UpdatedAt, &s.UsedBy)
	return s, err
}

// Get reads a secret of a project.
func Get(ctx context.Context, tx db.Tx, projectID, id string) (Secret, error) {
	return one(db.SelectOne(ctx, tx, scanSecret, `SELECT `+columns+
		` FROM runtime_secrets s WHERE s.project_id = $1 AND s.id = $2`, projectID, id))
}

// ByName reads a secret of a project.
func ByName(ctx context.Context, tx db.Tx, projectID, name string) (Secret, error) {
	return one(db.SelectOne(ctx, tx, scanSecret, `SELECT `+columns+
		` FROM runtime_secrets s WHERE s.project_id = $1 AND s.name = $2`, projectID, name))
}

func one(s Secret, err error) (Secret, error) {
	if db.IsNoRows(err) {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "There is no such secret.", err)
	}
	return s, err
}

// List returns a page of the secrets of a project, the oldest first.
func List(ctx context.Context, tx db.Tx, projectID string, page db.Page) ([]Secret, error) {
	return db.Select(ctx, tx, scanSecret, `SELECT `+columns+` FROM runtime_secrets s
		WHERE s.project_id = $1 AND ($2::UUID IS NULL OR s.id > $2::UUID) ORDER BY s.id LIMIT $3`,
		projectID, db.OrNull(page.After), page.Limit)
}

// SealedValue reads the newest value, as it is sealed.
func SealedValue(ctx context.Context, tx db.Tx, id string) ([]byte, error) {
	return db.Value[[]byte](ctx, tx, `SELECT sealed FROM runtime_secrets WHERE id = $1`, id)
}

// Put stores a secret with its newest value.
func Put(ctx context.Context, tx db.Tx, s Secret, sealed []byte) error {
	if s.ResourceVersion == 1 {
		has, err := db.Value[int64](ctx, tx, `SELECT count(*) FROM runtime_secrets WHERE project_id = $1`, s.ProjectID)
		if err != nil {
			return err
		}
		if has >= maxPerProject {
			return fault.New(fault.Conflict, codeTooMany, "The project has its 1000 secrets; rotate those that it has.", nil)
		}
	}
	return put(ctx, tx, s, sealed)
}

func put(ctx context.Context, tx db.Tx, s Secret, sealed []byte) error {
	_, err := tx.Exec(ctx, `INSERT INTO runtime_secrets (id, org_id, project_id, name, version, sealed, status,
			resource_version, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
		ON CONFLICT (id) DO UPDATE SET version = excluded.version, sealed = excluded.sealed, status = excluded.status,
			resource_version = excluded.resource_version, updated_at = excluded.updated_at`,
		s.ID, s.OrgID, s.ProjectID, s.Name, s.Version, sealed, s.Status, s.ResourceVersion, s.CreatedAt, s.UpdatedAt)
	return err
}

// Delivery is a parameter of a member that refers to a secret.
type Delivery struct{ MemberID, Parameter, SecretID, InstanceID, NodeID string }

// Deliver stores the newest value for a parameter, sealed to the member's node.
func Deliver(ctx context.Context, tx db.Tx, d Delivery, sealed []byte) error {
	_, err := tx.Exec(ctx, `INSERT INTO runtime_secret_deliveries (member_id, parameter, secret_id, instance_id, node_id,
			sealed) VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT (member_id, parameter, secret_id) DO UPDATE SET sealed = excluded.sealed`,
		d.MemberID, d.Parameter, d.SecretID, d.InstanceID, d.NodeID, sealed)
	return err
}

// Unreadable is delivered to a node that nothing can be sealed to.
func Unreadable() []byte { return []byte{} }

// IsDelivered reports whether the newest value for a parameter is stored already, and can be read. Sealed anew it would
// be another one, and replace the container that has it.
func IsDelivered(ctx context.Context, tx db.Tx, d Delivery) (bool, error) {
	return db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM runtime_secret_deliveries
		WHERE member_id = $1 AND parameter = $2 AND secret_id = $3 AND sealed <> ''::BYTEA)`, d.MemberID, d.Parameter,
		d.SecretID)
}

// Deliveries returns where a secret is delivered to, sorted by node.
func Deliveries(ctx context.Context, tx db.Tx, secretID string) ([]Delivery, error) {
	return db.Select(ctx, tx, func(row pgx.CollectableRow) (d Delivery, err error) {
		err = row.Scan(&d.MemberID, &d.Parameter, &d.SecretID, &d.InstanceID, &d.NodeID)
		return d, err
	}, `SELECT member_id, parameter, secret_id, instance_id, node_id FROM runtime_secret_deliveries
		WHERE secret_id = $1 ORDER BY node_id, member_id, parameter`, secretID)
}

// Forget deletes what was sealed for a member that is removed.
func Forget(ctx context.Context, tx db.Tx, memberID string) error {
	if err := tx.Queue(ctx, `DELETE FROM instance_identities WHERE member_id = $1`, memberID); err != nil {
		return err
	}
	return tx.Queue(ctx, `DELETE FROM runtime_secret_deliveries WHERE member_id = $1`, memberID)
}

// Fill puts the sealed values in place of the references to secrets, and to identities, in what nodes are to run.
func Fill(ctx context.Context, tx db.Tx, members []plan.Member) error {
	var ids []string
	for _, m := range members {
		if refers(m) || m.Fallback != nil && refers(*m.Fallback) {
			ids = append(ids, m.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	sealed := delivered{}
	_, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (to deliveredTo, err error) {
		var value sealedValue
		err = row.Scan(&to.memberID, &to.parameter, &to.name, &value.sealed, &value.version)
		sealed[to] = value
		return to, err
	}, `SELECT d.member_id, d.parameter, s.name, d.sealed, s.version FROM runtime_secret_deliveries d
		JOIN runtime_secrets s ON s.id = d.secret_id WHERE d.member_id = ANY($1::UUID[])
		UNION ALL SELECT member_id, $2::TEXT, '', sealed, 0 FROM instance_identities WHERE member_id = ANY($1::UUID[])`,
		ids, protocol.InstanceIdentityParameter)
	if err != nil {
		return err
	}
	for i := range members {
		if err := sealed.fill(&members[i]); err != nil {
			return err
		}
		if back := members[i].Fallback; back != nil {
			if err := sealed.fill(back); err != nil {
				return err
			}
		}
	}
	return nil
}

// delivered are the sealed values of members; name is empty for identities.
type (
	delivered   map[deliveredTo]sealedValue
	deliveredTo struct{ memberID, parameter, name string }
	sealedValue struct {
		sealed  []byte
		version uint64
	}
)

// fill puts the sealed values in place of a member's references, and notes which secrets they are of.
func (d delivered) fill(m *plan.Member) (err error) {
	values := map[string][]byte{}
	references := protocol.SecretReferences(m.ParametersJSON)
	for _, parameter := range slices.Sorted(maps.Keys(references)) {
		name := references[parameter]
		value, ok := d[deliveredTo{m.ID, parameter, name}]
		if !ok {
			continue
		}
		values[parameter] = value.sealed
		if name != "" {
			m.SecretReferences = append(m.SecretReferences, &protocol.SecretReference{
				Parameter: parameter, Name: name, Version: value.version,
			})
		}
	}
	if len(values) > 0 {
		m.ParametersJSON, err = protocol.WithSealed(m.ParametersJSON, values)
	}
	return err
}

// Adopt returns the secret of a name that a node holds a value of. Where the rows know none of that version, the value
// is lost to the hub: the secret is then revoked until a caller creates it anew, and known is false.
func Adopt(ctx context.Context, tx db.Tx, of Secret) (s Secret, known bool, err error) {
	s, err = ByName(ctx, tx, of.ProjectID, of.Name)
	switch {
	case err == nil && s.Version >= of.Version:
		return s, true, nil
	case fault.Is(err, fault.NotFound):
		of.CreatedAt = of.UpdatedAt
		s = of
	case err != nil:
		return Secret{}, false, err
	}
	s.Version, s.Status, s.ResourceVersion, s.UpdatedAt = of.Version, StatusRevoked, s.ResourceVersion+1, of.UpdatedAt
	// What a node holds is adopted beyond maxPerProject, too: refused, it would keep the whole node from its resync.
	return s, false, put(ctx, tx, s, []byte{})
}

func refers(m plan.Member) bool {
	return strings.Contains(m.ParametersJSON, protocol.SecretReferenceKey)
}
