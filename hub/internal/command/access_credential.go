package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// WrappedCredential is a credential with the wrapping token of its new private key; without one where none was made.
type WrappedCredential struct {
	Credential secret.Credential
	Token      string
	ExpiresAt  time.Time
}

// CreateAccessCredential makes a key pair for a project.
func (s *Service) CreateAccessCredential(ctx context.Context, m Meta, projectID, name string,
) (WrappedCredential, error) {
	public, private, err := secret.NewSSHKey(name)
	if err != nil {
		return WrappedCredential{}, err
	}
	check := access.Project(m.Principal, iam.AccessCredentialManage, projectID)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, project iam.Project) (WrappedCredential, error) {
		c := secret.Credential{
			ID: db.NewID(), OrgID: project.OrgID, ProjectID: project.ID, Name: name, PublicKey: public, Version: 1,
			Status: secret.StatusActive, ResourceVersion: 1, CreatedAt: m.Now, UpdatedAt: m.Now,
		}
		if err := secret.CreateCredential(ctx, tx, c); err != nil {
			return WrappedCredential{}, err
		}
		if err := m.recordCredential(ctx, tx, "iam.access_credential.created", c); err != nil {
			return WrappedCredential{}, err
		}
		return s.wrap(ctx, tx, m, c, private)
	})
}

// RotateAccessCredential replaces the key pair of a credential.
func (s *Service) RotateAccessCredential(ctx context.Context, m Meta, projectID, id string) (WrappedCredential, error) {
	check := credentialToChange(m, projectID, id)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, c secret.Credential) (WrappedCredential, error) {
		if c.Status == secret.StatusRevoked {
			return WrappedCredential{}, fault.New(fault.Conflict, codeCredentialRevoked, "The access credential is revoked; "+
				"create another one.", nil).Permanent()
		}
		public, private, err := secret.NewSSHKey(c.Name)
		if err != nil {
			return WrappedCredential{}, err
		}
		c.PublicKey, c.Version, c.ResourceVersion, c.UpdatedAt = public, c.Version+1, c.ResourceVersion+1, m.Now
		if err := secret.UpdateCredential(ctx, tx, c); err != nil {
			return WrappedCredential{}, err
		}
		if err := m.recordCredential(ctx, tx, "iam.access_credential.rotated", c); err != nil {
			return WrappedCredential{}, err
		}
		return s.wrap(ctx, tx, m, c, private)
	})
}

// RevokeAccessCredential ends a credential. A revoked one stays as it is.
func (s *Service) RevokeAccessCredential(ctx context.Context, m Meta, projectID, id string) (secret.Credential, error) {
	check := credentialToChange(m, projectID, id)
	return once(ctx, s, m, check, func(tx db.Tx, c secret.Credential) (secret.Credential, error) {
		if c.Status == secret.StatusRevoked {
			return c, nil
		}
		c.Status, c.ResourceVersion, c.UpdatedAt = secret.StatusRevoked, c.ResourceVersion+1, m.Now
		if err := secret.UpdateCredential(ctx, tx, c); err != nil {
			return c, err
		}
		return c, m.recordCredential(ctx, tx, "iam.access_credential.revoked", c)
	})
}

func credentialToChange(m Meta, projectID, id string) access.Check[secret.Credential] {
	inProject := access.Project(m.Principal, iam.AccessCredentialManage, projectID)
	return func(ctx context.Context, tx db.Tx) (secret.Credential, error) {
		project, err := inProject(ctx, tx)
		if err != nil {
			return secret.Credential{}, err
		}
		return secret.GetCredential(ctx, tx, project.ID, id)
	}
}

// wrap seals a private key in a wrapping token of the caller.
func (s *Service) wrap(ctx context.Context, tx db.Tx, m Meta, c secret.Credential, private []byte,
) (WrappedCredential, error) {
	text := secret.NewToken()
	t := secret.WrappingToken{
		ID: db.NewID(), CredentialID: c.ID, Requester: m.Principal.Actor(), ExpiresAt: m.Now.Add(secret.WrappingTokenTTL),
	}
	var err error
	if t.Sealed, err = s.Sealer.Seal(private, t.AAD()); err != nil {
		return WrappedCredential{}, err
	}
	return WrappedCredential{c, text, t.ExpiresAt}, secret.CreateToken(ctx, tx, t, text, m.Now)
}

