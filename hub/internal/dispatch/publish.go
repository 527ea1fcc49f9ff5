package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxPublishAttempts bounds how often a node is compiled again because its intent changed meanwhile.
const maxPublishAttempts = 8

var (
	// errConflict says that the intent or the newest state changed since the snapshot.
	errConflict = errors.New("the intent of the node has changed")
	// errNotSyncable says that the node gets no documents now (fleet.Node.Syncable).
	errNotSyncable = errors.New("the node is quarantined or awaits resync")
)

// nodeSnapshot is what one transaction read of a node: all that a state is compiled from.
type nodeSnapshot struct {
	node fleet.Node
	rev  int64
	// traceparent is of the change that made rev.
	traceparent string
	plan        plan.Snapshot
	// header, parts, volumes and sshKeys are of the newest state.
	header  stateHeader
	parts   []*protocol.PartRef
	volumes []*protocol.ProjectVolume
	sshKeys []*protocol.SSHKey
}

// loadIntent reads the node and the revision of its intent.
func loadIntent(ctx context.Context, tx db.Tx, nodeID string) (s nodeSnapshot, err error) {
	if s.node, err = fleet.Get(ctx, tx, nodeID); err != nil {
		return nodeSnapshot{}, err
	}
	if !s.node.Syncable() {
		return nodeSnapshot{}, errNotSyncable
	}
	intent, err := fleet.GetIntent(ctx, tx, nodeID)
	s.rev, s.traceparent = intent.Rev, intent.Traceparent
	return s, err
}

// loadMembers completes, in the same transaction, an intent with its members, their capacity and the newest state.
func loadMembers(ctx context.Context, tx db.Tx, s nodeSnapshot) (_ nodeSnapshot, err error) {
	nodeID := s.node.ID
	s.plan.Node = plan.Node{ID: nodeID, Banned: s.node.IsBanned()}
	err = db.Together(ctx, tx, func(tx db.Tx) (err error) {
		s.plan.Allocations, s.plan.Node.AcceleratorIDs, err = capacity.SnapshotFor(ctx, tx, nodeID)
		return err
	}, func(tx db.Tx) (err error) {
		s.plan.Node.OneOrg, err = capacity.OneOrg(ctx, tx, nodeID)
		return err
	}, func(tx db.Tx) (err error) {
		if s.plan.Members, err = instance.SnapshotFor(ctx, tx, nodeID); err != nil {
			return err
		}
		return secret.Fill(ctx, tx, s.plan.Members)
	}, func(tx db.Tx) (err error) {
		s.plan.Volumes, err = capacity.DesiredVolumes(ctx, tx, nodeID)
		return err
	}, func(tx db.Tx) (err error) {
		s.plan.SSHKeys, err = capacity.DesiredSSHKeys(ctx, tx, nodeID)
		return err
	}, func(tx db.Tx) error {
		d, err := selectNewest(ctx, tx, nodeID)
		if db.IsNoRows(err) {
			s.header = stateHeader{nodeID: nodeID}
			return nil
		}
		s.header, s.parts, s.volumes = d.stateHeader, d.state.GetParts(), d.state.GetVolumes()
		s.sshKeys = d.state.GetSshKeys()
		return err
	})
	if err != nil {
		return nodeSnapshot{}, err
	}
	return s, markLent(ctx, tx, s.plan)
}

// markLent marks the platform's allocations, where the platform manages a member.
func markLent(ctx context.Context, tx db.Tx, snap plan.Snapshot) error {
	managed := func(m plan.Member) bool { return m.OperatingMode == manifest.PlatformManaged }
	if !slices.ContainsFunc(snap.Members, managed) {
		return nil
	}
	platform, err := iam.PlatformProject(ctx, tx)
	for i := range snap.Allocations {
		snap.Allocations[i].Platform = snap.Allocations[i].ProjectID == platform.ID
	}
	return err
}

