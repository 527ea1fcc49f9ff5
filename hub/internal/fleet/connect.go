package fleet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/nodeidentity"
	"github.com/gpuaas/gpuaas/protocol"
)

// Connection is a node that said hello.
type Connection struct {
	NodeID    string
	ReplicaID string
	Hello     *protocol.Hello
	// PostedSegment is the highest usage segment of the hello's incarnation that the hub has.
	PostedSegment uint64
}

// ConnectResult is what the hub answers from.
type ConnectResult struct {
	// Node is as it was before, but for its name, store and contact.
	Node      Node
	SessionNo uint64
	// StoreBehind is set when the node's store remembers less than the hub has seen from the same incarnation: a disk was
	// restored, or lost what it had acknowledged. The node must take a new incarnation.
	StoreBehind bool
	// WasUnreachable is set when the node counted as unreachable until now.
	WasUnreachable bool
	// Refused is why the node gets no session; then nothing else is set.
	Refused error
}

// Connect is ConnectAll for one node.
func Connect(ctx context.Context, tx db.Tx, c Connection, now time.Time) (ConnectResult, error) {
	n, err := Get(ctx, tx, c.NodeID)
	if err != nil {
		return ConnectResult{}, err
	}
	all, err := ConnectAll(ctx, tx, map[string]Node{n.ID: n}, []Connection{c}, now)
	if err != nil {
		return ConnectResult{}, err
	}
	return all[0], all[0].Refused
}

// ConnectAll makes these connections, of different nodes, the ones that count, and stores what their hellos say. nodes
// are as GetAll has just read them. What it writes for a node that says what it said before is a part of one statement
// for all.
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
	rows, err := tx.Query(ctx,
		`INSERT INTO node_sessions (node_id, session_no, replica_id, report_counter, connected_at, seen_at, reachable,
			last_session)
		SELECT x.id, 1, $4::text, 0, $5::timestamptz, $5::timestamptz, x.reachable, x.last
		FROM unnest($1::uuid[], $2::bool[], $3::int8[]) AS x(id, reachable, last)
		ON CONFLICT (node_id) DO UPDATE SET session_no = node_sessions.session_no + 1, replica_id = excluded.replica_id,
		report_counter = 0,
			connected_at = excluded.connected_at, seen_at = excluded.seen_at, disconnected_at = NULL, reachable =
			excluded.reachable, last_session = excluded.last_session
		RETURNING node_id, session_no`, ids, reachable, last, replica, now)
	if err != nil {
		return nil, err
	}
	var (
		id string
		no int64
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &no}, func() error {
		c := &out[at[id]]
		c.SessionNo, c.Node.SessionNo, c.Node.LastSeenAt, c.Node.DisconnectedAt = uint64(no), uint64(no), now, time.Time{}
		return nil
	})
	return out, err
}

// evaluateHello is what a hello means for the node, which is as it was before.
func (n Node) evaluateHello(c Connection) ConnectResult {
	if err := n.admissionError(); err != nil {
		return ConnectResult{Refused: err}
	}
	h, suspects := c.Hello, n.SuspectIncarnations
	after := n
	if n.IsQuarantined() {
		// It goes on as it is until it is released; only its usage counts.
		after.SuspectIncarnations, suspects = addSuspect(slices.Clone(n.SuspectIncarnations), truncate(h.GetIncarnation())),
			nil
	}
	facts := boundedFacts(h.GetFacts())
	if facts.GetHostname() != "" {
		after.Hostname = truncate(facts.GetHostname())
	}
	after.Incarnation, after.AcceptedEpoch, after.AcceptedGeneration = truncate(h.GetIncarnation()),
		min(h.GetEpoch(), maxGeneration), min(h.GetGeneration(), maxGeneration)
	after.BundleVersion, after.AgentVersion, after.ProtocolVersion = min(h.GetBundleVersion(), maxGeneration),
		truncate(h.GetAgentVersion()), h.GetProtocolVersion()
	after.Features, after.Facts, after.Conditions = bounded(h.GetFeatures()), facts, facts.GetConditions()
	after.CPUCores, after.MemoryBytes, after.factsSHA256 = int64(facts.GetCpuCores()), int64(facts.GetMemoryBytes()),
		factsDigest(facts)
	return ConnectResult{
		Node: after,
		StoreBehind: nodeidentity.StoreBehind(
			nodeidentity.Store{Incarnation: h.GetIncarnation(), Epoch: h.GetEpoch(), Generation: h.GetGeneration()},
			nodeidentity.Store{Incarnation: n.Incarnation, Epoch: n.AcceptedEpoch, Generation: n.AcceptedGeneration},
			h.GetLastSegment(), c.PostedSegment, suspects),
		// A quarantined node has contact, and stays out of reach for everyone else.
		WasUnreachable: !n.reachable && !n.IsQuarantined(),
	}
}

