package command

import (
	"cmp"
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// actionMint is audited, though no permission stands before it: the proof is the permission.
const actionMint = "iam.service_account.mint_token"

// MintToken exchanges a service account's proof for a short-lived token. It changes no resource, so there is an audit
// row but no event.
func (s *Service) MintToken(ctx context.Context, m Meta, proof iam.Proof) (iam.AccessToken, error) {
	id := db.NewID()
	return run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (iam.AccessToken, error) {
		token, err := iam.Mint(ctx, tx, proof, s.Sealer, id, cmp.Or(s.TokenTTL, iam.DefaultTokenTTL), m.Now)
		if err != nil {
			return iam.AccessToken{}, err
		}
		by := m.by()
		by.Actor = principal.Actor{Type: principal.ServiceAccount, ID: token.Account.ID}
		return token, change.Audit(ctx, tx, by, change.Entry{
			Action:       actionMint,
			ResourceType: resourceServiceAccount,
			ResourceID:   token.Account.ID,
			OrgID:        token.Account.OrgID,
			ProjectID:    token.Account.ProjectID,
			After:        map[string]any{"key_id": token.KeyID, "jti": id, "expires_at": token.ExpiresAt},
		})
	})
}
