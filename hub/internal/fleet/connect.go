package fleet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/nodeidentity"
	"github.com/gpuaas/gpuaas/protocol"
)

// Connection is a node's hello.
type Connection struct {
	NodeID    string
	ReplicaID string
	Hello     *protocol.Hello
	// PostedSegment is the highest usage segment of the hello's incarnation that the hub has.
	PostedSegment uint64
}

// ConnectResult is the result of a hello.
type ConnectResult struct {
	// Node is the previous row with hostname, store and session updated.
	Node      Node
	SessionNo uint64
	// StoreBehind: the node's store remembers less than the hub has recorded of the same incarnation, because its disk was
	// restored or lost writes. The node must take a new incarnation.
	StoreBehind bool
	// WasUnreachable: the node counted as unreachable until this hello.
	WasUnreachable bool
	// Renamed: the node gives itself another hostname than before.
	Renamed bool
	// Refused is why the node gets no session; then no other field is set.
	Refused error
}

// ConnectAll makes the connections, of different nodes, their nodes' current ones and stores what the hellos say. nodes
// are as GetAll has just read them. One statement serves all nodes whose hello says nothing new.
func ConnectAll(ctx context.Context, tx db.Tx, nodes map[string]Node, list []Connection,
	now time.Time,
) ([]ConnectResult, error) {
	out := make([]ConnectResult, len(list))
	var (
		ids       []string
		reachable []bool
		last      []int64
		replica   string
	)
	at := map[string]int{}
	for i, c := range list {
		before := nodes[c.NodeID]
		out[i] = before.evaluateHello(c)
		if out[i].Refused != nil {
			continue
		}
		at[c.NodeID], replica = i, c.ReplicaID
		ids, reachable = append(ids, c.NodeID), append(reachable, !before.IsQuarantined())
		last = append(last, int64(min(c.Hello.GetLastSession(), maxGeneration)))
		if !before.equalsStored(out[i].Node) {
			if err := saveHello(ctx, tx, out[i].Node, now); err != nil {
				return nil, err
			}
		}
	}
	if len(ids) == 0 {
		return out, nil
	}
	if err := setReachable(ctx, tx, ids, reachable); err != nil {
		return nil, err
	}
	var (
		id string
		no int64
	)
	return out, db.ForEach(ctx, tx, []any{&id, &no}, func() {
		c := &out[at[id]]
		c.SessionNo, c.Node.SessionNo, c.Node.LastSeenAt, c.Node.DisconnectedAt = uint64(no), uint64(no), now, time.Time{}
	},
		`INSERT INTO node_sessions (node_id, session_no, replica_id, report_counter, connected_at, seen_at, last_session)
		SELECT x.id, 1, $3::text, 0, $4::timestamptz, $4::timestamptz, x.last
		FROM unnest($1::uuid[], $2::int8[]) AS x(id, last)
		ON CONFLICT (node_id) DO UPDATE SET session_no = node_sessions.session_no + 1, replica_id = excluded.replica_id,
		report_counter = 0,
			connected_at = excluded.connected_at, seen_at = excluded.seen_at, disconnected_at = NULL,
			last_session = excluded.last_session
		RETURNING node_id, session_no`, ids, last, replica, now)
}

// evaluateHello returns what a hello changes of the stored node.
func (n Node) evaluateHello(c Connection) ConnectResult {
	if err := n.admissionError(); err != nil {
		return ConnectResult{Refused: err}
	}
	h, suspects := c.Hello, n.SuspectIncarnations
	after := n
	if n.IsQuarantined() {
		// The node keeps its incarnation until it is released; only its usage counts.
		after.SuspectIncarnations, suspects = addSuspect(slices.Clone(n.SuspectIncarnations), truncate(h.GetIncarnation())),
			nil
	}
	facts := boundedFacts(h.GetFacts())
	if facts.GetHostname() != "" {
		after.Hostname = truncate(facts.GetHostname())
	}
	behind := nodeidentity.StoreBehind(
		nodeidentity.Store{Incarnation: h.GetIncarnation(), Epoch: h.GetEpoch(), Generation: h.GetGeneration()},
		nodeidentity.Store{Incarnation: n.Incarnation, Epoch: n.AcceptedEpoch, Generation: n.AcceptedGeneration},
		h.GetLastSegment(), c.PostedSegment, suspects)
	after.Incarnation = truncate(h.GetIncarnation())
	if !behind || after.Incarnation != n.Incarnation {
		// A store stays behind until it has a new incarnation: the answer that asks for one may be lost.
		after.AcceptedEpoch, after.AcceptedGeneration = min(h.GetEpoch(), maxGeneration),
			min(h.GetGeneration(), maxGeneration)
	}
	after.BundleVersion, after.AgentVersion, after.ProtocolVersion = min(h.GetBundleVersion(), maxGeneration),
		truncate(h.GetAgentVersion()), h.GetProtocolVersion()
	after.Features, after.Facts, after.Conditions = bounded(h.GetFeatures()), facts, facts.GetConditions()
	after.CPUCores, after.MemoryBytes, after.factsSHA256 = int64(facts.GetCpuCores()), int64(facts.GetMemoryBytes()),
		factsDigest(facts)
	return ConnectResult{
		Node:        after,
		StoreBehind: behind,
		// A quarantined node stays unreachable for tenants.
		WasUnreachable: !n.Reachable && !n.IsQuarantined(),
		Renamed:        n.Hostname != after.Hostname,
	}
}

