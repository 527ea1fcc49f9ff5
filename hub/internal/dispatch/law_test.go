package dispatch_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
)

// failedFirst is a link without connections that holds up all nodes but one until the sync of that one has failed.
type failedFirst struct {
	dispatch.Link

	first  string
	failed chan struct{}
	once   sync.Once
}

func (f *failedFirst) Nodes() []string { return nil }

func (f *failedFirst) Acked(nodeID string) (nodelink.AckedState, bool) {
	if nodeID != f.first {
		select {
		case <-f.failed:
		case <-time.After(hubtest.Bound):
		}
	}
	return nodelink.AckedState{}, false
}

// Write takes the log, in which a sync that failed leaves a line.
func (f *failedFirst) Write(line []byte) (int, error) {
	f.once.Do(func() { close(f.failed) })
	return len(line), nil
}

// A node whose newest state cannot be read fails alone: those that are synced with it get theirs.
func TestLaw13ANodeThatCannotBeSyncedDelaysNoOther(t *testing.T) {
	h, bad, l := hubtest.NewWithNode(t)
	h.Launch()
	l.ExpectState(1)
	require.NoError(t, l.Conn.Close(0, "the node is away"))
	good := h.Enroll()
	good.Connect(hubtest.Hello("i1")).ExpectState(0)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (struct{}, error) {
		if _, err := tx.Exec(ctx, `UPDATE node_states SET envelope = '\xff'::BYTEA WHERE node_id = $1`, bad.ID); err != nil {
			return struct{}{}, err
		}
		_, err := tx.Exec(ctx, `UPDATE node_intents SET rev = rev + 1`)
		return struct{}{}, err
	})
	link := &failedFirst{first: bad.ID, failed: make(chan struct{})}
	d := dispatch.New(dispatch.Config{
		DB: h.DB, Keys: h.Keys, Link: link, SyncEvery: time.Hour, Now: h.Now, Log: slog.New(slog.NewTextHandler(link, nil)),
	})
	err := d.SyncAll(t.Context())
	current := func(nodeID string) int {
		return hubtest.Count(h, `SELECT count(*) FROM node_states s JOIN node_intents i ON i.node_id = s.node_id
			AND i.rev = s.rev WHERE s.node_id = $1`, nodeID)
	}
	require.Equal(t, 1, current(good.ID))
	require.Zero(t, current(bad.ID))
	require.NoError(t, err)
}
