// Package dispatch compiles, signs and pushes each node's desired state and leases. It owns the work queue of nodes and
// the signed states. The slices own the desired state, package plan compiles it, and package nodelink owns the
// connections.
//
// Enqueueing carries no data: processing a node reads everything again, and a periodic pass does so for all nodes. A
// lost entry of the queue costs a delay, nothing else.
package dispatch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
)

// DefaultLease is the duration of a lease when nothing else is configured.
const DefaultLease = 24 * time.Hour

// Keys are the hub's signing keys and its newest bundle.
type Keys interface {
	Bundle() protocol.Bundle
	// BundleAfter returns the newest bundle that may succeed the one with the version.
	BundleAfter(version uint64) protocol.Bundle
	State() protocol.Signer
	Lease() protocol.Signer
	// Reload reads the keys again and reports whether they changed.
	Reload() (bool, error)
}

// Link pushes documents to connected nodes and knows what they acknowledged.
type Link interface {
	Nodes() []string
	Acked(nodeID string) (nodelink.AckedState, bool)
	PushState(nodeID string, m *protocol.PushState, generation uint64, sha256 []byte)
	PushLeases(nodeID string, m *protocol.PushLeases, sha256 []byte)
	PushBundle(nodeID string, m *protocol.PushBundle)
}

// Config is what a Dispatcher needs.
type Config struct {
	DB   *db.DB
	Keys Keys
	Link Link
	// LeaseDuration of each lease; a thin wallet shortens it.
	LeaseDuration time.Duration
	// SyncEvery is the period of the pass over all nodes.
	SyncEvery time.Duration
	Now       func() time.Time
	Log       *slog.Logger
}

// Dispatcher keeps the nodes up to date.
type Dispatcher struct {
	Config

	queue                 queue
	process, all, renewal *loop.Loop

	signed, renewed, notRenewed metric.Int64Counter
}

// New makes a dispatcher with an empty queue, which the commits of transactions that change intents fill. Its Loops do
// the work.
func New(c Config) *Dispatcher {
	d := &Dispatcher{Config: c}
	d.process = loop.New("dispatch", c.SyncEvery, d.processQueue, c.Log)
	d.all = loop.New("resync", c.SyncEvery, d.SyncAll, c.Log)
	d.renewal = loop.New("renew", renewEvery(c.SyncEvery), d.Renew, c.Log)
	c.DB.OnCommit(fleet.IntentQueue, d.Enqueue)
	// An instrument that cannot be made counts nothing; its error would be a misspelt name.
	meter := otel.Meter("gpuaas/dispatch")
	d.signed, _ = meter.Int64Counter("gpuaas.states.signed", metric.WithDescription("Desired states that were signed "+
		"and saved."))
	d.renewed, _ = meter.Int64Counter("gpuaas.leases.renewed", metric.WithDescription("Leases that were renewed."))
	d.notRenewed, _ = meter.Int64Counter("gpuaas.leases.not_renewed",
		metric.WithDescription("Leases that were due and could not be renewed, mostly for lack of money."))
	return d
}

// renewEvery is the period of the pass over leases: with a long resync, leases of billing.MinLease would end before it.
func renewEvery(syncEvery time.Duration) time.Duration { return min(syncEvery, time.Minute) }

// Loops process the queue, sync all nodes and renew leases. None waits for another.
func (d *Dispatcher) Loops() []*loop.Loop { return []*loop.Loop{d.process, d.all, d.renewal} }

// Renew renews the leases of members that are due and enqueues their nodes.
func (d *Dispatcher) Renew(ctx context.Context) error {
	return (&periodic.RenewLeases{
		Passes:        periodic.Passes{DB: d.DB, Log: d.Log},
		LeaseDuration: d.LeaseDuration,
		Renewed: func(r ledger.Row) {
			d.renewed.Add(ctx, 1)
			d.Enqueue(r.NodeID)
		},
		NotRenewed: func(ledger.Row) { d.notRenewed.Add(ctx, 1) },
	}).Do(ctx, d.Now())
}

// Part returns a part of one of the node's newest states.
func (d *Dispatcher) Part(ctx context.Context, nodeID string, digest []byte) ([]byte, error) {
	if len(digest) != sha256.Size {
		return nil, protocol.Refuse(protocol.Nack_MALFORMED, "a digest has %d bytes", sha256.Size)
	}
	data, err := db.Query(ctx, d.DB, func(tx db.Tx) ([]byte, error) { return selectPart(ctx, tx, nodeID, digest) })
	if db.IsNoRows(err) {
		return nil, protocol.Refuse(protocol.Nack_UNKNOWN_PART, "no state of this node names the part %s",
			hex.EncodeToString(digest))
	}
	return data, err
}
