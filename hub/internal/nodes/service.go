// Package nodes handles what nodes send, each message in one transaction over the slices: hello, report, accepted and
// refused documents, usage. It acknowledges only what is committed. It owns the segments that were set aside, and no
// connection (nodelink), usage chain (ledger) or rule of a slice.
package nodes

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/groupcommit"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxIncarnationBytes bounds the name of a node's store.
	maxIncarnationBytes = 128
	// maxNumber keeps numbers that a node names far from the end of a column.
	maxNumber = 1 << 62
	// maxTransactions bounds the concurrent transactions for single nodes, so that API requests get a database connection
	// and a share of its processors while many nodes reconnect.
	maxTransactions = 6
	actionContact   = "fleet.node.contact"
	actionDocument  = "fleet.node.document"
)

// Dispatcher syncs nodes and has the states that were made for them.
type Dispatcher interface {
	Enqueue(nodeID string)
	EnqueueAtLeast(nodeID string, generation uint64)
	// Part returns a part of one of the node's newest states.
	Part(ctx context.Context, nodeID string, sha256 []byte) ([]byte, error)
	// MayPull reports whether the node's newest state needs an image of the repository.
	MayPull(ctx context.Context, nodeID, repository string) (bool, error)
}

// Keys are the hub's trust bundles.
type Keys interface {
	Bundle() protocol.Bundle
	// BundleAfter returns the newest bundle that may succeed the one with the version.
	BundleAfter(version uint64) protocol.Bundle
	// Line returns the bundles that lead to the newest one, the newest first.
	Chain() []protocol.Bundle
}

// Registry gives short-lived credentials that work only on connections that show the node's certificate.
type Registry interface {
	NodeCredential(nodeID, repository string, now time.Time) (*protocol.PullCredential, error)
}

// Config is what a Service needs.
type Config struct {
	DB         *db.DB
	Dispatcher Dispatcher
	Keys       Keys
	Registry   Registry
	// ReplicaID is of this hub process. Started is when it began to listen: nodes could not report before.
	ReplicaID string
	Started   time.Time
	Now       func() time.Time
	Log       *slog.Logger
}

// Service handles what nodes send. It implements nodelink.Handler.
type Service struct {
	Config

	usage        usageQueue
	requests     *groupcommit.Queue[*request]
	transactions chan struct{}
	passes       periodic.Passes
	budgets      budgets
	uploads      recovery.Uploads

	reports, segments metric.Int64Counter
}

// New makes a service with empty queues.
func New(c Config) *Service {
	svc := &Service{
		Config:       c,
		transactions: make(chan struct{}, maxTransactions),
		passes:       periodic.Passes{DB: c.DB, Log: c.Log},
		uploads:      recovery.Uploads{DB: c.DB, Bundles: c.Keys.Chain, Now: c.Now, Log: c.Log},
	}
	svc.requests = groupcommit.New(nextGroup, svc.commitGroup)
	svc.usage = newUsageQueue(svc.postBatch)
	// An instrument that cannot be made counts nothing; its error would be a misspelt name.
	meter := otel.Meter("gpuaas/nodes")
	svc.reports, _ = meter.Int64Counter("gpuaas.reports", metric.WithDescription("Reports of nodes that were taken in."))
	svc.segments, _ = meter.Int64Counter("gpuaas.usage.segments", metric.WithDescription("Usage segments, by what became "+
		"of them: posted, or the reason of their refusal."))
	return svc
}

// runTx runs a transaction within maxTransactions.
func runTx[T any](ctx context.Context, svc *Service, fn func(tx db.Tx) (T, error)) (T, error) {
	return within(ctx, svc, db.RunTx, fn)
}

// within runs a transaction of the given kind within maxTransactions.
func within[T any](ctx context.Context, svc *Service,
	run func(context.Context, *db.DB, func(tx db.Tx) (T, error)) (T, error), fn func(tx db.Tx) (T, error),
) (T, error) {
	select {
	case svc.transactions <- struct{}{}:
		defer func() { <-svc.transactions }()
	case <-ctx.Done():
		var none T
		return none, errBusy(ctx.Err())
	}
	return run(ctx, svc.DB, fn)
}

