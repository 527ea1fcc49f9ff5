// Package dispatch brings to each node what is wanted of it: it compiles, checks, signs and saves desired states,
// renews and signs leases, and sends what a connected node does not hold yet. What is wanted is the slices' business,
// what a state looks like is package plan's, and the connections are session's.
//
// It is driven by wake-ups that carry no data and by a periodic pass; losing a wake-up costs a delay, nothing else.
package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// workers bounds how many nodes are brought up to date at once.
	workers = 8
	// DefaultLease is how long a lease runs when nothing else is configured.
	DefaultLease = 24 * time.Hour
)

// Keys are the hub's signing keys and its newest bundle.
type Keys interface {
	Bundle() protocol.Bundle
	// BundleAfter returns the newest bundle that may succeed the one with the version.
	BundleAfter(version uint64) protocol.Bundle
	State() protocol.Signer
	Lease() protocol.Signer
	// Reload reads them again and reports whether they changed.
	Reload() (bool, error)
}

// Link is what dispatch needs of the live connections.
type Link interface {
	Nodes() []string
	Held(nodeID string) (nodelink.Held, bool)
	PushState(nodeID string, m *protocol.PushState, generation uint64, sha256 []byte)
	PushLeases(nodeID string, m *protocol.PushLeases, sha256 []byte)
	PushBundle(nodeID string, m *protocol.PushBundle)
}

// Dispatcher brings nodes up to date.
type Dispatcher struct {
	DB   *db.DB
	Keys Keys
	Link Link
	// LeaseDuration of each lease; a thin wallet shortens it.
	LeaseDuration time.Duration
	Now           func() time.Time
	Log           *slog.Logger
	// Wake starts a pass soon.
	Wake func()

	mu sync.Mutex
	// woken are the nodes to look at in the next pass, with the lowest generation that will do. Only a hint: the periodic
	// pass looks at all.
	woken map[string]uint64

	signed, renewed, notRenewed metric.Int64Counter
}

// New completes a dispatcher of which the exported fields are set; Wake may be set later.
func New(d *Dispatcher) *Dispatcher {
	// An instrument that cannot be made counts nothing; its error would be a misspelt name.
	meter := otel.Meter("gpuaas/dispatch")
	d.signed, _ = meter.Int64Counter("gpuaas.states.signed", metric.WithDescription("Desired states that were signed "+
		"and saved."))
	d.renewed, _ = meter.Int64Counter("gpuaas.leases.renewed", metric.WithDescription("Leases that were renewed."))
	d.notRenewed, _ = meter.Int64Counter("gpuaas.leases.not_renewed",
		metric.WithDescription("Leases that were due and could not be renewed, mostly for lack of money."))
	return d
}

// Poke says that something about the node may have changed.
func (d *Dispatcher) Poke(nodeID string) { d.Raise(nodeID, 0) }

// Raise says that the node must get a generation of at least floor: it holds one that this hub does not know of.
func (d *Dispatcher) Raise(nodeID string, floor uint64) {
	d.mu.Lock()
	if d.woken == nil {
		d.woken = map[string]uint64{}
	}
	d.woken[nodeID] = max(d.woken[nodeID], floor)
	d.mu.Unlock()
	d.Wake()
}

func (d *Dispatcher) takeWoken() map[string]uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	woken := d.woken
	d.woken = nil
	return woken
}

// Woken looks at the nodes that were poked.
func (d *Dispatcher) Woken(ctx context.Context) error { return d.each(ctx, d.takeWoken()) }

// Resync looks at everything: the keys, nodes whose state is not what is wanted, connected nodes that lack something.
func (d *Dispatcher) Resync(ctx context.Context) error {
	changed, err := d.Keys.Reload()
	if err != nil {
		// The keys of the moment go on working.
		d.Log.ErrorContext(ctx, "keys cannot be read again", slog.Any("error", err))
	}
	if changed {
		d.Log.InfoContext(ctx, "new trust bundle", slog.Uint64("version", d.Keys.Bundle().Version()))
	}
	nodes, err := db.ReadTx(ctx, d.DB, func(tx db.Tx) ([]string, error) {
		return pending(ctx, tx, d.Keys.State().KeyID())
	})
	if err != nil {
		return err
	}
	all := d.takeWoken()
	if all == nil {
		all = map[string]uint64{}
	}
	for _, id := range nodes {
		all[id] = max(all[id], 0)
	}
	if err := d.addLacking(ctx, d.Link.Nodes(), all); err != nil {
		return err
	}
	return d.each(ctx, all)
}

// each brings nodes up to date. One node's trouble is logged and does not stop the others; the next pass tries again.
func (d *Dispatcher) each(ctx context.Context, nodes map[string]uint64) error {
	if len(nodes) == 0 {
		return nil
	}
	waiting, err := d.waiting(ctx)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(workers)
	for id, floor := range nodes {
		if waiting[id] {
			continue
		}
		group.Go(func() error {
			if err := d.node(ctx, id, floor); err != nil && ctx.Err() == nil {
				d.Log.WarnContext(ctx, "node not brought up to date", slog.String("node_id", id), slog.Any("error", err))
				if errors.Is(err, errMoved) {
					// Many changes at once: the next look is due now and not at the next resync.
					d.Raise(id, floor)
				}
			}
			return nil
		})
	}
	_ = group.Wait()
	return ctx.Err()
}

