// Package periodic holds the hub's periodic passes: accruing and releasing unpaid allocations, renewing leases,
// settling members, posting usage, archiving raw usage and deleting old rows. A row that fails is set aside with a
// finding and delays no other. The caller decides when a pass runs; the slices own the rules.
package periodic

import (
	"log/slog"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Passes are those that need nothing else. Each may run in several processes at once.
type Passes struct {
	DB  *db.DB
	Log *slog.Logger
}