// writeTx is runTx for an fn that returns nothing.
func writeTx(ctx context.Context, svc *Service, fn func(tx db.Tx) error) error {
	_, err := runTx(ctx, svc, func(tx db.Tx) (struct{}, error) { return struct{}{}, fn(tx) })
	return err
}

// origin is the node that a change follows from.
type origin struct {
	nodeID string
	// address is empty where the hub concludes the change itself.
	address string
}

func originOf(p nodelink.Peer) origin { return origin{p.NodeID, p.Address} }

// by is who makes the change.
func (o origin) by(correlationID string, now time.Time) change.By {
	by := change.ByNode(o.nodeID, correlationID, now)
	by.SourceAddress = o.address
	return by
}

// following is who makes a change of an instance: it goes on under the correlation id and the trace of what was asked
// of the instance last.
func (o origin) following(asked instance.Operation, now time.Time) change.By {
	by := o.by(asked.CorrelationID, now)
	by.Traceparent = asked.Traceparent
	return by
}

// setReachable records, with an event, that contact with a node was lost or is back.
func setReachable(ctx context.Context, tx db.Tx, from origin, is bool, now time.Time) error {
	if err := setMembersReachable(ctx, tx, from, is, now); err != nil {
		return err
	}
	typ := "fleet.node.online"
	if !is {
		typ = "fleet.node.offline"
	}
	return nodeEvent(ctx, tx, from, typ, actionContact, nil, now)
}

// quarantine quarantines a node whose key two processes use. Its workloads continue under their leases; tenants see the
// node as unreachable.
func quarantine(ctx context.Context, tx db.Tx, from origin, now time.Time) (bool, error) {
	before, err := fleet.Get(ctx, tx, from.nodeID)
	if err != nil {
		return false, err
	}
	node, quarantined, err := fleet.Quarantine(ctx, tx, from.nodeID, fleet.ReasonIdentityUsedTwice, now)
	if err != nil || !quarantined {
		return false, err
	}
	if err := setMembersReachable(ctx, tx, from, false, now); err != nil {
		return false, err
	}
	return true, change.RecordNode(ctx, tx, from.by("", now), "fleet.node.quarantined", actionContact,
		string(before.Status(now)), node, fleet.ReasonIdentityUsedTwice)
}

// nodeEvent appends an event about a node and its audit row.
func nodeEvent(ctx context.Context, tx db.Tx, from origin, typ, action string, data map[string]any,
	now time.Time,
) error {
	version, err := fleet.NextVersion(ctx, tx, from.nodeID)
	if err != nil {
		return err
	}
	if data == nil {
		data = map[string]any{}
	}
	reason, _ := data["reason"].(string)
	e := change.Entry{
		Event:        typ,
		Action:       action,
		ResourceType: change.Node,
		ResourceID:   from.nodeID,
		Version:      version,
		Reason:       reason,
		Data:         data,
		After:        data,
	}
	// The event names no actor: the node is its subject.
	if err := change.Append(ctx, tx, change.BySystem("", now), e); err != nil {
		return err
	}
	return change.Audit(ctx, tx, from.by("", now), e)
}

// requireSigned removes an owner's refusal without a valid signature from each status. An owner refuses a member, and
// signs for that: a service has no refusal of its own.
func requireSigned(statuses []*protocol.WorkloadStatus, peer nodelink.Peer) {
	for _, s := range statuses {
		for _, service := range s.GetServices() {
			if service.GetReason() == protocol.WorkloadStatus_OWNER_REFUSED {
				service.Reason = protocol.WorkloadStatus_INTERNAL
			}
		}
		if s.GetReason() != protocol.WorkloadStatus_OWNER_REFUSED {
			s.OwnerRefusal = nil
			continue
		}
		if _, err := protocol.VerifyOwnerRefusal(s, peer.NodeID, peer.Key); err != nil {
			s.OwnerRefusal, s.Reason = nil, protocol.WorkloadStatus_INTERNAL
			s.Detail = "The node says that its owner refuses this, and has not signed that: " + protocol.RefusalDetail(err) + "."
		}
	}
}

