package dispatch_test

import (
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
)

// An instance that came and went before the dispatcher saw it was in no state: the newest is already without it.
func TestAnInstanceThatWasInNoStateEndsWithTheNextReport(t *testing.T) {
	w, base := commandtest.New(t), t.TempDir()
	data := filepath.Join(base, "data")
	_, err := trust.Init(trust.InitOptions{
		DataDir: data, OfflineDir: filepath.Join(base, "keys"), TrustDomain: "gpuaas.test",
		Passphrase: hubtest.Passphrase, Now: w.Now, ScryptWorkFactor: 8,
	})
	require.NoError(t, err)
	keys, err := trust.Open(data)
	require.NoError(t, err)
	d := dispatch.New(dispatch.Config{
		DB: w.DB, Keys: keys, Link: nodelink.NewServer(nodelink.Options{}), LeaseDuration: time.Hour, SyncEvery: time.Hour,
		Now: func() time.Time { return w.Now }, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, d.SyncAll(t.Context()))

	w.Allocation()
	i := w.Instance()
	_, err = w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.NoError(t, d.SyncAll(t.Context()))
	w.Report(1)
	require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
}
