package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// nodeSync is what one read transaction found about a node that is to be synced.
type nodeSync struct {
	// header is of the newest state; current says that it is compiled from the latest intent.
	header  stateHeader
	current bool
	// minGeneration is the lowest generation that a new state must have.
	minGeneration uint64
	leases        []*protocol.Lease
	// snapshot is what to compile where the state is not current.
	snapshot nodeSnapshot
	// traceparent is of the change that made the latest intent.
	traceparent string
}

// syncNode publishes a new state where the newest is outdated, and pushes what a connected node does not hold. Leases
// go first and depend on nothing else: running workloads must continue while the state cannot be made. A quarantined
// node gets nothing.
func (d *Dispatcher) syncNode(ctx context.Context, nodeID string, minGeneration uint64) error {
	acked, connected := d.Link.Acked(nodeID)
	n, err := d.loadNode(ctx, nodeID, acked, connected, minGeneration)
	if isNotSyncable(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if connected {
		if acked.BundleVersion < d.Keys.Bundle().Version() {
			d.Link.PushBundle(nodeID, &protocol.PushBundle{Envelope: d.Keys.BundleAfter(acked.BundleVersion).Envelope()})
		}
		if err := d.pushLeases(acked, n.leases); err != nil {
			return err
		}
	}
	if !n.current {
		publish := func(ctx context.Context) (stateHeader, error) { return d.publish(ctx, n.snapshot, n.minGeneration) }
		n.header, err = d.traced(ctx, "compile and sign state", n.traceparent, publish)
		if isNotSyncable(err) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	if connected && !n.header.version().Equal(heldBy(acked)) {
		_, err = d.traced(ctx, "push state", n.traceparent, func(ctx context.Context) (stateHeader, error) {
			return n.header, d.pushState(ctx, nodeID)
		})
	}
	return err
}

// traced is work in the trace of the change that made a node's latest intent; of a change without one, in none.
func (d *Dispatcher) traced(ctx context.Context, name, traceparent string,
	work func(context.Context) (stateHeader, error),
) (stateHeader, error) {
	if traceparent == "" {
		return work(ctx)
	}
	ctx, span := otel.Tracer("gpuaas/dispatch").Start(telemetry.Continue(ctx, traceparent), name)
	h, err := work(ctx)
	span.SetAttributes(attribute.String("gpuaas.node_id", h.nodeID), attribute.Int64("gpuaas.generation",
		int64(h.generation)))
	telemetry.EndSpan(span, err)
	return h, err
}

// isNotSyncable reports whether the node is gone or not syncable.
func isNotSyncable(err error) bool {
	return fault.Is(err, fault.NotFound) || errors.Is(err, errNotSyncable)
}

// loadNode reads whether the node's newest state is current, the leases of a connected node, and what to compile. Where
// the node acknowledged other content under the newest state's number, a higher generation is needed.
func (d *Dispatcher) loadNode(ctx context.Context, nodeID string, acked nodelink.AckedState, connected bool,
	minGeneration uint64,
) (nodeSync, error) {
	return db.ReadTx(ctx, d.DB, func(tx db.Tx) (nodeSync, error) {
		n := nodeSync{minGeneration: minGeneration}
		s, err := loadIntent(ctx, tx, nodeID)
		if err != nil {
			return n, err
		}
		if n.header, err = newestHeader(ctx, tx, nodeID); err != nil {
			return n, err
		}
		held := plan.StateVersion{}
		if connected {
			held = heldBy(acked)
		}
		n.traceparent = s.traceparent
		n.minGeneration = d.lowestGeneration(s.node, n.header, held, minGeneration)
		n.current = n.header.rev == s.rev && n.header.generation >= n.minGeneration && d.signedByCurrentKey(n.header)
		if connected {
			if n.leases, err = ledger.LeasesFor(ctx, tx, nodeID); err != nil {
				return n, err
			}
		}
		if !n.current {
			n.snapshot, err = loadMembers(ctx, tx, s)
		}
		return n, err
	})
}

// signedByCurrentKey reports whether the state is of the current epoch and state key.
func (d *Dispatcher) signedByCurrentKey(h stateHeader) bool {
	return h.generation > 0 && h.epoch == d.Keys.Bundle().Epoch() && h.keyID == d.Keys.State().KeyID()
}

// lowestGeneration returns the lowest generation that may be the node's newest; held is what a connected node holds.
func (d *Dispatcher) lowestGeneration(n fleet.Node, h stateHeader, held plan.StateVersion,
	minGeneration uint64,
) uint64 {
	accepted := plan.StateVersion{Epoch: n.AcceptedEpoch, Generation: n.AcceptedGeneration}
	return h.version().LowestGeneration(d.Keys.Bundle().Epoch(), accepted, held, minGeneration)
}

func (d *Dispatcher) pushState(ctx context.Context, nodeID string) error {
	var m *protocol.PushState
	// No transaction: a part that has been pruned between the statements is fetched by the node.
	doc, err := db.Query(ctx, d.DB, func(tx db.Tx) (document, error) {
		doc, err := selectNewest(ctx, tx, nodeID)
		if err != nil {
			return document{}, err
		}
		m = &protocol.PushState{Envelope: doc.envelope}
		m.Parts, err = selectParts(ctx, tx, doc)
		return doc, err
	})
	if err != nil {
		return err
	}
	m.Traceparent = telemetry.Traceparent(ctx)
	failpoint.Hit("hub/dispatch/loaded")
	d.Link.PushState(nodeID, m, doc.generation, doc.sha256)
	failpoint.Hit("hub/dispatch/pushed")
	return nil
}

// pushLeases pushes the node's leases unless they were the last ones pushed on this connection.
func (d *Dispatcher) pushLeases(acked nodelink.AckedState, leases []*protocol.Lease) error {
	signer := d.Keys.Lease()
	batch, sum, err := d.leaseBatch(acked, leases, signer)
	if err != nil || bytes.Equal(sum, acked.LeasesSHA256) {
		return err
	}
	batch.IssuedAt = timestamppb.New(d.Now())
	env, err := protocol.SignMessage(protocol.PayloadLeases, batch, signer)
	if err != nil {
		return err
	}
	failpoint.Hit("hub/leases/signed")
	d.Link.PushLeases(acked.NodeID, &protocol.PushLeases{Envelope: env}, sum)
	return nil
}

// leaseBatch returns the leases that a node must hold and their digest, which identifies them apart from their time;
// nil if nothing was ever pushed and there are none.
func (d *Dispatcher) leaseBatch(acked nodelink.AckedState, leases []*protocol.Lease, signer protocol.Signer,
) (*protocol.LeaseBatch, []byte, error) {
	if len(leases) == 0 && len(acked.LeasesSHA256) == 0 {
		return nil, nil, nil
	}
	batch := &protocol.LeaseBatch{
		NodeId:      acked.NodeID,
		Incarnation: acked.Incarnation,
		Epoch:       d.Keys.Bundle().Epoch(),
		Leases:      leases,
	}
	content, err := proto.MarshalOptions{Deterministic: true}.Marshal(batch)
	if err != nil {
		return nil, nil, err
	}
	sum := sha256.Sum256(append(content, signer.KeyID()...))
	return batch, sum[:], nil
}
