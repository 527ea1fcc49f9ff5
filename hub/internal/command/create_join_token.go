package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreatedJoinToken holds the secret, which is shown this once.
type CreatedJoinToken struct {
	Token  fleet.JoinToken
	Secret string
}

// CreateJoinToken makes a one-time token that lets a node in. It sets the token's id, secret and maker.
func (s *Service) CreateJoinToken(ctx context.Context, m Meta, in fleet.NewToken) (_ CreatedJoinToken, err error) {
	if in.Secret, err = fleet.NewJoinSecret(); err != nil {
		return CreatedJoinToken{}, err
	}
	in.ID, in.CreatedBy = db.NewID(), m.Principal.ID
	check := access.Platform(m.Principal, iam.JoinTokenWrite)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, _ access.Nothing) (CreatedJoinToken, error) {
		t, err := fleet.CreateToken(ctx, tx, in, m.Now)
		if err != nil {
			return CreatedJoinToken{}, err
		}
		data := map[string]any{"expires_at": t.ExpiresAt, "description": t.Description}
		return CreatedJoinToken{Token: t, Secret: in.Secret}, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "fleet.join_token.created",
			Action:       iam.JoinTokenWrite,
			ResourceType: resourceJoinToken,
			ResourceID:   t.ID,
			Data:         data,
			After:        data,
		})
	})
}
