package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxTries bounds how often a node is compiled again because its intent moved on meanwhile; the next pass has the rest.
const maxTries = 8

// errMoved says that the intent is no longer the one that was compiled.
var errMoved = errors.New("the intent of the node has moved on")

// errQuarantined says that the node gets nothing new.
var errQuarantined = errors.New("the node is quarantined")

// seen is what one transaction saw of a node.
type seen struct {
	node fleet.Node
	rev  int64
	snap plan.Snapshot
	head head
	// parts of the newest state, to tell whether anything changed.
	parts []*protocol.PartRef
}

// intent reads the node and the revision of what is wanted of it.
func intent(ctx context.Context, tx db.Tx, nodeID string) (s seen, err error) {
	if s.node, err = fleet.Get(ctx, tx, nodeID); err != nil {
		return seen{}, err
	}
	if s.node.IsQuarantined() {
		return seen{}, errQuarantined
	}
	s.rev, err = fleet.Rev(ctx, tx, nodeID)
	return s, err
}

// wanted adds to an intent, in the same transaction, what it consists of.
func wanted(ctx context.Context, tx db.Tx, s seen) (_ seen, err error) {
	nodeID := s.node.ID
	s.snap.Node = plan.Node{ID: nodeID, Banned: s.node.IsBanned()}
	if s.snap.Allocations, s.snap.Node.AcceleratorIDs, err = capacity.SnapshotFor(ctx, tx, nodeID); err != nil {
		return seen{}, err
	}
	if s.snap.Members, err = instance.SnapshotFor(ctx, tx, nodeID); err != nil {
		return seen{}, err
	}
	d, err := load(ctx, tx, nodeID)
	if db.IsNoRows(err) {
		s.head = head{nodeID: nodeID}
		return s, nil
	}
	if err != nil {
		return seen{}, err
	}
	s.head, s.parts = d.head, d.state.GetParts()
	return s, nil
}

// looked is what dispatch finds of a node at one moment.
type looked struct {
	head
	// settled says that the newest state is what is wanted; otherwise one of at least floor is to be made.
	settled bool
	floor   uint64
	leases  []*protocol.Lease
	// seen is what is to be compiled where it is not settled.
	seen seen
}

// look finds out whether the node's newest state still says what is wanted, and what leases a connected node is to
// have. A state that the node holds under a number which here stands for another content raises the floor.
func (d *Dispatcher) look(ctx context.Context, nodeID string, held nodelink.Held, connected bool,
	floor uint64,
) (looked, error) {
	return db.ReadTx(ctx, d.DB, func(tx db.Tx) (looked, error) {
		l := looked{floor: floor}
		s, err := intent(ctx, tx, nodeID)
		if err != nil {
			return l, err
		}
		if l.head, err = newest(ctx, tx, nodeID); err != nil {
			return l, err
		}
		h, epoch := l.head, d.Keys.Bundle().Epoch()
		if connected && held.Generation > 0 && held.Epoch == epoch && len(held.StateSHA256) > 0 &&
			h.epoch == held.Epoch && h.generation == held.Generation && !bytes.Equal(h.sha256, held.StateSHA256) {
			l.floor = max(floor, held.Generation+1)
		}
		l.settled = h.rev == s.rev && h.generation >= d.above(s.node, h, l.floor) && h.generation > 0 && h.epoch == epoch &&
			h.keyID == d.Keys.State().KeyID()
		if connected {
			if l.leases, err = ledger.LeasesFor(ctx, tx, nodeID); err != nil {
				return l, err
			}
		}
		if !l.settled {
			l.seen, err = wanted(ctx, tx, s)
		}
		return l, err
	})
}

// above is the lowest generation that will do. A node that holds more than this hub remembers having made is brought on
// above that (law 2): the hub was restored.
func (d *Dispatcher) above(n fleet.Node, h head, floor uint64) uint64 {
	if n.AcceptedEpoch == d.Keys.Bundle().Epoch() && n.AcceptedGeneration > h.generation {
		return max(floor, n.AcceptedGeneration+1)
	}
	return floor
}

// bring makes the node's newest state say what is wanted, as it was seen or as it is by now, and gives it a generation
// of at least floor. It returns the newest state's head.
func (d *Dispatcher) bring(ctx context.Context, s seen, floor uint64) (head, error) {
	nodeID := s.node.ID
	for range maxTries {
		h, err := d.bringOnce(ctx, s, floor)
		if !errors.Is(err, errMoved) {
			return h, err
		}
		s, err = db.ReadTx(ctx, d.DB, func(tx db.Tx) (seen, error) {
			s, err := intent(ctx, tx, nodeID)
			if err != nil {
				return seen{}, err
			}
			return wanted(ctx, tx, s)
		})
		if err != nil {
			return head{}, err
		}
	}
	return head{}, fmt.Errorf("node %s: %w %d times", nodeID, errMoved, maxTries)
}

