package secret

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/crypto/ssh"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Credential is an SSH key pair of a project, with which its apps or operators reach machines.
type Credential struct {
	ID, OrgID, ProjectID, Name string
	// PublicKey is a line of authorized_keys.
	PublicKey string
	// Version grows with each key.
	Version         int64
	Status          string
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
}

// NewSSHKey makes an Ed25519 key pair in the formats of OpenSSH.
func NewSSHKey(comment string) (public string, private []byte, err error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", nil, fmt.Errorf("make an SSH key: %w", err)
	}
	line, err := ssh.NewPublicKey(pub)
	if err != nil {
		return "", nil, fmt.Errorf("encode an SSH key: %w", err)
	}
	block, err := ssh.MarshalPrivateKey(key, comment)
	if err != nil {
		return "", nil, fmt.Errorf("encode an SSH key: %w", err)
	}
	text := strings.TrimSuffix(string(ssh.MarshalAuthorizedKey(line)), "\n")
	return text + " " + comment, pem.EncodeToMemory(block), nil
}

const keyColumns = `c.id, c.org_id, c.project_id, c.name, c.public_key, c.version, c.status, c.resource_version,
	c.created_at, c.updated_at`

func scanCredential(row pgx.CollectableRow) (c Credential, err error) {
	err = row.Scan(&c.ID, &c.OrgID, &c.ProjectID, &c.Name, &c.PublicKey, &c.Version, &c.Status, &c.ResourceVersion,
		&c.CreatedAt, &c.UpdatedAt)
	return c, err
}

// GetCredential reads an access credential of a project.
func GetCredential(ctx context.Context, tx db.Tx, projectID, id string) (Credential, error) {
	c, err := db.SelectOne(ctx, tx, scanCredential, `SELECT `+keyColumns+
		` FROM access_credentials c WHERE c.project_id = $1 AND c.id = $2`, projectID, id)
	if db.IsNoRows(err) {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "There is no such access credential.", err)
	}
	return c, err
}

// ListCredentials returns a page of the access credentials of a project, the oldest first.
func ListCredentials(ctx context.Context, tx db.Tx, projectID string, page db.Page) ([]Credential, error) {
	return db.Select(ctx, tx, scanCredential, `SELECT `+keyColumns+` FROM access_credentials c
		WHERE c.project_id = $1 AND ($2::UUID IS NULL OR c.id > $2::UUID) ORDER BY c.id LIMIT $3`,
		projectID, db.OrNull(page.After), page.Limit)
}

// CreateCredential stores a credential; it relies on the unique index on the names of active ones.
func CreateCredential(ctx context.Context, tx db.Tx, c Credential) error {
	has, err := db.Value[int64](ctx, tx, `SELECT count(*) FROM access_credentials WHERE project_id = $1
		AND status = 'active'`, c.ProjectID)
	if err != nil {
		return err
	}
	if has >= maxPerProject {
		return fault.New(fault.Conflict, codeTooMany, "The project has its 1000 access credentials; revoke some.", nil)
	}
	tag, err := tx.Exec(ctx, `INSERT INTO access_credentials (id, org_id, project_id, name, public_key, version, status,
			resource_version, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
		ON CONFLICT DO NOTHING`, c.ID, c.OrgID, c.ProjectID, c.Name, c.PublicKey, c.Version, c.Status, c.ResourceVersion,
		c.CreatedAt, c.UpdatedAt)
	if err == nil && tag.RowsAffected() == 0 {
		return fault.New(fault.Conflict, codeCredentialExists, "The project has an access credential of this name.", nil).
			WithField("/name", "is taken").Permanent()
	}
	return err
}

// TouchCredential counts an event of a credential that changes nothing else of it.
func TouchCredential(ctx context.Context, tx db.Tx, c Credential) error {
	return tx.Queue(ctx, `UPDATE access_credentials SET resource_version = $2, updated_at = $3 WHERE id = $1`, c.ID,
		c.ResourceVersion, c.UpdatedAt)
}

// UpdateCredential stores a credential with another key or status. Wrapping tokens of its older keys end.
func UpdateCredential(ctx context.Context, tx db.Tx, c Credential) error {
	if err := tx.Queue(ctx, `DELETE FROM wrapping_tokens WHERE credential_id = $1 AND used_at IS NULL`, c.ID); err != nil {
		return err
	}
	return tx.Queue(ctx, `UPDATE access_credentials SET public_key = $2, version = $3, status = $4,
		resource_version = $5, updated_at = $6 WHERE id = $1`, c.ID, c.PublicKey, c.Version, c.Status, c.ResourceVersion,
		c.UpdatedAt)
}
