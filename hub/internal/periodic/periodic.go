// Package periodic holds the passes over rows that the hub makes by itself: it bills open allocations and ends those
// that nobody pays for, renews leases, settles members, posts usage, archives raw usage and deletes old rows. A row
// that fails is set aside with a finding and holds up no other. When a pass runs is the caller's, the rules are the
// slices'.
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