func (d *Dispatcher) bringOnce(ctx context.Context, s seen, floor uint64) (head, error) {
	nodeID := s.node.ID
	state, left, err := d.compile(ctx, s)
	if err != nil {
		return head{}, fmt.Errorf("the state of node %s is not signed: %w", nodeID, err)
	}
	failpoint.Hit("hub/dispatch/compiled")
	bundle, signer := d.Keys.Bundle(), d.Keys.State()
	floor = d.above(s.node, s.head, floor)
	if s.head.generation >= floor && s.head.generation > 0 && s.head.epoch == bundle.Epoch() &&
		s.head.keyID == signer.KeyID() && samePartRefs(s.parts, state.Refs()) {
		return d.confirm(ctx, s, left)
	}
	next := head{
		nodeID: nodeID, epoch: bundle.Epoch(), generation: max(s.head.generation+1, floor), rev: s.rev, keyID: signer.KeyID(),
	}
	if s.head.epoch < bundle.Epoch() {
		// Order is (epoch, generation): a new epoch starts anew.
		next.generation = max(1, floor)
	}
	return d.sign(ctx, s, state, left, next, signer)
}

// compile makes the node's state of those members that keep the rules; the others are reported and go on with their
// last document.
func (d *Dispatcher) compile(ctx context.Context, s seen) (plan.NodeState, []plan.LeftOut, error) {
	state, left, err := plan.CompileEach(s.snap, nil)
	if err != nil || len(left) == 0 {
		return state, nil, err
	}
	last, err := db.Look(ctx, d.DB, func(tx db.Tx) (map[string][]byte, error) {
		return documents(ctx, tx, s.head.nodeID, s.parts)
	})
	if err != nil {
		return plan.NodeState{}, nil, err
	}
	state, left, err = plan.CompileEach(s.snap, last)
	for _, l := range left {
		d.Log.ErrorContext(ctx, "member left out of its node's state", slog.String("node_id", s.node.ID),
			slog.String("member_id", l.MemberID),
			slog.Bool("last_document_kept", l.Kept), slog.Any("error", l.Cause))
	}
	return state, left, err
}

func samePartRefs(a, b []*protocol.PartRef) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].GetId() != b[i].GetId() || !bytes.Equal(a[i].GetSha256(), b[i].GetSha256()) {
			return false
		}
	}
	return true
}

func (d *Dispatcher) confirm(ctx context.Context, s seen, left []plan.LeftOut) (head, error) {
	if s.head.rev == s.rev {
		return s.head, nil
	}
	return db.RunTx(ctx, d.DB, func(tx db.Tx) (head, error) {
		if err := unmoved(ctx, tx, s); err != nil {
			return head{}, err
		}
		if err := command.ReportLeftOut(ctx, tx, s.node.ID, left, d.Now()); err != nil {
			return head{}, err
		}
		h := s.head
		h.rev = s.rev
		// A member that came and went between two compilations was in no state: this one is the first without it.
		members := make([]string, 0, len(s.parts))
		for _, p := range s.parts {
			members = append(members, p.GetId())
		}
		if err := instance.NoteDispatched(ctx, tx, h.nodeID, h.epoch, h.generation, members, d.Now()); err != nil {
			return head{}, err
		}
		return h, confirm(ctx, tx, s.head, s.rev)
	})
}

// unmoved fails when the intent, or the newest state, is no longer what was looked at.
func unmoved(ctx context.Context, tx db.Tx, s seen) error {
	rev, err := fleet.Rev(ctx, tx, s.node.ID)
	if err != nil {
		return err
	}
	h, err := newest(ctx, tx, s.node.ID)
	if err != nil {
		return err
	}
	if rev != s.rev || h.generation != s.head.generation || h.epoch != s.head.epoch {
		return errMoved
	}
	return nil
}

func (d *Dispatcher) sign(ctx context.Context, s seen, state plan.NodeState, left []plan.LeftOut, next head,
	signer protocol.Signer,
) (head, error) {
	now := d.Now()
	me := s.node.Identity()
	env, err := protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
		NodeId: me.ID, NodeKeySha256: me.KeySHA256[:], Epoch: next.epoch, Generation: next.generation,
		IssuedAt:         timestamppb.New(now),
		MinBundleVersion: d.Keys.Bundle().Version(), Parts: state.Refs(),
	}, signer)
	if err != nil {
		return head{}, err
	}
	// What a node would refuse must not become its newest state.
	if _, err := protocol.VerifyState(env, d.Keys.Bundle(), me); err != nil {
		return head{}, fmt.Errorf("signed state of node %s does not verify: %w", next.nodeID, err)
	}
	sum := sha256.Sum256(env.GetPayload())
	next.sha256 = sum[:]
	encoded, err := proto.Marshal(env)
	if err != nil {
		return head{}, err
	}
	failpoint.Hit("hub/dispatch/signed")
	members := make([]string, 0, len(state.Parts))
	for _, p := range state.Parts {
		members = append(members, p.ID)
	}
	h, err := db.RunTx(ctx, d.DB, func(tx db.Tx) (head, error) {
		if err := unmoved(ctx, tx, s); err != nil {
			return head{}, err
		}
		if err := insert(ctx, tx, next, s.head, s.parts, encoded, state, now); err != nil {
			return head{}, err
		}
		if err := command.ReportLeftOut(ctx, tx, next.nodeID, left, now); err != nil {
			return head{}, err
		}
		err := instance.NoteDispatched(ctx, tx, next.nodeID, next.epoch, next.generation, members, now)
		failpoint.Hit("hub/dispatch/written")
		return next, err
	})
	if err == nil {
		failpoint.Hit("hub/dispatch/saved")
		d.signed.Add(ctx, 1)
	}
	return h, err
}
