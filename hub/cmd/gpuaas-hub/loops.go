package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

const (
	sweepEvery    = 10 * time.Second
	sequenceEvery = time.Second
	// sequenceGather is how much later than its commit an event is seen at most where events happen all the time. A pass
	// costs about as much for one event as for ten.
	sequenceGather  = 20 * time.Millisecond
	accrueEvery     = time.Minute
	identitiesEvery = time.Minute
	postEvery       = time.Minute
	settleEvery     = time.Hour
	purgeEvery      = time.Hour
	collectEvery    = time.Hour
	deleteEvery     = time.Hour
	// rotateEvery leaves three passes to empty a slot of raw usage before it is written to again.
	rotateEvery = time.Hour
	// uploadsKept is how long an unfinished upload to the registry stays.
	uploadsKept = 24 * time.Hour
)

// loops are the periodic passes.
func (h *hub) loops() []*loop.Loop {
	sequencer := &event.Sequencer{DB: h.db, Holder: h.keys.HubID(), Now: time.Now}
	every := func(name string, interval time.Duration, pass func(context.Context, time.Time) error) *loop.Loop {
		return loop.New(name, interval, func(ctx context.Context) error { return pass(ctx, time.Now()) }, h.log)
	}
	passes := periodic.Passes{DB: h.db, Log: h.log}
	post := func(ctx context.Context, now time.Time) error {
		return passes.PostPending(ctx, h.conf.postingInterval, now)
	}
	settle := func(ctx context.Context, now time.Time) error {
		_, err := passes.SettleMembers(ctx, now)
		return err
	}
	started := time.Now()
	silent := func(ctx context.Context, now time.Time) error { return passes.MarkSilentMembers(ctx, started, now) }
	number := loop.New("sequencer", sequenceEvery, func(ctx context.Context) error {
		_, err := sequencer.Number(ctx)
		return err
	}, h.log).Gathering(sequenceGather)
	chain := loop.New("audit", sequenceEvery, func(ctx context.Context) error {
		_, err := sequencer.Chain(ctx)
		return err
	}, h.log)
	h.db.OnCommit(event.AppendedQueue, func(string) { number.Wake() })
	follow := loop.New("events", sequenceEvery, h.tail.Pass, h.log)
	h.db.OnCommit(event.NumberedQueue, func(string) { follow.Wake() })
	return append(h.dispatcher.Loops(), h.reloadDenyList, number, follow, chain,
		loop.New("sweep", min(sweepEvery, h.conf.resync), h.nodes.Sweep, h.log),
		every("accrue", accrueEvery, h.accrue),
		every("identities", min(identitiesEvery, h.conf.resync), h.renewIdentities),
		every("post", min(postEvery, h.conf.postingInterval), post),
		every("settle", settleEvery, settle),
		every("silent members", sweepEvery, silent),
		every("purge", purgeEvery, h.purge),
		every("bundle", bundleCheckEvery, h.checkBundle),
		loop.New("collect", collectEvery, h.collect, h.log),
		every("usage slots", rotateEvery, passes.RotateUsage),
		every("retention", deleteEvery, (&periodic.DeleteOld{Passes: passes, Retention: h.conf.retention}).Do),
	)
}

// accrue bills allocations and ends those without credit.
func (h *hub) accrue(ctx context.Context, now time.Time) error {
	last, err := db.ReadTx(ctx, h.db, func(tx db.Tx) (recovery.Restore, error) {
		last, _, err := recovery.Last(ctx, tx)
		return last, err
	})
	if err != nil {
		return err
	}
	return periodic.Passes{DB: h.db, Log: h.log}.AccrueAllocations(ctx, last.At, now)
}

// renewIdentities gives app instances the next key of their service account.
func (h *hub) renewIdentities(ctx context.Context, now time.Time) error {
	passes := periodic.Passes{DB: h.db, Log: h.log}
	return passes.RenewIdentities(ctx, change.Hub{URL: "https://" + h.apiAddr, CA: trust.HubCAPEM(h.keys.Bundle())}, now)
}

// collect removes what nothing refers to from the registry. A restored hub waits with it until it knows again what
// runs.
func (h *hub) collect(ctx context.Context) error {
	missed, err := db.ReadTx(ctx, h.db, func(tx db.Tx) ([]fleet.Node, error) { return fleet.Resyncing(ctx, tx) })
	if err != nil || len(missed) > 0 {
		return err
	}
	gone, err := h.registry.Collect(ctx)
	if gone != (artifact.Collected{}) {
		h.log.InfoContext(ctx, "the registry's garbage was removed", slog.Int("manifests", gone.Manifests),
			slog.Int("layers", gone.Layers),
			slog.Int("blobs", gone.Blobs), slog.Int64("bytes", gone.Bytes))
	}
	return err
}

// purge deletes expired idempotency keys and unfinished uploads.
func (h *hub) purge(ctx context.Context, now time.Time) error {
	_, keysErr := idempotency.Purge(ctx, h.db, now)
	_, uploadErr := h.registry.PurgeUploads(ctx, now.Add(-uploadsKept))
	return errors.Join(keysErr, uploadErr)
}
