package nodes

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// What a hub that was restored from a backup does until its nodes have brought what it has forgotten.

// Mark is how far the usage of one store of a node is posted.
type Mark struct {
	NodeID      string
	Incarnation string
	Number      uint64
}

// Marks gives all marks, for a backup.
func Marks(ctx context.Context, tx db.Tx) ([]Mark, error) {
	rows, err := tx.Query(ctx,
		`SELECT node_id, incarnation, number FROM usage_marks WHERE number > 0 ORDER BY node_id, incarnation`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Mark])
}

// Archive notes that usage up to these marks is in a verified backup: nodes may forget it.
func Archive(ctx context.Context, tx db.Tx, marks []Mark) error {
	var (
		nodes, incarnations []string
		numbers             []int64
	)
	for _, m := range marks {
		nodes, incarnations, numbers = append(nodes, m.NodeID), append(incarnations, m.Incarnation),
			append(numbers, int64(m.Number))
	}
	_, err := tx.Exec(ctx,
		`UPDATE usage_marks SET archived = x.number FROM unnest($1::text[], $2::text[], $3::int8[]) AS x(node, incarnation,
			number)
		WHERE usage_marks.node_id = x.node::uuid AND usage_marks.incarnation = x.incarnation
		AND usage_marks.archived < x.number`, nodes, incarnations, numbers)
	return err
}

// adoptUnknown returns the node that says hello. A restored hub adds a node that was enrolled after the backup: its
// certificate proves the enrolment.
func adoptUnknown(ctx context.Context, tx db.Tx, peer nodelink.Peer, now time.Time) (fleet.Node, error) {
	node, err := fleet.Get(ctx, tx, peer.NodeID)
	if !fault.Is(err, fault.NotFound) || !db.IsID(peer.NodeID) {
		return node, err
	}
	admitted, admitErr := command.AdmitUnknown(ctx, tx, peer.NodeID, peer.Key, now)
	if admitErr != nil || !admitted {
		return node, orFirst(admitErr, err)
	}
	return fleet.Get(ctx, tx, peer.NodeID)
}

func orFirst(first, second error) error {
	if first != nil {
		return first
	}
	return second
}

// needsUpload decides at a hello whether the hub requests a state upload, and records how much usage the node owes.
func needsUpload(ctx context.Context, tx db.Tx, nodeID string, hello *protocol.Hello) (bool, error) {
	n, ok, err := recovery.Of(ctx, tx, nodeID)
	if err != nil || !ok {
		return false, err
	}
	if err := recovery.Owe(ctx, tx, nodeID, hello.GetIncarnation(), min(hello.GetLastSegment(), maxNumber)); err != nil {
		return false, err
	}
	return n.Waiting, nil
}

// owesUsage reports whether usage of the node is still missed after a restore; it ends that when it is in.
func owesUsage(ctx context.Context, tx db.Tx, nodeID string) (bool, error) {
	n, ok, err := recovery.Of(ctx, tx, nodeID)
	if err != nil || !ok {
		return false, err
	}
	m, err := watermarkOf(ctx, tx, nodeID, n.OwesIncarnation)
	if err != nil || n.Waiting || m.Number < n.OwesSegment {
		return true, err
	}
	return false, recovery.Recovered(ctx, tx, nodeID)
}

// StateUpload handles one message of a node's state upload after a restore. The last message adopts the state: the
// restored rows are made to say what the node was sent (command.AdoptNode). What cannot be verified is a finding, and
// the rows stay as they are.
func (svc *Service) StateUpload(ctx context.Context, peer nodelink.Peer, b *protocol.StateUpload) error {
	now := svc.Now().Truncate(time.Microsecond)
	line := svc.Keys.Line()
	state, findings := svc.verifyState(peer, b, line, now)
	for _, raw := range b.GetParts() {
		if !state.OK() {
			break
		}
		if _, err := protocol.VerifyPart(state, raw); err != nil {
			return fmt.Errorf("a document that node %s uploads: %w", peer.NodeID, err)
		}
	}
	adopted, err := db.RunTx(ctx, svc.DB, func(tx db.Tx) (bool, error) {
		if waits, err := recovery.Waits(ctx, tx, peer.NodeID); err != nil || !waits {
			return false, err
		}
		if state.OK() {
			for _, raw := range b.GetParts() {
				if err := recovery.KeepPart(ctx, tx, peer.NodeID, sum(raw), raw); err != nil {
					return false, err
				}
			}
		}
		if !b.GetLast() {
			return false, nil
		}
		in, err := svc.gather(ctx, tx, peer.NodeID, state)
		if err != nil {
			return false, err
		}
		in.Findings = findings
		in.Leases = verifyLeases(peer, b, line)
		return true, command.AdoptNode(ctx, tx, in, now)
	})
	if err != nil {
		return err
	}
	if adopted {
		svc.Log.InfoContext(ctx, "node uploaded its accepted state", slog.String("node_id", peer.NodeID),
			slog.Uint64("epoch", state.Message().GetEpoch()), slog.Uint64("generation", state.Message().GetGeneration()),
			slog.Int("findings", len(findings)))
		svc.Dispatcher.Enqueue(peer.NodeID)
	}
	return nil
}

