package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
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
	if err := iam.Authorize(m.Principal, iam.JoinTokenWrite, "", ""); err != nil {
		return CreatedJoinToken{}, err
	}
	secret, err := fleet.NewJoinSecret()
	if err != nil {
		return CreatedJoinToken{}, err
	}
	id := db.NewID()
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (CreatedJoinToken, error) {
		return s.createJoinToken(ctx, tx, m, fleet.NewToken{
			ID: id, Secret: secret, Description: in.Description, CreatedBy: m.Principal.ID,
			TTL: in.TTL,
		})
	})
}

func (s *Service) createJoinToken(ctx context.Context, tx db.Tx, m Meta, in fleet.NewToken) (CreatedJoinToken, error) {
	return IdempotentSealed(ctx, tx, m, s.Sealer, func() (CreatedJoinToken, error) {
		t, err := fleet.CreateToken(ctx, tx, in, m.Now)
		if err != nil {
			return CreatedJoinToken{}, err
		}
		data := map[string]any{"expires_at": t.ExpiresAt, "description": t.Description}
		if err := event.Append(ctx, tx, event.Event{
			Type: "fleet.join_token.created", Subject: t.ID, ResourceVersion: 1, CorrelationID: m.CorrelationID,
			TraceID: m.TraceID, Data: data, At: m.Now,
		}); err != nil {
			return CreatedJoinToken{}, err
		}
		return CreatedJoinToken{Token: t, Secret: in.Secret}, event.Audit(ctx, tx, event.AuditRow{
			Actor: m.Principal.Actor(), Action: iam.JoinTokenWrite, ResourceType: resourceJoinToken,
			ResourceID:    t.ID,
			CorrelationID: m.CorrelationID, After: data, At: m.Now,
		})
	})
}
