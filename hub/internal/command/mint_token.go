package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// actionMint is audited, though no permission stands before it: the proof is the permission.
const actionMint = "iam.service_account.mint_token"

// MintToken exchanges a service account's proof for a short-lived token. It changes no resource, so there is an audit
// row but no event.
func (s *Service) MintToken(ctx context.Context, m Meta, proof iam.Proof) (iam.AccessToken, error) {
	id := db.NewID()
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.AccessToken, error) {
		token, err := iam.Mint(ctx, tx, proof, s.Sealer, id, m.Now)
		if err != nil {
			return iam.AccessToken{}, err
		}
		return token, event.Audit(ctx, tx, event.AuditRow{
			Actor: principal.Actor{Type: principal.ServiceAccount, ID: token.Account.ID}, Action: actionMint,
			ResourceType: resourceServiceAccount, ResourceID: token.Account.ID,
			OrgID: token.Account.OrgID, ProjectID: token.Account.ProjectID, CorrelationID: m.CorrelationID,
			After: map[string]any{"key_id": token.KeyID, "jti": id, "expires_at": token.ExpiresAt}, At: m.Now,
		})
	})
}
