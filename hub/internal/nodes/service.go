// Package nodes handles what nodes send, each message in one transaction over the slices: hello, report, accepted and
// refused documents, usage. It acknowledges only what is committed. It owns the watermarks of the usage chains, no
// connection (nodelink) and no rule of a slice.
package nodes

import (
	"context"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/semaphore"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxIncarnationBytes bounds the name of a node's store.
	maxIncarnationBytes = 128
	// maxNumber keeps numbers that a node names far from the end of a column.
	maxNumber = 1 << 62
	// maxTurns is how many transactions of what nodes say run at once; the others wait. However many nodes come back
	// together, a request of a person finds a free connection to the database and a share of its processors.
	maxTurns       = 6
	actionContact  = "fleet.node.contact"
	actionDocument = "fleet.node.document"
)

// Service handles what nodes send. It implements nodelink.Intake.
type Service struct {
	DB *db.DB
	// ReplicaID is of this hub process, Started when it began to listen: before that no node could be heard.
	ReplicaID string
	Started   time.Time
	// Newest returns the newest state made for a node, generation 0 for none; Line the hub's trust bundles, the newest
	// first.
	Newest func(ctx context.Context, tx db.Tx, nodeID string) (epoch, generation uint64, sha256 []byte, err error)
	Line   func() []protocol.Bundle
	// Complete gives those of the nodes that hold all that is wanted of them.
	Complete func(ctx context.Context, tx db.Tx, nodes []nodelink.Holding) (map[string]bool, error)
	// Poke wakes dispatch for a node; Raise asks for a generation of at least floor; Kick ends its connection, with a
	// reason.
	Poke  func(nodeID string)
	Raise func(nodeID string, floor uint64)
	Kick  func(nodeID, reason string)
	// Changed wakes those who watch these app instances.
	Changed func(instanceIDs ...string)
	Now     func() time.Time
	Log     *slog.Logger

	usageLanes [lanes]lane
	words      words
	turns      chan struct{}
	settle     command.SettleMembers
	budgets    budgets

	reports, segments metric.Int64Counter
}

// New completes an intake of which the exported fields are set.
func New(i *Service) *Service {
	i.turns = make(chan struct{}, maxTurns)
	i.words.post = i.takeBatch
	i.settle = command.SettleMembers{DB: i.DB, Log: i.Log}
	for n := range i.usageLanes {
		i.usageLanes[n].post, i.usageLanes[n].room = i.postBatch, semaphore.NewWeighted(maxWaitingRecords)
	}
	// An instrument that cannot be made counts nothing; its error would be a misspelt name.
	meter := otel.Meter("gpuaas/nodes")
	i.reports, _ = meter.Int64Counter("gpuaas.reports", metric.WithDescription("Reports of nodes that were taken in."))
	i.segments, _ = meter.Int64Counter("gpuaas.usage.segments", metric.WithDescription("Usage segments, by what became "+
		"of them: posted, or the reason of their refusal."))
	return i
}

// inTurn runs one transaction of what nodes say.
func inTurn[T any](ctx context.Context, i *Service, fn func(tx db.Tx) (T, error)) (T, error) {
	select {
	case i.turns <- struct{}{}:
		defer func() { <-i.turns }()
	case <-ctx.Done():
		var none T
		return none, fault.New(fault.Unavailable, "hub_busy", "The hub is busy with other nodes; dial again in a moment.",
			ctx.Err())
	}
	return db.RunTx(ctx, i.DB, fn)
}

// reachable tells the slices and everyone else that contact with a node was lost or is back.
func reachable(ctx context.Context, tx db.Tx, nodeID string, is bool, now time.Time) error {
	if err := command.NodeReachable(ctx, tx, nodeID, is, now); err != nil {
		return err
	}
	typ := "fleet.node.online"
	if !is {
		typ = "fleet.node.offline"
	}
	return nodeEvent(ctx, tx, nodeID, typ, actionContact, nil, now)
}