// Report applies a node's observed state. A report older than one applied before is acknowledged and changes nothing. A
// report of a quarantined node is not acknowledged, so that the node repeats its proofs; nor is one with a member that
// was set aside.
func (svc *Service) Report(ctx context.Context, peer nodelink.Peer, sessionNo uint64, r *protocol.Report) error {
	nodeID := peer.NodeID
	now := svc.Now().Truncate(time.Microsecond)
	if len(r.GetWorkloads()) == 0 && len(r.GetVolumes()) == 0 {
		quiet := &request{peer: peer, report: r, sessionNo: sessionNo}
		if err := svc.submit(ctx, quiet); err != nil {
			return err
		}
		if quiet.applied {
			svc.reports.Add(ctx, 1)
			return nil
		}
	}
	requireSigned(r.GetWorkloads(), peer)
	incoming := incomingReport{originOf(peer), sessionNo, r, now, &svc.budgets}
	out, err := svc.applyReport(ctx, incoming)
	if err != nil && !out.split {
		return err
	}
	svc.traceChanges(ctx, out, now)
	failpoint.Hit("hub/report/committed")
	if out.newlyQuarantined {
		svc.Log.WarnContext(ctx, "node quarantined", slog.String("node_id", nodeID),
			slog.String("reason", fleet.ReasonIdentityUsedTwice))
	}
	if out.quarantined {
		return fault.New(fault.Conflict, codeNodeQuarantined, "The node is quarantined; its reports do not count.",
			nil)
	}
	svc.reports.Add(ctx, 1)
	return err
}

func fleetReport(nodeID string, sessionNo uint64, r *protocol.Report) fleet.Report {
	return fleet.Report{
		NodeID: nodeID, SessionNo: sessionNo, Counter: r.GetCounter(), Epoch: r.GetEpoch(), Generation: r.GetGeneration(),
		Conditions: r.GetConditions(),
	}
}

// Ack records that a document is on the node's disk.
func (svc *Service) Ack(ctx context.Context, nodeID string, a *protocol.Ack) error {
	if a.GetDocument() == protocol.Envelope_BUNDLE && a.GetGeneration() < svc.Keys.Bundle().Version() {
		// The root changed more than once: the next bundle follows.
		svc.Dispatcher.Enqueue(nodeID)
	}
	_, err := within(ctx, svc, db.LockTx, func(tx db.Tx) (struct{}, error) {
		err := fleet.RecordAck(ctx, tx, nodeID, a.GetDocument(), a.GetEpoch(), a.GetGeneration())
		failpoint.Hit("hub/ack/written")
		return struct{}{}, err
	})
	failpoint.Hit("hub/ack/committed")
	return err
}

// Nack records that a node refused a document: an event and the node itself show it to admins.
func (svc *Service) Nack(ctx context.Context, peer nodelink.Peer, r *protocol.Nack) error {
	nodeID := peer.NodeID
	switch r.GetDocument() {
	case protocol.Envelope_STATE, protocol.Envelope_LEASES, protocol.Envelope_BUNDLE:
	case protocol.Envelope_KIND_UNSPECIFIED, protocol.Envelope_USAGE:
		return nil
	default:
		return nil // the hub sends no such document
	}
	if err := svc.recordRefusal(ctx, originOf(peer), fleet.Refusal{
		Document: r.GetDocument().Text(), Epoch: r.GetEpoch(), Generation: r.GetGeneration(),
		Reason: r.GetReason().Text(), Detail: r.GetDetail(),
	}); err != nil {
		return err
	}
	if r.GetDocument() != protocol.Envelope_STATE || !plan.ShowsNewerState(r.GetReason()) {
		return nil
	}
	newest, err := db.Query(ctx, svc.DB, func(tx db.Tx) (plan.StateVersion, error) {
		return dispatch.NewestState(ctx, tx, nodeID)
	})
	if err != nil {
		return err
	}
	least := newest.GenerationAfterRefusal(r.GetGeneration())
	if least > 0 && svc.budgets.mayBumpGeneration(nodeID, svc.Now()) {
		svc.Dispatcher.EnqueueAtLeast(nodeID, least)
	}
	return nil
}

