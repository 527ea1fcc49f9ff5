package command_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// A draft of an app that is out changes nothing that others see; publishing it does.
func TestADraftChangesNothingVisible(t *testing.T) {
	w := newWorld(t)
	app := func() (a catalog.App) {
		w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
			a, err = catalog.GetApp(ctx, tx, "demo")
			return err
		})
		return a
	}
	before := app()
	verified, env := w.Sign(strings.NewReplacer("version: 1.0.0", "version: 2.0.0", "display_name: A small app",
		"display_name: Changed").Replace(commandtest.Manifest()))
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := catalog.Register(ctx, tx, catalog.Registration{
			ID: db.NewID(), Verified: verified, Envelope: env,
			Now: w.Now,
		})
		return err
	})
	require.Equal(t, before, app())
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := catalog.SetStatus(ctx, tx, "demo", "2.0.0", catalog.Move{To: catalog.Active}, w.Now)
		return err
	})
	require.Equal(t, "Changed", app().DisplayName)
}
