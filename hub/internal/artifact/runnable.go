package artifact

import (
	"context"
	"strings"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// CheckRunnable refuses services with an image (repository@digest) that a new instance of the version must not run: it
// was trusted when the version became active, but trust can end. A version that may be launched anew names no
// deprecated artifact (Activate, Deprecate); one that may only start again can.
func CheckRunnable(ctx context.Context, tx db.Tx, appVersion string, services []*protocol.Service) error {
	var repositories, digests []string
	for _, s := range services {
		for _, image := range s.Images() {
			repository, digest, _ := strings.Cut(image, "@")
			repositories, digests = append(repositories, repository), append(digests, digest)
		}
	}
	refused, err := db.Value[bool](ctx, tx, `
		SELECT EXISTS (SELECT 1 FROM unnest($2::TEXT[], $3::TEXT[]) AS x(repository, digest) WHERE NOT EXISTS (
			SELECT 1 FROM artifacts a WHERE a.repository = x.repository AND a.digest = x.digest AND a.app_version = $1
			AND a.trust_state = $4 AND a.status IN ($5, $6)))`, appVersion, repositories, digests, Verified, Active,
		Deprecated)
	if err == nil && refused {
		err = fault.New(fault.Conflict, CodeNotVerified, "The version's image is not, or no longer, active and verified; "+
			"choose another version.", nil).
			WithField("/version", "has an image that may not be run").Permanent()
	}
	return err
}
