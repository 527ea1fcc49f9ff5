package httpapi

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// TokenAuthenticator knows users and service accounts by their tokens. It asks the database each time: a token that was
// revoked a moment ago does not count any more.
type TokenAuthenticator struct {
	DB *db.DB
	// Proofs spares verifying the signature of a token again; what may be revoked is not in it. It may be nil.
	Proofs *iam.Proofs
}

// Authenticate finds out who presents the token.
func (a TokenAuthenticator) Authenticate(ctx context.Context, bearer string, now time.Time) (iam.Principal, error) {
	return db.Query(ctx, a.DB, func(tx db.Tx) (iam.Principal, error) {
		return iam.Authenticate(ctx, tx, a.Proofs, bearer, now)
	})
}
