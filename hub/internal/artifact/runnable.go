package artifact

import (
	"context"
	"strings"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// CheckRunnable refuses an image reference (repository@digest) that a new instance of the version must not run: it was
// trusted when the version became active, but trust can end.
func CheckRunnable(ctx context.Context, tx db.Tx, appVersion, ref string) error {
	repository, digest, _ := strings.Cut(ref, "@")
	a, found, err := selectOne(ctx, tx, repository, digest, appVersion)
	switch {
	case err != nil:
		return err
	case !found || a.TrustState != Verified || a.Status != Active:
		return fault.New(fault.Conflict, CodeNotVerified, "The version's image is not, or no longer, active and verified; "+
			"choose another version.", nil).
			WithField("/version", "has an image that may not be run").Permanent()
	}
	return nil
}
