package recovery

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// Uploads adopts the states that nodes upload after a restore.
type Uploads struct {
	DB *db.DB
	// Bundles returns the trust bundles that lead to the hub's newest one, the newest first.
	Bundles func() []protocol.Bundle
	Now     func() time.Time
	Log     *slog.Logger

	// around is what a test puts around the transaction; it may be nil.
	around func(tx db.Tx, body func(db.Tx) error) error
}

// Receive stores one message of a node's upload; the last one adopts the state into the restored rows, which makes the
// node syncable. What cannot be verified becomes a finding and leaves the rows as they are.
func (u *Uploads) Receive(ctx context.Context, node protocol.NodeIdentity, m *protocol.StateUpload,
) (adopted bool, err error) {
	now := u.Now().Truncate(time.Microsecond)
	bundles := u.Bundles()
	state, findings := verifyState(node, m, bundles, now)
	for _, raw := range m.GetParts() {
		if !state.OK() {
			break
		}
		if _, err := protocol.VerifyPart(state, raw); err != nil {
			return false, fmt.Errorf("a document that node %s uploads: %w", node.ID, err)
		}
	}
	leases := verifyLeases(node, m, bundles)
	adopted, err = db.RunTx(ctx, u.DB, func(tx db.Tx) (adopted bool, err error) {
		body := func(tx db.Tx) (err error) {
			adopted, err = receive(ctx, tx, node.ID, m, verifiedUpload{state, leases, findings}, now)
			return err
		}
		if u.around != nil {
			err = u.around(tx, body)
		} else {
			err = body(tx)
		}
		return adopted, err
	})
	if adopted {
		u.Log.InfoContext(ctx, "node uploaded its accepted state", slog.String("node_id", node.ID),
			slog.Uint64("epoch", state.Message().GetEpoch()), slog.Uint64("generation", state.Message().GetGeneration()),
			slog.Int("findings", len(findings)))
	}
	return adopted, err
}

// verifiedUpload is what has been verified of an upload's message.
type verifiedUpload struct {
	state    protocol.Verified[*protocol.DesiredState]
	leases   []*protocol.Lease
	findings []finding.Finding
}

// receive keeps the documents of one message, and adopts the node with the last one.
func receive(ctx context.Context, tx db.Tx, nodeID string, m *protocol.StateUpload, v verifiedUpload,
	now time.Time,
) (adopted bool, err error) {
	row, err := fleet.Get(ctx, tx, nodeID)
	if err != nil || row.Resync.Status != fleet.AwaitingResync {
		return false, err
	}
	if v.state.OK() {
		for _, raw := range m.GetParts() {
			if err := keepPart(ctx, tx, nodeID, sum(raw), raw); err != nil {
				return false, err
			}
		}
	}
	if !m.GetLast() {
		return false, nil
	}
	in, err := gather(ctx, tx, nodeID, v.state)
	if err != nil {
		return false, err
	}
	in.Findings, in.Leases = v.findings, v.leases
	return true, adoptNode(ctx, tx, in, now)
}

func sum(raw []byte) []byte {
	s := sha256.Sum256(raw)
	return s[:]
}

// gather collects the parts of all messages, and compares the state with the newest one in the rows.
func gather(ctx context.Context, tx db.Tx, nodeID string,
	state protocol.Verified[*protocol.DesiredState],
) (upload, error) {
	b := upload{NodeID: nodeID}
	if !state.OK() {
		return b, nil
	}
	b.Epoch, b.Generation = state.Message().GetEpoch(), state.Message().GetGeneration()
	for _, ref := range state.Message().GetParts() {
		b.Named = append(b.Named, ref.GetId())
	}
	b.Volumes, b.SSHKeys = state.Message().GetVolumes(), state.Message().GetSshKeys()
	parts, err := uploadedParts(ctx, tx, nodeID)
	if err != nil {
		return b, err
	}
	for _, raw := range parts {
		// Parts of another state may be left from an attempt before.
		if w, err := protocol.VerifyPart(state, raw); err == nil {
			b.Workloads = append(b.Workloads, w)
		}
	}
	newest, err := dispatch.NewestState(ctx, tx, nodeID)
	if err != nil {
		return b, err
	}
	own := state.Digest()
	b.Newer = plan.StateVersion{Epoch: b.Epoch, Generation: b.Generation, SHA256: own[:]}.Supersedes(newest)
	return b, nil
}

// verifyState verifies the state with the bundles that lead to the hub's newest one, and with the uploaded bundle,
// which may be newer than the backup. A key that was revoked since still proves that this hub signed.
func verifyState(node protocol.NodeIdentity, b *protocol.StateUpload, chain []protocol.Bundle,
	now time.Time,
) (protocol.Verified[*protocol.DesiredState], []finding.Finding) {
	var findings []finding.Finding
	found := func(kind, format string, args ...any) {
		findings = append(findings, finding.Finding{
			NodeID: node.ID, Kind: kind, ResourceType: "node", ResourceID: node.ID, Detail: fmt.Sprintf(format, args...),
			At: now,
		})
	}
	if newer, ok := succeeding(chain, b.GetBundle()); ok {
		chain = append([]protocol.Bundle{newer}, chain...)
		found(finding.Bundle, "The node holds trust bundle %d, which is not in the backup: repeat what was revoked "+
			"or added since.", newer.Version())
	}
	if b.GetState() == nil {
		return protocol.Verified[*protocol.DesiredState]{}, findings
	}
	var last error
	for _, bundle := range chain {
		v, err := protocol.VerifyState(b.GetState(), bundle, node)
		if err == nil {
			return v, findings
		}
		last = err
	}
	found(finding.Unverified, "The state that the node has accepted is signed by no key of this hub (%s); the "+
		"restored rows stand.", protocol.RefusalDetail(last))
	return protocol.Verified[*protocol.DesiredState]{}, findings
}

// succeeding returns the uploaded bundle where the root signed it after the newest of the chain.
func succeeding(chain []protocol.Bundle, env *protocol.Envelope) (protocol.Bundle, bool) {
	if env == nil {
		return protocol.Bundle{}, false
	}
	for _, b := range chain {
		if next, err := b.Succeed(env); err == nil {
			// A bundle of the chain also succeeds its predecessors.
			for _, known := range chain {
				if known.Version() == next.Version() && bytes.Equal(known.Envelope().GetPayload(), env.GetPayload()) {
					return protocol.Bundle{}, false
				}
			}
			return next, true
		}
	}
	return protocol.Bundle{}, false
}

// verifyLeases returns the leases of all batches, each member's in the order of their numbers.
func verifyLeases(node protocol.NodeIdentity, b *protocol.StateUpload,
	chain []protocol.Bundle,
) (leases []*protocol.Lease) {
	if newer, ok := succeeding(chain, b.GetBundle()); ok {
		chain = append([]protocol.Bundle{newer}, chain...)
	}
	for _, batch := range b.GetLeases() {
		for _, bundle := range chain {
			if v, err := protocol.VerifyLeases(batch, bundle, node); err == nil {
				leases = append(leases, v.Message().GetLeases()...)
				break
			}
		}
	}
	slices.SortStableFunc(leases, func(a, b *protocol.Lease) int { return cmp.Compare(a.GetLeaseNo(), b.GetLeaseNo()) })
	return leases
}