// waiting are the nodes that have not brought yet what they accepted before this hub was restored: compiled from the
// restored rows, a state might stop what is newer. When one has, dispatch is woken for it.
func (d *Dispatcher) waiting(ctx context.Context) (map[string]bool, error) {
	nodes, err := db.Look(ctx, d.DB, func(tx db.Tx) ([]recovery.Node, error) { return recovery.Nodes(ctx, tx) })
	waiting := map[string]bool{}
	for _, n := range nodes {
		waiting[n.NodeID] = n.Waiting
	}
	return waiting, err
}

// node makes the state of one node say what is wanted and sends what the node lacks. Leases go first and depend on
// nothing else: what runs must go on while the state cannot be made. A quarantined node gets nothing.
func (d *Dispatcher) node(ctx context.Context, nodeID string, floor uint64) error {
	held, connected := d.Link.Held(nodeID)
	l, err := d.look(ctx, nodeID, held, connected, floor)
	if fault.Is(err, fault.NotFound) || errors.Is(err, errQuarantined) {
		return nil
	}
	if err != nil {
		return err
	}
	if connected {
		if held.BundleVersion < d.Keys.Bundle().Version() {
			d.Link.PushBundle(nodeID, &protocol.PushBundle{Envelope: d.Keys.BundleAfter(held.BundleVersion).Envelope()})
		}
		if err := d.pushLeases(nodeID, held, l.leases); err != nil {
			return err
		}
	}
	if !l.settled {
		if l.head, err = d.bring(ctx, l.seen, l.floor); fault.Is(err, fault.NotFound) || errors.Is(err, errQuarantined) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	if connected && (held.Epoch != l.epoch || held.Generation != l.generation || !bytes.Equal(held.StateSHA256,
		l.sha256)) {
		return d.pushState(ctx, nodeID)
	}
	return nil
}

func (d *Dispatcher) pushState(ctx context.Context, nodeID string) error {
	var m *protocol.PushState
	doc, err := db.ReadTx(ctx, d.DB, func(tx db.Tx) (document, error) {
		doc, err := load(ctx, tx, nodeID)
		if err != nil {
			return document{}, err
		}
		m = &protocol.PushState{Envelope: doc.envelope}
		m.Parts, err = parts(ctx, tx, doc, protocol.MaxPushPartsBytes)
		return doc, err
	})
	if err != nil {
		return err
	}
	failpoint.Hit("hub/dispatch/loaded")
	d.Link.PushState(nodeID, m, doc.generation, doc.sha256)
	failpoint.Hit("hub/dispatch/pushed")
	return nil
}

// pushLeases sends the node's leases when they are not the ones that were sent last on this connection.
func (d *Dispatcher) pushLeases(nodeID string, held nodelink.Held, leases []*protocol.Lease) error {
	signer := d.Keys.Lease()
	batch, sum, err := d.leaseBatch(nodeID, held, leases, signer)
	if err != nil || bytes.Equal(sum, held.LeasesSHA256) {
		return err
	}
	batch.IssuedAt = timestamppb.New(d.Now())
	env, err := protocol.SignMessage(protocol.PayloadLeases, batch, signer)
	if err != nil {
		return err
	}
	failpoint.Hit("hub/leases/signed")
	d.Link.PushLeases(nodeID, &protocol.PushLeases{Envelope: env}, sum)
	return nil
}

// leaseBatch is what a node is to hold, with the digest that tells it from what was pushed; that is nil where nothing
// has to be.
func (d *Dispatcher) leaseBatch(nodeID string, held nodelink.Held, leases []*protocol.Lease,
	signer protocol.Signer,
) (*protocol.LeaseBatch, []byte, error) {
	if len(leases) == 0 && len(held.LeasesSHA256) == 0 {
		return nil, nil, nil
	}
	batch := &protocol.LeaseBatch{
		NodeId: nodeID, Incarnation: held.Incarnation, Epoch: d.Keys.Bundle().Epoch(),
		Leases: leases,
	}
	content, err := proto.MarshalOptions{Deterministic: true}.Marshal(batch)
	if err != nil {
		return nil, nil, err
	}
	sum := sha256.Sum256(append(content, signer.KeyID()...))
	return batch, sum[:], nil
}

// Renew gives members that are due their next lease and wakes dispatch for their nodes. It is a periodic pass beside
// Resync: neither waits for the other.
func (d *Dispatcher) Renew(ctx context.Context) error {
	return (&command.RenewLeases{
		DB: d.DB, LeaseDuration: d.LeaseDuration, Log: d.Log,
		Renewed: func(r ledger.Row) {
			d.renewed.Add(ctx, 1)
			d.Poke(r.NodeID)
		},
		NotRenewed: func(ledger.Row) { d.notRenewed.Add(ctx, 1) },
	}).Do(ctx, d.Now())
}

// Part returns a part of one of the node's newest states.
func (d *Dispatcher) Part(ctx context.Context, nodeID string, digest []byte) ([]byte, error) {
	if len(digest) != sha256.Size {
		return nil, protocol.Refuse(protocol.RefusalMalformed, "a digest has %d bytes", sha256.Size)
	}
	data, err := db.Look(ctx, d.DB, func(tx db.Tx) ([]byte, error) { return part(ctx, tx, nodeID, digest) })
	if db.IsNoRows(err) {
		return nil, protocol.Refuse(protocol.RefusalUnknownPart, "no state of this node names the part %s",
			hex.EncodeToString(digest))
	}
	return data, err
}