// quarantine takes a node out of use whose key two processes speak with. What runs there goes on under its leases; to
// its tenants it is out of reach.
func quarantine(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (bool, error) {
	_, quarantined, err := fleet.Quarantine(ctx, tx, nodeID, fleet.ReasonIdentityUsedTwice, now)
	if err != nil || !quarantined {
		return false, err
	}
	if err := command.NodeReachable(ctx, tx, nodeID, false, now); err != nil {
		return false, err
	}
	return true, nodeEvent(ctx, tx, nodeID, "fleet.node.quarantined", actionContact,
		map[string]any{"reason": fleet.ReasonIdentityUsedTwice}, now)
}

// nodeEvent appends an event about a node and its audit row.
func nodeEvent(ctx context.Context, tx db.Tx, nodeID, typ, action string, data map[string]any, now time.Time) error {
	version, err := fleet.NextVersion(ctx, tx, nodeID)
	if err != nil {
		return err
	}
	if data == nil {
		data = map[string]any{}
	}
	if err := event.Append(ctx, tx, event.Event{
		Type: typ, Subject: nodeID, ResourceVersion: version, Data: data,
		At: now,
	}); err != nil {
		return err
	}
	reason, _ := data["reason"].(string)
	return event.Audit(ctx, tx, event.AuditRow{
		ActorType: iam.TypeNode, ActorID: nodeID, Action: action, ResourceType: "node", ResourceID: nodeID, Reason: reason,
		After: data, At: now,
	})
}

// requireSigned takes a refusal in an owner's name from every status whose signature does not bear it out.
func requireSigned(statuses []*protocol.WorkloadStatus, peer nodelink.Peer) {
	for _, s := range statuses {
		if s.GetReason() != string(instance.ReasonOwnerRefused) {
			s.OwnerRefusal = nil
			continue
		}
		if _, err := protocol.VerifyOwnerRefusal(s, peer.NodeID, peer.Key); err != nil {
			s.OwnerRefusal, s.Reason = nil, string(instance.ReasonInternal)
			s.Detail = "The node says that its owner refuses this, and has not signed that: " + protocol.RefusalDetail(err) + "."
		}
	}
}

// Report takes a node's observed state. A report that lost against a newer one is acknowledged and changes nothing. One
// of a quarantined node is not acknowledged, so that what it proves is said again; nor is one of which a member was set
// aside.
func (i *Service) Report(ctx context.Context, peer nodelink.Peer, sessionNo uint64, r *protocol.Report) error {
	nodeID := peer.NodeID
	now := i.Now().Truncate(time.Microsecond)
	if len(r.GetWorkloads()) == 0 {
		w := &word{peer: peer, report: r, sessionNo: sessionNo}
		i.words.put(ctx, w)
		if err := w.wait(ctx); err != nil {
			return err
		}
		if w.taken {
			i.reports.Add(ctx, 1)
			return nil
		}
	}
	requireSigned(r.GetWorkloads(), peer)
	at := arrival{nodeID, sessionNo, r, now}
	out, err := i.takeReport(ctx, at)
	if err != nil && !out.apart {
		return err
	}
	failpoint.Hit("hub/report/committed")
	if out.noticed {
		i.Log.WarnContext(ctx, "node quarantined", slog.String("node_id", nodeID),
			slog.String("reason", fleet.ReasonIdentityUsedTwice))
		i.Kick(nodeID, protocol.RefusalQuarantined)
	}
	if out.quarantined {
		return fault.New(fault.Conflict, protocol.RefusalQuarantined, "The node is quarantined; its reports do not count.",
			nil)
	}
	i.reports.Add(ctx, 1)
	i.Changed(out.observed.Instances...)
	for _, id := range out.observed.TouchedNodes {
		i.Poke(id)
	}
	return err
}

func fleetReport(nodeID string, sessionNo uint64, r *protocol.Report) fleet.Report {
	return fleet.Report{
		NodeID: nodeID, SessionNo: sessionNo, Counter: r.GetCounter(), Epoch: r.GetEpoch(), Generation: r.GetGeneration(),
		Conditions: r.GetConditions(),
	}
}

// Ack takes the news that a document is on the node's disk.
func (i *Service) Ack(ctx context.Context, nodeID string, a *protocol.Ack) error {
	_, err := inTurn(ctx, i, func(tx db.Tx) (struct{}, error) {
		err := fleet.Accepted(ctx, tx, nodeID, a.GetDocument(), a.GetEpoch(), a.GetGeneration())
		failpoint.Hit("hub/accepted/written")
		return struct{}{}, err
	})
	failpoint.Hit("hub/accepted/committed")
	return err
}

// Nack takes the news that a node refused a document: it is shown to admins, as an event and on the node.
func (i *Service) Nack(ctx context.Context, nodeID string, r *protocol.Nack) error {
	switch r.GetDocument() {
	case fleet.DocumentState, fleet.DocumentLeases, fleet.DocumentBundle:
	default:
		return nil // no document that a hub sends
	}
	if err := i.refused(ctx, nodeID, fleet.Refusal{
		Document: r.GetDocument(), Epoch: r.GetEpoch(), Generation: r.GetGeneration(), Reason: r.GetReason(),
		Detail: r.GetDetail(),
	}); err != nil {
		return err
	}
	contradicts := r.GetReason() == protocol.RefusalOlder || r.GetReason() == protocol.RefusalConflict
	if r.GetDocument() != fleet.DocumentState || !contradicts {
		return nil
	}
	// The number that was refused is taken on the node: whatever is newest here must be above it. A number that was never
	// sent there cannot have been refused.
	newest, err := db.Look(ctx, i.DB, func(tx db.Tx) (uint64, error) {
		_, generation, _, err := i.Newest(ctx, tx, nodeID)
		return generation, err
	})
	if err != nil {
		return err
	}
	if r.GetGeneration() <= newest && i.budgets.mayRaise(nodeID, i.Now()) {
		i.Raise(nodeID, r.GetGeneration()+1)
	}
	return nil
}

func (i *Service) refused(ctx context.Context, nodeID string, r fleet.Refusal) error {
	now := i.Now().Truncate(time.Microsecond)
	if !i.budgets.mayRefuse(nodeID, now) {
		return nil
	}
	r.At = now
	id := db.NewID()
	_, err := inTurn(ctx, i, func(tx db.Tx) (bool, error) {
		news, err := fleet.Refused(ctx, tx, nodeID, id, r)
		if err != nil || !news {
			return false, err
		}
		return true, nodeEvent(ctx, tx, nodeID, "fleet.node.document_refused", actionDocument, map[string]any{
			"document": r.Document, "epoch": r.Epoch, "generation": r.Generation, "reason": r.Reason, "detail": r.Detail,
		}, now)
	})
	if err == nil {
		i.Log.WarnContext(ctx, "document refused", slog.String("node_id", nodeID), slog.String("document", r.Document),
			slog.Uint64("generation", r.Generation), slog.String("reason", r.Reason))
	}
	return err
}

// Gone takes the end of a connection. Others are told when the node stays away (Sweep).
func (i *Service) Gone(ctx context.Context, nodeID string, sessionNo uint64) error {
	_, err := inTurn(ctx, i, func(tx db.Tx) (bool, error) { return fleet.Disconnect(ctx, tx, nodeID, sessionNo, i.Now()) })
	failpoint.Hit("hub/gone/committed")
	return err
}

// Stopped takes the end of all connections of this replica.
func (i *Service) Stopped(ctx context.Context) error {
	_, err := db.RunTx(ctx, i.DB, func(tx db.Tx) (int64, error) {
		return fleet.DisconnectAll(ctx, tx, i.ReplicaID, i.Now())
	})
	return err
}

// Sweep tells of nodes that have been silent for too long. A hub that was away first gives them time to come back.
func (i *Service) Sweep(ctx context.Context) error {
	now := i.Now().Truncate(time.Microsecond)
	if now.Sub(i.Started) < fleet.OnlineWindow {
		return nil
	}
	silent, err := db.ReadTx(ctx, i.DB, func(tx db.Tx) ([]string, error) { return fleet.Silent(ctx, tx, now) })
	if err != nil {
		return err
	}
	for _, id := range silent {
		f := recovery.Finding{NodeID: id, Kind: recovery.FindingContact, ResourceType: "node", ResourceID: id, At: now}
		_, err := db.RunTx(ctx, i.DB, func(tx db.Tx) (bool, error) {
			still, err := fleet.SetUnreachable(ctx, tx, id, now)
			if err != nil || !still {
				return false, err
			}
			if err := reachable(ctx, tx, id, false, now); err != nil {
				return false, err
			}
			return true, command.Resolve(ctx, tx, f)
		})
		switch {
		case err == nil:
		case ctx.Err() != nil, fault.Is(err, fault.Unavailable):
			return err
		default:
			// The next pass tries again; the other nodes' silence is recorded meanwhile.
			_ = command.SetAside(ctx, i.DB, i.Log, err, now, func(context.Context, db.Tx) (recovery.Finding, error) {
				return f, nil
			})
		}
	}
	return nil
}

func validIncarnation(s string) bool {
	if s == "" || len(s) > maxIncarnationBytes {
		return false
	}
	for _, c := range s {
		if c <= ' ' || c > '~' {
			return false
		}
	}
	return true
}