// publish makes the newest state match the node's intent and returns its header. It starts from a snapshot and loads a
// new one after each conflict.
func (d *Dispatcher) publish(ctx context.Context, s nodeSnapshot, minGeneration uint64) (stateHeader, error) {
	nodeID := s.node.ID
	for range maxPublishAttempts {
		h, err := d.tryPublish(ctx, s, minGeneration)
		if !errors.Is(err, errConflict) {
			return h, err
		}
		s, err = db.ReadTx(ctx, d.DB, func(tx db.Tx) (nodeSnapshot, error) {
			s, err := loadIntent(ctx, tx, nodeID)
			if err != nil {
				return nodeSnapshot{}, err
			}
			return loadMembers(ctx, tx, s)
		})
		if err != nil {
			return stateHeader{}, err
		}
	}
	return stateHeader{}, fmt.Errorf("node %s: %w %d times", nodeID, errConflict, maxPublishAttempts)
}

func (d *Dispatcher) tryPublish(ctx context.Context, s nodeSnapshot, minGeneration uint64) (stateHeader, error) {
	nodeID := s.node.ID
	state, left, err := d.compile(ctx, s)
	if err != nil {
		return stateHeader{}, fmt.Errorf("the state of node %s is not signed: %w", nodeID, err)
	}
	failpoint.Hit("hub/dispatch/compiled")
	bundle, signer := d.Keys.Bundle(), d.Keys.State()
	lowest := d.lowestGeneration(s.node, s.header, plan.StateVersion{}, minGeneration)
	if s.header.generation >= lowest && d.signedByCurrentKey(s.header) && samePartRefs(s.parts, state.Refs()) &&
		slices.EqualFunc(s.volumes, state.Volumes, equalVolumes) && slices.EqualFunc(s.sshKeys, state.SSHKeys, equalKeys) {
		return d.bumpRev(ctx, s, left)
	}
	next := stateHeader{
		nodeID:     nodeID,
		epoch:      bundle.Epoch(),
		generation: s.header.version().NextGeneration(bundle.Epoch(), lowest),
		rev:        s.rev,
		keyID:      signer.KeyID(),
	}
	return d.sign(ctx, s, state, left, next, signer)
}

// compile makes the node's state of the members that keep the rules. The others are reported and keep their last
// document.
func (d *Dispatcher) compile(ctx context.Context, s nodeSnapshot) (plan.NodeState, []plan.LeftOut, error) {
	state, left, err := plan.CompileEach(s.plan, nil)
	if err != nil || len(left) == 0 {
		return state, nil, err
	}
	last, err := db.Query(ctx, d.DB, func(tx db.Tx) (map[string][]byte, error) {
		return selectDocuments(ctx, tx, s.header.nodeID, s.parts)
	})
	if err != nil {
		return plan.NodeState{}, nil, err
	}
	state, left, err = plan.CompileEach(s.plan, last)
	for _, l := range left {
		d.Log.ErrorContext(withFieldsOf(ctx, s.plan, l.MemberID), "member left out of its node's state",
			slog.String("node_id", s.node.ID),
			slog.String("member_id", l.MemberID),
			slog.Bool("last_document_kept", l.Kept), slog.Any("error", l.Cause))
	}
	return state, left, err
}