// Unwrapped is a credential with its private key.
type Unwrapped struct {
	Credential    secret.Credential
	PrivateKeyPEM string
}

// Unwrap gives out what a wrapping token wraps: once, in its time, to who asked for it. A second use, and a use by
// another principal, is recorded as a misuse: others know it. A use by another principal ends the token.
func (s *Service) Unwrap(ctx context.Context, m Meta, text string) (Unwrapped, error) {
	var refusal error
	out, err := run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (out Unwrapped, err error) {
		refusal = nil
		t, c, err := secret.OfToken(ctx, tx, text)
		if err != nil {
			return out, err
		}
		switch {
		case t.Requester != m.Principal.Actor():
			refusal = secret.ErrTokenInvalid()
			if err := secret.EndToken(ctx, tx, t.ID, m.Now); err != nil {
				return out, err
			}
			return out, m.recordMisuse(ctx, tx, c, t.ID, "not_the_requester")
		case !t.UsedAt.IsZero():
			refusal = fault.New(fault.Conflict, codeWrappingTokenUsed, "The wrapping token was used before: rotate the access "+
				"credential, its key may be known to others.", nil).Permanent()
			return out, m.recordMisuse(ctx, tx, c, t.ID, "used_again")
		case !m.Now.Before(t.ExpiresAt):
			return out, fault.New(fault.Conflict, codeWrappingTokenExpired, "The wrapping token has expired: rotate the access "+
				"credential.", nil).Permanent()
		}
		if _, err := iam.InProject(ctx, tx, m.Principal, iam.AccessCredentialManage, c.ProjectID); err != nil {
			return out, err
		}
		private, err := s.Sealer.Open(t.Sealed, t.AAD())
		if err != nil {
			return out, err
		}
		if err := secret.EndToken(ctx, tx, t.ID, m.Now); err != nil {
			return out, err
		}
		return Unwrapped{c, string(private)}, change.Audit(ctx, tx, m.by(), change.Entry{
			Action:       "iam.access_credential.unwrap",
			ResourceType: resourceAccessCredential,
			ResourceID:   c.ID,
			OrgID:        c.OrgID,
			ProjectID:    c.ProjectID,
			After:        map[string]any{"version": c.Version, "wrapping_token_id": t.ID},
		})
	})
	if err == nil {
		err = refusal
	}
	return out, err
}

// recordMisuse is committed although the request is refused.
func (m Meta) recordMisuse(ctx context.Context, tx db.Tx, c secret.Credential, tokenID, reason string) error {
	c.ResourceVersion, c.UpdatedAt = c.ResourceVersion+1, m.Now
	if err := secret.TouchCredential(ctx, tx, c); err != nil {
		return err
	}
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        "security.wrapping_token.misused",
		Action:       "iam.access_credential.unwrap",
		ResourceType: resourceAccessCredential,
		ResourceID:   c.ID,
		Version:      c.ResourceVersion,
		OrgID:        c.OrgID,
		ProjectID:    c.ProjectID,
		Reason:       reason,
		Data:         map[string]any{"name": c.Name, "wrapping_token_id": tokenID, "reason": reason},
	})
}

func (m Meta) recordCredential(ctx context.Context, tx db.Tx, event string, c secret.Credential) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        event,
		Action:       iam.AccessCredentialManage,
		ResourceType: resourceAccessCredential,
		ResourceID:   c.ID,
		Version:      c.ResourceVersion,
		OrgID:        c.OrgID,
		ProjectID:    c.ProjectID,
		Data:         map[string]any{"name": c.Name, "version": c.Version},
		After:        map[string]any{"name": c.Name, "version": c.Version, "status": c.Status, "public_key": c.PublicKey},
	})
}
