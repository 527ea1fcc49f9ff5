package periodic

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

var errInjected = errors.New("injected")

// Where rows fail and cannot even be set aside, the pass ends: the page that begins anew would be the same.
func TestAPassEndsWhenItCanSetNothingAside(t *testing.T) {
	d := dbtest.New(t)
	for name, c := range map[string]struct {
		asideOf  int
		listings int
	}{
		"none can be set aside": {asideOf: 0, listings: 1},
		"one can":               {asideOf: 1, listings: 2},
	} {
		t.Run(name, func(t *testing.T) {
			listings, asides := 0, 0
			_, err := pass[string]{
				Passes:   Passes{DB: d, Log: slog.New(slog.DiscardHandler)},
				now:      time.Now(),
				kind:     finding.Renewal,
				pageRows: 2,
				anew:     true,
				row:      func(string) ledger.Row { return ledger.Row{ID: db.NewID(), OrgID: "org", NodeID: db.NewID()} },
				list: func(_ context.Context, _ db.Tx, after *string) ([]string, error) {
					require.Nil(t, after)
					listings++
					if listings > 10 {
						return nil, errors.New("it lists the same page again and again")
					}
					return []string{"a", "b"}, nil
				},
				process: func(context.Context, db.Tx, string) (bool, error) { return false, errInjected },
				setAside: func(context.Context, db.Tx, string) error {
					if asides++; asides > c.asideOf {
						return errInjected
					}
					return nil
				},
			}.run(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.listings, listings)
		})
	}
}