// withFieldsOf is for log lines about a member.
func withFieldsOf(ctx context.Context, s plan.Snapshot, memberID string) context.Context {
	i := slices.IndexFunc(s.Members, func(m plan.Member) bool { return m.ID == memberID })
	if i < 0 {
		return ctx
	}
	m := s.Members[i]
	return telemetry.WithFields(telemetry.Continue(ctx, m.Traceparent), telemetry.Fields{
		CorrelationID:     m.CorrelationID,
		OrgID:             m.OrgID,
		ProjectID:         m.ProjectID,
		AppInstanceID:     m.InstanceID,
		OperatingMode:     m.OperatingMode,
		ControlPlaneScope: m.ControlPlaneScope,
		RuntimeBackend:    m.RuntimeBackend,
	})
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

func equalVolumes(a, b *protocol.ProjectVolume) bool { return proto.Equal(a, b) }

func equalKeys(a, b *protocol.SSHKey) bool { return proto.Equal(a, b) }

// bumpRev records that a newer intent compiles to the content of the newest state.
func (d *Dispatcher) bumpRev(ctx context.Context, s nodeSnapshot, left []plan.LeftOut) (stateHeader, error) {
	if s.header.rev == s.rev {
		return s.header, nil
	}
	return db.LockTx(ctx, d.DB, func(tx db.Tx) (stateHeader, error) {
		if err := checkUnchanged(ctx, tx, s); err != nil {
			return stateHeader{}, err
		}
		if err := reportLeftOut(ctx, tx, s.node.ID, left, d.Now()); err != nil {
			return stateHeader{}, err
		}
		h := s.header
		h.rev = s.rev
		// A member that came and went between two compilations was in no state: this one is the first without it.
		members := make([]string, 0, len(s.parts))
		for _, p := range s.parts {
			members = append(members, p.GetId())
		}
		if err := instance.RecordAbsentFrom(ctx, tx, h.nodeID, h.epoch, h.generation, members, d.Now()); err != nil {
			return stateHeader{}, err
		}
		return h, updateRev(ctx, tx, s.header, s.rev)
	})
}

// checkUnchanged locks the intent, and fails with errConflict when the intent or the newest state is no longer that of
// the snapshot. Each change of what a state is made of changes the intent as well, so that until the end of the
// transaction nothing of it changes.
func checkUnchanged(ctx context.Context, tx db.Tx, s nodeSnapshot) error {
	rev, err := fleet.LockIntent(ctx, tx, s.node.ID)
	if err != nil {
		return err
	}
	h, err := newestHeader(ctx, tx, s.node.ID)
	if err != nil {
		return err
	}
	if rev != s.rev || h.generation != s.header.generation || h.epoch != s.header.epoch {
		return errConflict
	}
	return nil
}

// sign signs the state and saves it, unless the snapshot is outdated by then.
func (d *Dispatcher) sign(ctx context.Context, s nodeSnapshot, state plan.NodeState, left []plan.LeftOut,
	next stateHeader,
	signer protocol.Signer,
) (stateHeader, error) {
	now := d.Now()
	me := s.node.Identity()
	env, err := protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
		NodeId: me.ID, NodeKeySha256: me.KeySHA256[:], Epoch: next.epoch, Generation: next.generation,
		IssuedAt:         timestamppb.New(now),
		MinBundleVersion: d.Keys.Bundle().Version(), Parts: state.Refs(), Volumes: state.Volumes,
		SshKeys: state.SSHKeys,
	}, signer)
	if err != nil {
		return stateHeader{}, err
	}
	// A state that the node would refuse must not become its newest state.
	if _, err := protocol.VerifyState(env, d.Keys.Bundle(), me); err != nil {
		return stateHeader{}, fmt.Errorf("signed state of node %s does not verify: %w", next.nodeID, err)
	}
	sum := sha256.Sum256(env.GetPayload())
	next.sha256 = sum[:]
	encoded, err := proto.Marshal(env)
	if err != nil {
		return stateHeader{}, err
	}
	failpoint.Hit("hub/dispatch/signed")
	members := make([]string, 0, len(state.Parts))
	for _, p := range state.Parts {
		members = append(members, p.ID)
	}
	h, err := db.LockTx(ctx, d.DB, func(tx db.Tx) (stateHeader, error) {
		if err := checkUnchanged(ctx, tx, s); err != nil {
			return stateHeader{}, err
		}
		if err := insertState(ctx, tx, next, s.header, s.parts, encoded, state, now); err != nil {
			return stateHeader{}, err
		}
		if err := reportLeftOut(ctx, tx, next.nodeID, left, now); err != nil {
			return stateHeader{}, err
		}
		err := instance.RecordAbsentFrom(ctx, tx, next.nodeID, next.epoch, next.generation, members, now)
		failpoint.Hit("hub/dispatch/written")
		return next, err
	})
	if err == nil {
		failpoint.Hit("hub/dispatch/committed")
		d.signed.Add(ctx, 1)
	}
	return h, err
}
