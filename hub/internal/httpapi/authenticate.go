package httpapi

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// TokenAuthenticator knows users and service accounts by their tokens. A token that was revoked a moment ago does not
// count any more.
type TokenAuthenticator struct {
	DB *db.DB
	// Proofs spares verifying the signature of a token again; what may be revoked is not in it. It may be nil.
	Proofs *iam.Proofs
	// Cache spares asking the database; it may be nil.
	Cache *iam.PrincipalCache
}

// Authenticate finds out who presents the token.
func (a TokenAuthenticator) Authenticate(ctx context.Context, bearer string, now time.Time) (iam.Principal, error) {
	return db.Query(ctx, a.DB, func(tx db.Tx) (iam.Principal, error) {
		return iam.Authenticate(ctx, tx, a.Proofs, a.Cache, bearer, now)
	})
}
