package fleet

import (
	"context"
	"crypto/ed25519"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Adopt adds a node that a restored hub does not know; its certificate, which the caller has verified, proves that it
// was enrolled. It joins the default site, which is created with newSiteID where it does not exist.
func Adopt(ctx context.Context, tx db.Tx, nodeID string, key ed25519.PublicKey, newSiteID string, now time.Time) error {
	site, err := defaultSite(ctx, tx, newSiteID, now)
	if err != nil {
		return err
	}
	return insertNode(ctx, tx, Node{ID: nodeID, SiteID: site, PublicKey: key, CertificateExpiresAt: now}, now)
}
