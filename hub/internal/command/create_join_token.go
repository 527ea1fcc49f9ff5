package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateJoinTokenInput is what the caller may choose.
type CreateJoinTokenInput struct {
	Description string
	// TTL of 0 means fleet.DefaultTokenTTL.
	TTL time.Duration
}

// CreatedJoinToken holds the secret, which is shown this once.
type CreatedJoinToken struct {
	Token  fleet.JoinToken
	Secret string
}

// CreateJoinToken makes a one-time token that lets a node in.
func (s *Service) CreateJoinToken(ctx context.Context, m Meta, in CreateJoinTokenInput) (CreatedJoinToken, error) {
	secret, err := fleet.NewJoinSecret()
	if err != nil {
		return CreatedJoinToken{}, err
	}
	id := db.NewID()
	check := access.Platform(m.Principal, iam.JoinTokenWrite)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, _ access.Nothing) (CreatedJoinToken, error) {
		t, err := fleet.CreateToken(ctx, tx, fleet.NewToken{
			ID:          id,
			Secret:      secret,
			Description: in.Description,
			CreatedBy:   m.Principal.ID,
			TTL:         in.TTL,
		}, m.Now)
		if err != nil {
			return CreatedJoinToken{}, err
		}
		data := map[string]any{"expires_at": t.ExpiresAt, "description": t.Description}
		return CreatedJoinToken{Token: t, Secret: secret}, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "fleet.join_token.created",
			Action:       iam.JoinTokenWrite,
			ResourceType: resourceJoinToken,
			ResourceID:   t.ID,
			Data:         data,
			After:        data,
		})
	})
}