// equalsStored reports whether a hello after which the node is as given changes nothing that is kept of it.
func (n Node) equalsStored(after Node) bool {
	return n.Hostname == after.Hostname && n.Incarnation == after.Incarnation && n.AcceptedEpoch == after.AcceptedEpoch &&
		n.AcceptedGeneration == after.AcceptedGeneration && n.BundleVersion == after.BundleVersion &&
		n.AgentVersion == after.AgentVersion &&
		n.ProtocolVersion == after.ProtocolVersion && slices.Equal(n.Features, after.Features) && slices.Equal(n.Conditions,
		after.Conditions) &&
		slices.Equal(n.SuspectIncarnations, after.SuspectIncarnations) && bytes.Equal(n.factsSHA256, after.factsSHA256)
}

// factsDigest is the same for facts that say the same.
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

// ApplyUnchangedReports takes those reports, of different nodes, that say nothing new of their node, all with one
// statement, and reports which: the others are for Observe. One that lost against a newer one is taken, and changes
// nothing.
func ApplyUnchangedReports(ctx context.Context, tx db.Tx, reports []Report, now time.Time) (taken []bool, err error) {
	var ids []string
	for _, r := range reports {
		ids = append(ids, r.NodeID)
	}
	rows, err := tx.Query(ctx,
		`SELECT s.node_id, s.reachable, s.last_session, s.reported_session, n.incarnation, n.quarantined_at IS NOT NULL,
			n.conditions, n.resync
		FROM node_sessions s JOIN nodes n ON n.id = s.node_id WHERE s.node_id = ANY($1::uuid[])`, ids)
	if err != nil {
		return nil, err
	}
	known := map[string]contact{}
	var (
		id string
		c  contact
	)
	_, err = pgx.ForEachRow(rows, []any{
		&id, &c.reachable, &c.lastSession, &c.reported, &c.incarnation, &c.quarantined,
		&c.conditions, &c.resync.Status,
	}, func() error {
		known[id] = c
		c.conditions = nil // of the next row's own
		return nil
	})
	if err != nil {
		return nil, err
	}
	var (
		quiet        []string
		nos, counter []int64
	)
	taken = make([]bool, len(reports))
	for i, r := range reports {
		before, ok := known[r.NodeID]
		if !ok || !before.isUnchanged(r) {
			continue
		}
		taken[i] = true
		quiet, nos, counter = append(quiet, r.NodeID), append(nos, int64(r.SessionNo)),
			append(counter, int64(min(r.Counter, maxGeneration)))
	}
	_, err = tx.Exec(ctx, `UPDATE node_sessions SET report_counter = x.counter, seen_at = $4, reported_session = x.no
		FROM unnest($1::uuid[], $2::int8[], $3::int8[]) AS x(id, no, counter)
		WHERE node_sessions.node_id = x.id AND node_sessions.session_no = x.no AND node_sessions.report_counter < x.counter`,
		quiet, nos, counter, now)
	return taken, err
}
