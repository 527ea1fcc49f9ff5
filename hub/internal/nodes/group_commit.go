package nodes

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxGroup bounds a group. A larger one would save little more per request and make all of them wait longer.
const maxGroup = 64

// request is a hello, or a report without workloads, that waits for its commit.
type request struct {
	peer      nodelink.Peer
	hello     *protocol.Hello
	report    *protocol.Report
	sessionNo uint64

	// Set before done is closed. applied is false for a report that changes more: it needs a transaction of its own.
	opened  openedSession
	applied bool
	err     error
	done    chan struct{}
	// abandoned is closed when nobody waits for the result any more.
	abandoned <-chan struct{}
}

func (r *request) isAbandoned() bool {
	select {
	case <-r.abandoned:
		return true
	default:
		return false
	}
}

func errBusy(cause error) error {
	return fault.New(fault.Unavailable, codeHubBusy, "The hub is busy with other nodes; dial again in a moment.", cause)
}

// nextGroup splits off the requests that waited longest, one of each node. It drops those whose connection has ended:
// where a slow database makes nodes give up and dial again, it would otherwise commit nothing but what they gave up.
func nextGroup(waiting []*request) (group, rest []*request) {
	inGroup := map[string]bool{}
	for _, r := range waiting {
		if r.isAbandoned() {
			continue
		}
		if len(group) == maxGroup || inGroup[r.peer.NodeID] {
			rest = append(rest, r)
			continue
		}
		inGroup[r.peer.NodeID] = true
		group = append(group, r)
	}
	return group, rest
}

// commitGroup commits requests in one transaction and sets the result of each.
func (svc *Service) commitGroup(ctx context.Context, group []*request) {
	commitOrSplit(ctx, group, svc.tryCommitGroup)
	for _, r := range group {
		close(r.done)
	}
}

// submit adds a request to the next group and returns when it is committed. A connection sends one message at a time,
// so the connections bound how many requests wait.
func (svc *Service) submit(ctx context.Context, r *request) error {
	r.done, r.abandoned = make(chan struct{}), ctx.Done()
	svc.requests.Put(ctx, r)
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return errBusy(ctx.Err())
	}
}

// commitOrSplit commits a batch in one transaction. When that fails permanently, it commits each half, and so on, until
// only the item that causes the failure fails. commit sets the result of each item.
func commitOrSplit[T any](ctx context.Context, batch []T, commit func(context.Context, []T) error) {
	if err := commit(ctx, batch); err == nil || len(batch) <= 1 || fault.Is(err, fault.Unavailable) {
		return
	}
	commitOrSplit(ctx, batch[:len(batch)/2], commit)
	commitOrSplit(ctx, batch[len(batch)/2:], commit)
}

func (svc *Service) tryCommitGroup(ctx context.Context, group []*request) error {
	now := svc.Now().Truncate(time.Microsecond)
	var hellos, reports []*request
	for _, r := range group {
		if r.hello != nil {
			hellos = append(hellos, r)
		} else {
			reports = append(reports, r)
		}
	}
	type result struct {
		opened  []openedSession
		applied []bool
	}
	out, err := db.RunTx(ctx, svc.DB, func(tx db.Tx) (o result, err error) {
		if len(hellos) > 0 {
			if o.opened, err = svc.openSessions(ctx, tx, hellos, now); err != nil {
				return o, err
			}
			failpoint.Hit("hub/hello/written")
		}
		if len(reports) > 0 {
			if o.applied, err = applyUnchangedReports(ctx, tx, &svc.budgets, reports, now); err != nil {
				return o, err
			}
		}
		return o, nil
	})
	for n, r := range hellos {
		if r.err = err; err == nil {
			r.opened, r.err = out.opened[n], out.opened[n].refused
		}
	}
	for n, r := range reports {
		if r.err = err; err == nil {
			r.applied = out.applied[n]
		}
	}
	return err
}

// applyUnchangedReports applies the reports that change only the time of the node's last contact, and returns which.
func applyUnchangedReports(ctx context.Context, tx db.Tx, b *budgets, requests []*request, now time.Time,
) ([]bool, error) {
	ids := nodesOf(requests)
	hosting, err := instance.MemberCounts(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	applied := make([]bool, len(requests))
	inventories := map[origin][]*protocol.Accelerator{}
	environments := map[string][]*protocol.InstalledEnvironment{}
	var at []int
	var reports []fleet.Report
	for n, r := range requests {
		if hosting[r.peer.NodeID] > 0 {
			continue
		}
		at, reports = append(at, n), append(reports, fleetReport(r.peer.NodeID, r.sessionNo, r.report))
	}
	if len(reports) == 0 {
		return applied, nil
	}
	quiet, err := fleet.ApplyUnchangedReports(ctx, tx, reports, now)
	if err != nil {
		return nil, err
	}
	for k, n := range at {
		if applied[n] = quiet[k]; applied[n] {
			inventories[originOf(requests[n].peer)] = requests[n].report.GetAccelerators()
			environments[requests[n].peer.NodeID] = requests[n].report.GetEnvironments()
		}
	}
	if err := capacity.ApplyEnvironments(ctx, tx, environments); err != nil {
		return nil, err
	}
	return applied, applyInventories(ctx, tx, b, inventories, now)
}

func nodesOf(requests []*request) []string {
	ids := make([]string, 0, len(requests))
	for _, r := range requests {
		ids = append(ids, r.peer.NodeID)
	}
	return ids
}