// equalsStored reports whether a hello that makes the node after changes no stored field.
func (n Node) equalsStored(after Node) bool {
	return n.Hostname == after.Hostname && n.Incarnation == after.Incarnation && n.AcceptedEpoch == after.AcceptedEpoch &&
		n.AcceptedGeneration == after.AcceptedGeneration && n.BundleVersion == after.BundleVersion &&
		n.AgentVersion == after.AgentVersion &&
		n.ProtocolVersion == after.ProtocolVersion && slices.Equal(n.Features, after.Features) && slices.Equal(n.Conditions,
		after.Conditions) &&
		slices.Equal(n.SuspectIncarnations, after.SuspectIncarnations) && bytes.Equal(n.factsSHA256, after.factsSHA256)
}

// factsDigest is equal for equal facts.
func factsDigest(f *protocol.NodeFacts) []byte {
	raw, _ := proto.MarshalOptions{Deterministic: true}.Marshal(f) // what was made of valid texts can be encoded
	sum := sha256.Sum256(raw)
	return sum[:]
}

func saveHello(ctx context.Context, tx db.Tx, n Node, now time.Time) error {
	facts, err := protojson.Marshal(n.Facts)
	if err != nil {
		return err
	}
	tx.Changed(n.ID)
	_, err = tx.Exec(ctx,
		`UPDATE nodes SET hostname = $2, incarnation = $3, accepted_epoch = $4, accepted_generation = $5, bundle_version = $6,
			agent_version = $7, protocol_version = $8, features = $9, facts = $10, conditions = $11, resource_version =
			resource_version + 1, updated_at = $12,
			suspect_incarnations = $13, cpu_cores = $14, memory_bytes = $15, facts_sha256 = $16
		WHERE id = $1`,
		n.ID, n.Hostname, n.Incarnation, n.AcceptedEpoch, n.AcceptedGeneration, n.BundleVersion, n.AgentVersion,
		n.ProtocolVersion, n.Features, string(facts),
		n.Conditions, now, n.SuspectIncarnations, n.CPUCores, n.MemoryBytes, n.factsSHA256)
	return err
}

// ApplyUnchangedReports applies, with one statement, those of the reports, of different nodes, that change only the
// time of the last contact, and returns which; the others are for ApplyReport. An outdated report counts as applied.
func ApplyUnchangedReports(ctx context.Context, tx db.Tx, reports []Report, now time.Time) (applied []bool, err error) {
	var ids []string
	for _, r := range reports {
		ids = append(ids, r.NodeID)
	}
	known, err := selectContacts(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	var (
		quiet        []string
		nos, counter []int64
	)
	applied = make([]bool, len(reports))
	for i, r := range reports {
		before, ok := known[r.NodeID]
		if !ok || !before.isUnchanged(r) {
			continue
		}
		applied[i] = true
		quiet, nos, counter = append(quiet, r.NodeID), append(nos, int64(r.SessionNo)),
			append(counter, int64(min(r.Counter, maxGeneration)))
	}
	_, err = tx.Exec(ctx, `UPDATE node_sessions SET report_counter = x.counter, seen_at = $4, reported_session = x.no
		FROM unnest($1::uuid[], $2::int8[], $3::int8[]) AS x(id, no, counter)
		WHERE node_sessions.node_id = x.id AND node_sessions.session_no = x.no AND node_sessions.report_counter < x.counter`,
		quiet, nos, counter, now)
	return applied, err
}
