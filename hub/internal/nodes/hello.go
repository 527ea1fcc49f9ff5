package nodes

import (
	"bytes"
	"cmp"
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// openedSession is the result of a hello.
type openedSession struct {
	fleet.ConnectResult
	posted ledger.Watermark
	// requestUpload asks the node for its accepted state.
	requestUpload bool
	members       int
	// refused is the reason why the node gets no session.
	refused error
}

// OpenSession answers a hello: from here on this connection of the node counts.
func (svc *Service) OpenSession(ctx context.Context, peer nodelink.Peer, hello *protocol.Hello,
) (nodelink.Session, error) {
	if !validIncarnation(hello.GetIncarnation()) {
		return nodelink.Session{}, fault.New(fault.Malformed, codeIncarnationInvalid, "The hello names no incarnation of "+
			"its store.", nil)
	}
	if !db.IsID(peer.NodeID) {
		return nodelink.Session{}, fault.New(fault.NotFound, fleet.CodeNodeNotFound, "There is no such node.", nil)
	}
	if !svc.budgets.mayUseIncarnation(peer.NodeID, hello.GetIncarnation(), svc.Now()) {
		return nodelink.Session{}, fault.New(fault.Unavailable, codeIncarnationsTooMany, "The node has given its store a "+
			"new name too often; it may dial again in a minute.", nil)
	}
	r := &request{peer: peer, hello: hello}
	if err := svc.submit(ctx, r); err != nil {
		return nodelink.Session{}, err
	}
	failpoint.Hit("hub/hello/committed")
	o := r.opened
	return nodelink.Session{SessionNo: o.SessionNo, Members: o.members, Welcome: &protocol.Welcome{
		ProtocolVersion:    min(protocol.Version, hello.GetProtocolVersion()),
		HubTime:            timestamppb.New(svc.Now()),
		SessionNo:          o.SessionNo,
		NewIncarnation:     o.StoreBehind,
		PostedSegment:      o.posted.Number,
		ArchivedSegment:    o.posted.Prunable(),
		PostedSha256:       o.posted.SHA256,
		RequestStateUpload: o.requestUpload,
		QuarantineReason:   o.Node.QuarantineReason,
	}}, nil
}

// OnConnect has the node synced once documents can be pushed to it.
func (svc *Service) OnConnect(nodeID string) { svc.Dispatcher.Enqueue(nodeID) }

// openSessions decides for each hello, of different nodes, and records what they say. What all of them need is read
// once. A node that is refused, unknown, back from absence or pending recovery takes statements of its own.
func (svc *Service) openSessions(ctx context.Context, tx db.Tx, requests []*request, now time.Time,
) ([]openedSession, error) {
	nodes, err := fleet.GetAll(ctx, tx, nodesOf(requests))
	if err != nil {
		return nil, err
	}
	stores := make([]billing.Store, len(requests))
	for n, r := range requests {
		stores[n] = billing.Store{NodeID: r.peer.NodeID, Incarnation: r.hello.GetIncarnation()}
	}
	watermarks, err := ledger.Watermarks(ctx, tx, stores...)
	if err != nil {
		return nil, err
	}
	out := make([]openedSession, len(requests))
	var at []int
	var connections []fleet.Connection
	for n, r := range requests {
		if out[n].refused, err = authorizeNode(ctx, tx, nodes, r.peer, now); err != nil {
			return nil, err
		}
		if out[n].refused != nil {
			continue
		}
		out[n].posted = watermarks[stores[n]]
		at = append(at, n)
		connections = append(connections, fleet.Connection{
			NodeID:        r.peer.NodeID,
			ReplicaID:     svc.ReplicaID,
			Hello:         r.hello,
			PostedSegment: out[n].posted.Number,
		})
	}
	connected, err := fleet.ConnectAll(ctx, tx, nodes, connections, now)
	if err != nil {
		return nil, err
	}
	var accepted []int
	for k, n := range at {
		out[n].ConnectResult, out[n].refused = connected[k], connected[k].Refused
		if out[n].refused == nil {
			accepted = append(accepted, n)
		}
	}
	return out, svc.applyHellos(ctx, tx, requests, accepted, out, now)
}

// authorizeNode checks that the certificate holds the node's key. A node that a restored hub does not know is added to
// nodes.
func authorizeNode(ctx context.Context, tx db.Tx, nodes map[string]fleet.Node, peer nodelink.Peer, now time.Time,
) (refused, err error) {
	node, ok := nodes[peer.NodeID]
	if !ok {
		if node, err = adoptUnknown(ctx, tx, peer, now); fault.IsPermanent(err) {
			return err, nil
		}
		if err != nil {
			return nil, err
		}
		nodes[peer.NodeID] = node
	}
	if !bytes.Equal(node.PublicKey, peer.Key) {
		return fault.New(fault.Unauthenticated, codeNodeKeyUnknown, "The certificate is not for the key that the node "+
			"enrolled with.", nil), nil
	}
	return nil, nil
}

// applyHellos applies the rest of the accepted hellos: inventory, contact, and the state of recovery.
func (svc *Service) applyHellos(ctx context.Context, tx db.Tx, requests []*request, accepted []int,
	out []openedSession, now time.Time,
) error {
	var ids []string
	inventories := map[origin][]*protocol.Accelerator{}
	for _, n := range accepted {
		id := requests[n].peer.NodeID
		ids = append(ids, id)
		inventories[originOf(requests[n].peer)] = requests[n].hello.GetFacts().GetAccelerators()
	}
	if err := applyInventories(ctx, tx, &svc.budgets, inventories, now); err != nil {
		return err
	}
	hosting, err := instance.MemberCounts(ctx, tx, ids)
	if err != nil {
		return err
	}
	for _, n := range accepted {
		id := requests[n].peer.NodeID
		out[n].members = hosting[id]
		if out[n].WasUnreachable {
			if err := setReachable(ctx, tx, originOf(requests[n].peer), true, now); err != nil {
				return err
			}
		}
		if out[n].Renamed {
			if err := instance.NodeRenamed(ctx, tx, id, now); err != nil {
				return err
			}
		}
		resync := out[n].Node.Resync.Status
		if resync != fleet.InSync {
			sealed := min(requests[n].hello.GetLastSegment(), maxNumber)
			if err := fleet.SetUsageOwed(ctx, tx, id, requests[n].hello.GetIncarnation(), sealed); err != nil {
				return err
			}
		}
		out[n].requestUpload = resync == fleet.AwaitingResync
	}
	return nil
}

// adoptUnknown returns the node that says hello. A restored hub adds a node that was enrolled after the backup.
func adoptUnknown(ctx context.Context, tx db.Tx, peer nodelink.Peer, now time.Time) (fleet.Node, error) {
	node, err := fleet.Get(ctx, tx, peer.NodeID)
	if !fault.Is(err, fault.NotFound) || !db.IsID(peer.NodeID) {
		return node, err
	}
	adopted, adoptErr := recovery.AdoptUnknown(ctx, tx, peer.NodeID, peer.Key, now)
	if adoptErr != nil || !adopted {
		return node, cmp.Or(adoptErr, err)
	}
	return fleet.Get(ctx, tx, peer.NodeID)
}

// restoredAt is when the hub was last restored from a backup; zero for one that never was.
func restoredAt(ctx context.Context, tx db.Tx) (time.Time, error) {
	last, _, err := recovery.Last(ctx, tx)
	return last.At, err
}
