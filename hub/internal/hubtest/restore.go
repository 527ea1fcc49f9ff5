package hubtest

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/protocol"
)

// BackupRows is a backup of the rows.
type BackupRows struct {
	Versions []int64
	Tables   []db.Table
	Rows     [][]byte
}

// Backup takes a backup of the rows.
func (h *Hub) Backup() (r BackupRows) {
	h.T.Helper()
	require.NoError(h.T, db.WithDump(h.T.Context(), h.DB, func(d *db.Dump) error {
		r.Versions, r.Tables = d.Versions, d.Tables
		for _, t := range d.Tables {
			var rows bytes.Buffer
			if _, err := d.Copy(h.T.Context(), t, &rows); err != nil {
				return err
			}
			r.Rows = append(r.Rows, rows.Bytes())
		}
		return nil
	}))
	return r
}

// Restore is a hub that came back from these rows, with a new epoch.
func (h *Hub) Restore(r BackupRows) *Hub {
	t := h.T
	t.Helper()
	d, err := db.Open(t.Context(), dbtest.EmptyURL(t))
	require.NoError(t, err)
	t.Cleanup(d.Close)
	next := -1
	require.NoError(t, db.Load(t.Context(), d, r.Versions, func() (db.Table, io.Reader, bool, error) {
		if next++; next == len(r.Tables) {
			return db.Table{}, nil, false, nil
		}
		return r.Tables[next], bytes.NewReader(r.Rows[next]), true, nil
	}))
	bundle, err := trust.NewEpoch(trust.EpochOptions{
		TrustDir: filepath.Join(h.TrustInit.DataDir, "trust"), Root: trust.RootKey(filepath.Join(h.TrustInit.OfflineDir,
			trust.RootKeyFile), Passphrase), Now: time.Now(),
	})
	require.NoError(t, err)
	require.NoError(t, recovery.Begin(t.Context(), d, recovery.Restore{
		ID: db.NewID(), BackupID: db.NewID(), TakenAt: h.Now(), Epoch: bundle.Epoch(), At: h.Now().Truncate(time.Microsecond),
	}))
	return (&Hub{T: t, DB: d, TrustInit: h.TrustInit, Project: h.Project, User: h.User, offset: h.offset}).Start()
}

// Instance reads an instance.
func (h *Hub) Instance(id string) instance.Instance {
	h.T.Helper()
	return Tx(h, func(ctx context.Context, tx db.Tx) (instance.Instance, error) {
		return instance.Get(ctx, tx, h.Project.ID, id)
	})
}

// Findings returns the kinds of the findings by resource.
func (h *Hub) Findings() map[string]string {
	h.T.Helper()
	out := map[string]string{}
	for _, f := range Tx(h, func(ctx context.Context, tx db.Tx) ([]finding.Finding, error) {
		return finding.List(ctx, tx)
	}) {
		out[f.Kind] = f.ResourceID
	}
	return out
}

// SignedLeases is the newest batch for the node, signed as the hub signs it.
func (h *Hub) SignedLeases(l *Session) *protocol.Envelope {
	h.T.Helper()
	list := Tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, l.Node.ID)
	})
	return h.SignLeases(l, list...)
}

// SignLeases signs a batch of leases for the node, as the hub does.
func (h *Hub) SignLeases(l *Session, list ...*protocol.Lease) *protocol.Envelope {
	h.T.Helper()
	env, err := protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{
		NodeId: l.Node.ID, Incarnation: "i1",
		Epoch: 1, IssuedAt: timestamppb.Now(), Leases: list,
	}, h.Keys.Lease())
	require.NoError(h.T, err)
	return env
}