func (svc *Service) recordRefusal(ctx context.Context, from origin, r fleet.Refusal) error {
	now := svc.Now().Truncate(time.Microsecond)
	if !svc.budgets.mayRecordRefusal(from.nodeID, now) {
		return nil
	}
	r.At = now
	id := db.NewID()
	err := writeTx(ctx, svc, func(tx db.Tx) error {
		news, err := fleet.RecordRefusal(ctx, tx, from.nodeID, id, r)
		if err != nil || !news {
			return err
		}
		return nodeEvent(ctx, tx, from, "fleet.node.document_refused", actionDocument, map[string]any{
			"document": r.Document, "epoch": r.Epoch, "generation": r.Generation, "reason": r.Reason, "detail": r.Detail,
		}, now)
	})
	if err == nil {
		svc.Log.WarnContext(ctx, "document refused", slog.String("node_id", from.nodeID), slog.String("document", r.Document),
			slog.Uint64("generation", r.Generation), slog.String("reason", r.Reason))
	}
	return err
}

// StateUpload handles one message of a node's state upload after a restore.
func (svc *Service) StateUpload(ctx context.Context, peer nodelink.Peer, m *protocol.StateUpload) error {
	_, err := svc.uploads.Receive(ctx, protocol.NewNodeIdentity(peer.NodeID, peer.Key), m)
	return err
}

// PullPhases writes an event for each pull that has entered a phase, of members that are placed on the node, within its
// budget.
func (svc *Service) PullPhases(ctx context.Context, peer nodelink.Peer, pulls []*protocol.ImagePull) error {
	now := svc.Now()
	pulls = slices.DeleteFunc(slices.Clone(pulls), func(*protocol.ImagePull) bool {
		return !svc.budgets.mayRecordPhase(peer.NodeID, now)
	})
	if len(pulls) == 0 {
		return nil
	}
	return writeTx(ctx, svc, func(tx db.Tx) error { return recordPulls(ctx, tx, peer.NodeID, pulls, now) })
}

// OnDisconnect records the end of a connection. An event follows when the node stays away (Sweep).
func (svc *Service) OnDisconnect(ctx context.Context, nodeID string, sessionNo uint64) error {
	_, err := runTx(ctx, svc, func(tx db.Tx) (bool, error) {
		return fleet.Disconnect(ctx, tx, nodeID, sessionNo, svc.Now())
	})
	failpoint.Hit("hub/disconnect/committed")
	return err
}

// OnShutdown records the end of all connections of this replica.
func (svc *Service) OnShutdown(ctx context.Context) error {
	_, err := db.RunTx(ctx, svc.DB, func(tx db.Tx) (int64, error) {
		return fleet.DisconnectAll(ctx, tx, svc.ReplicaID, svc.Now())
	})
	return err
}

// Sweep marks nodes offline that have been silent for too long. A hub that was away first gives them time to reconnect.
func (svc *Service) Sweep(ctx context.Context) error {
	now := svc.Now().Truncate(time.Microsecond)
	if now.Sub(svc.Started) < fleet.OnlineWindow {
		return nil
	}
	silent, err := db.ReadTx(ctx, svc.DB, func(tx db.Tx) ([]string, error) { return fleet.Silent(ctx, tx, now) })
	if err != nil {
		return err
	}
	for _, id := range silent {
		f := finding.Finding{NodeID: id, Kind: finding.Contact, ResourceType: "node", ResourceID: id, At: now}
		err := db.WriteTx(ctx, svc.DB, func(tx db.Tx) error {
			still, err := fleet.SetUnreachable(ctx, tx, id, now)
			if err != nil || !still {
				return err
			}
			if err := setReachable(ctx, tx, origin{nodeID: id}, false, now); err != nil {
				return err
			}
			return change.ResolveFinding(ctx, tx, f)
		})
		switch {
		case err == nil:
		case ctx.Err() != nil, fault.Is(err, fault.Unavailable):
			return err
		default:
			// The next pass tries again; the other nodes' silence is recorded meanwhile.
			_ = change.SetAside(ctx, svc.DB, svc.Log, err, now, func(context.Context, db.Tx) (finding.Finding, error) {
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
