package nodes

import (
	"bytes"
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// greeted is what a hello led to.
type greeted struct {
	fleet.Connected
	posted mark
	// requestUpload asks for what the node has accepted; complete says that it lacks nothing that dispatch would send.
	requestUpload, complete bool
	members                 int
	// refused is why the node is not let in.
	refused error
}

// Hello opens a session: from here on this connection of the node counts.
func (i *Service) Hello(ctx context.Context, peer nodelink.Peer, hello *protocol.Hello) (nodelink.Opened, error) {
	if !validIncarnation(hello.GetIncarnation()) {
		return nodelink.Opened{}, fault.New(fault.Malformed, "incarnation_invalid", "The hello names no incarnation of its "+
			"store.", nil)
	}
	if !db.IsID(peer.NodeID) {
		return nodelink.Opened{}, fault.New(fault.NotFound, "node_not_found", "There is no such node.", nil)
	}
	if !i.budgets.mayBear(peer.NodeID, hello.GetIncarnation(), i.Now()) {
		return nodelink.Opened{}, fault.New(fault.Unavailable, "incarnations_too_many", "The node has given its store a new "+
			"name too often; it may dial again in a minute.", nil)
	}
	w := &word{peer: peer, hello: hello}
	i.words.put(ctx, w)
	if err := w.wait(ctx); err != nil {
		return nodelink.Opened{}, err
	}
	failpoint.Hit("hub/hello/committed")
	o := w.greeted
	return nodelink.Opened{SessionNo: o.SessionNo, Complete: o.complete, Members: o.members, Welcome: &protocol.Welcome{
		ProtocolVersion: min(protocol.Version, hello.GetProtocolVersion()), HubTime: timestamppb.New(i.Now()),
		SessionNo: o.SessionNo, NewIncarnation: o.Behind,
		PostedSegment: o.posted.Number, ArchivedSegment: o.posted.mayForget(), PostedSha256: o.posted.SHA256,
		RequestStateUpload: o.requestUpload,
		QuarantineReason:   o.Node.QuarantineReason,
	}}, nil
}

// greet decides for each hello, of different nodes, and writes down what they say. What is read for all of them is read
// once; a node that must not come in, is not known, came back from silence or is missed since a restore is looked at by
// itself.
func (i *Service) greet(ctx context.Context, tx db.Tx, words []*word, now time.Time) ([]greeted, error) {
	ids := nodesOf(words)
	nodes, err := fleet.GetAll(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	stores := make([]store, len(words))
	for n, w := range words {
		stores[n] = store{w.peer.NodeID, w.hello.GetIncarnation()}
	}
	marks, err := marksOf(ctx, tx, stores)
	if err != nil {
		return nil, err
	}
	out := make([]greeted, len(words))
	var at []int
	var connections []fleet.Connection
	for n, w := range words {
		if out[n].refused, err = i.admit(ctx, tx, nodes, w.peer, now); err != nil {
			return nil, err
		}
		if out[n].refused != nil {
			continue
		}
		out[n].posted = marks[stores[n]]
		at = append(at, n)
		connections = append(connections, fleet.Connection{
			NodeID: w.peer.NodeID, ReplicaID: i.ReplicaID, Hello: w.hello,
			PostedSegment: out[n].posted.Number,
		})
	}
	connected, err := fleet.ConnectAll(ctx, tx, nodes, connections, now)
	if err != nil {
		return nil, err
	}
	var in []int
	for k, n := range at {
		out[n].Connected, out[n].refused = connected[k], connected[k].Refused
		if out[n].refused == nil {
			in = append(in, n)
		}
	}
	return out, i.follow(ctx, tx, words, in, out, now)
}

// admit looks who it is. A node that a restored hub does not know is added to nodes.
func (i *Service) admit(ctx context.Context, tx db.Tx, nodes map[string]fleet.Node, peer nodelink.Peer,
	now time.Time,
) (refused, err error) {
	node, ok := nodes[peer.NodeID]
	if !ok {
		if node, err = known(ctx, tx, peer, now); fault.IsPermanent(err) {
			return err, nil
		}
		if err != nil {
			return nil, err
		}
		nodes[peer.NodeID] = node
	}
	if !bytes.Equal(node.PublicKey, peer.Key) {
		return fault.New(fault.Unauthenticated, "node_key_unknown", "The certificate is not for the key that the node "+
			"enrolled with.", nil), nil
	}
	return nil, nil
}

// follow does what else a hello leads to, for the words at these places.
func (i *Service) follow(ctx context.Context, tx db.Tx, words []*word, in []int, out []greeted, now time.Time) error {
	var ids []string
	var holdings []nodelink.Holding
	inventories := map[string][]*protocol.Accelerator{}
	for _, n := range in {
		id, h := words[n].peer.NodeID, words[n].hello
		ids = append(ids, id)
		holdings = append(holdings, nodelink.Holding{NodeID: id, Held: nodelink.HeldBy(h)})
		inventories[id] = h.GetFacts().GetAccelerators()
	}
	if err := capacity.ApplyInventories(ctx, tx, inventories, now); err != nil {
		return err
	}
	missed, err := recovery.Among(ctx, tx, ids)
	if err != nil {
		return err
	}
	complete, err := i.Complete(ctx, tx, holdings)
	if err != nil {
		return err
	}
	hosting, err := instance.Hosting(ctx, tx, ids)
	if err != nil {
		return err
	}
	for _, n := range in {
		id := words[n].peer.NodeID
		out[n].members = hosting[id]
		if out[n].CameBack {
			if err := reachable(ctx, tx, id, true, now); err != nil {
				return err
			}
		}
		if missed[id] {
			if out[n].requestUpload, err = i.recovering(ctx, tx, id, words[n].hello); err != nil {
				return err
			}
			continue
		}
		out[n].complete = complete[id] && !out[n].Behind && !out[n].Node.IsQuarantined()
	}
	return nil
}