func sum(raw []byte) []byte {
	s := sha256.Sum256(raw)
	return s[:]
}

// gather puts together what came in all messages, and compares it with what the rows know.
func (svc *Service) gather(ctx context.Context, tx db.Tx, nodeID string,
	state protocol.Verified[*protocol.DesiredState],
) (command.StateUpload, error) {
	b := command.StateUpload{NodeID: nodeID}
	if !state.OK() {
		return b, nil
	}
	b.Epoch, b.Generation = state.Message().GetEpoch(), state.Message().GetGeneration()
	for _, ref := range state.Message().GetParts() {
		b.Named = append(b.Named, ref.GetId())
	}
	parts, err := recovery.Parts(ctx, tx, nodeID)
	if err != nil {
		return b, err
	}
	for _, raw := range parts {
		// Of a state that was accepted between two attempts there may be others.
		if w, err := protocol.VerifyPart(state, raw); err == nil {
			b.Workloads = append(b.Workloads, w)
		}
	}
	epoch, generation, newest, err := dispatch.NewestState(ctx, tx, nodeID)
	if err != nil {
		return b, err
	}
	own := state.Digest()
	b.Newer = b.Epoch > epoch || b.Epoch == epoch && (b.Generation > generation || b.Generation == generation &&
		!bytes.Equal(newest, own[:]))
	return b, nil
}

// verifyState checks the state by the line of bundles that lead to the hub's newest one, and by the one that the node
// uploads, which may be newer than the backup. A key that was revoked since still proves that this hub has signed.
func (svc *Service) verifyState(peer nodelink.Peer, b *protocol.StateUpload, line []protocol.Bundle,
	now time.Time,
) (protocol.Verified[*protocol.DesiredState], []recovery.Finding) {
	var findings []recovery.Finding
	found := func(kind, format string, args ...any) {
		findings = append(findings, recovery.Finding{
			NodeID: peer.NodeID, Kind: kind, ResourceType: "node", ResourceID: peer.NodeID, Detail: fmt.Sprintf(format, args...),
			At: now,
		})
	}
	if newer, ok := succeeding(line, b.GetBundle()); ok {
		line = append([]protocol.Bundle{newer}, line...)
		found(recovery.FindingBundle, "The node holds trust bundle %d, which is not in the backup: repeat what was revoked "+
			"or added since.", newer.Version())
	}
	if b.GetState() == nil {
		return protocol.Verified[*protocol.DesiredState]{}, findings
	}
	me := protocol.NewNodeIdentity(peer.NodeID, peer.Key)
	var last error
	for _, bundle := range line {
		v, err := protocol.VerifyState(b.GetState(), bundle, me)
		if err == nil {
			return v, findings
		}
		last = err
	}
	found(recovery.FindingUnverified, "The state that the node has accepted is signed by no key of this hub (%s); the "+
		"restored rows stand.", protocol.RefusalDetail(last))
	return protocol.Verified[*protocol.DesiredState]{}, findings
}

// succeeding gives the bundle that a node uploads where the root has signed it after the newest of the line.
func succeeding(line []protocol.Bundle, env *protocol.Envelope) (protocol.Bundle, bool) {
	if env == nil {
		return protocol.Bundle{}, false
	}
	for _, b := range line {
		if next, err := b.Succeed(env); err == nil {
			// One of the line itself succeeds its predecessors.
			for _, known := range line {
				if known.Version() == next.Version() && bytes.Equal(known.Envelope().GetPayload(), env.GetPayload()) {
					return protocol.Bundle{}, false
				}
			}
			return next, true
		}
	}
	return protocol.Bundle{}, false
}

// verifyLeases gives the leases of all batches, each member's in the order of their numbers.
func verifyLeases(peer nodelink.Peer, b *protocol.StateUpload, line []protocol.Bundle) (leases []*protocol.Lease) {
	if newer, ok := succeeding(line, b.GetBundle()); ok {
		line = append([]protocol.Bundle{newer}, line...)
	}
	me := protocol.NewNodeIdentity(peer.NodeID, peer.Key)
	for _, batch := range b.GetLeases() {
		for _, bundle := range line {
			if v, err := protocol.VerifyLeases(batch, bundle, me); err == nil {
				leases = append(leases, v.Message().GetLeases()...)
				break
			}
		}
	}
	slices.SortStableFunc(leases, func(a, b *protocol.Lease) int { return cmp.Compare(a.GetLeaseNo(), b.GetLeaseNo()) })
	return leases
}
