package capacity

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Create places an allocation on one of the nodes and claims its accelerators. It is active at once, because the node
// needs no preparation.
func Create(ctx context.Context, tx db.Tx, n NewAllocation, nodes []Node, now time.Time) (Allocation, error) {
	if err := n.readSKU(ctx, tx); err != nil {
		return Allocation{}, err
	}
	if n.NodeID != "" {
		nodes = slices.DeleteFunc(slices.Clone(nodes), func(node Node) bool { return node.ID != n.NodeID })
		if len(nodes) == 0 {
			return Allocation{}, fault.New(fault.Unprocessable, codeNodeUnknown, "There is no such node.", nil).WithField(
				"/node_id",
				"names no node")
		}
	}
	candidates, err := NodeCandidates(ctx, tx, nodes, n.OrgID)
	if err != nil {
		return Allocation{}, err
	}
	a, err := n.place(nodes, candidates, now)
	if err != nil {
		return Allocation{}, err
	}
	if err := insertAllocation(ctx, tx, a); err != nil {
		return Allocation{}, err
	}
	return a, insertClaims(ctx, tx, a, a.AcceleratorIDs, now)
}

// NodesFor returns at most limit nodes that n fits on, the tightest first. Create decides again: the nodes may have
// changed by then.
func NodesFor(ctx context.Context, tx db.Tx, n NewAllocation, nodes []Node, limit int) ([]string, error) {
	if err := n.readSKU(ctx, tx); err != nil {
		return nil, err
	}
	candidates, err := NodeCandidates(ctx, tx, nodes, n.OrgID)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, c := range plan.Fitting(n.need(), candidates) {
		if len(ids) == limit {
			break
		}
		ids = append(ids, c.ID)
	}
	return ids, nil
}

// Get returns an allocation of the project; one of another project answers as if it did not exist.
func Get(ctx context.Context, tx db.Tx, projectID, id string) (Allocation, error) {
	if !db.IsID(id) {
		return Allocation{}, errNotFound()
	}
	return selectAllocation(ctx, tx, `WHERE a.project_id = $1 AND a.id = $2`, projectID, id)
}

// GetAny returns an allocation of any project; commands on behalf of a principal use Get.
func GetAny(ctx context.Context, tx db.Tx, id string) (Allocation, error) {
	return selectAllocation(ctx, tx, `WHERE a.id = $1`, id)
}

func selectAllocation(ctx context.Context, tx db.Tx, where string, args ...any) (Allocation, error) {
	list, err := selectAllocations(ctx, tx, where, args...)
	if err == nil && len(list) == 0 {
		err = errNotFound()
	}
	if err != nil {
		return Allocation{}, err
	}
	return list[0], nil
}

// Filter narrows a listing; After is the last id of the page before.
type Filter struct {
	ProjectID string
	Status    Status
	After     string
	Limit     int
}

// List returns a page of a project's allocations, newest first.
func List(ctx context.Context, tx db.Tx, f Filter) ([]Allocation, error) {
	var w db.Where
	w.And("a.project_id = " + w.Arg(f.ProjectID))
	w.Compare("a.status =", string(f.Status))
	w.Compare("a.id <", f.After)
	newest := " ORDER BY a.id DESC LIMIT " + w.Arg(f.Limit)
	return selectAllocations(ctx, tx, w.SQL()+newest, w.Args...)
}

// Release releases an allocation. While members still use it, it is releasing; Free of the last one releases it. live
// is how many of its instances are not being decommissioned; Release refuses where there are any.
func Release(ctx context.Context, tx db.Tx, a Allocation, live int, now time.Time) (Allocation, error) {
	if err := a.errEnded(); err != nil {
		return a, err
	}
	if live > 0 {
		return a, fault.New(fault.Conflict, codeAllocationInUse, "App instances run in this allocation; decommission them "+
			"first.", nil)
	}
	held, err := heldReservations(ctx, tx, a.ID)
	if err != nil {
		return a, err
	}
	if held > 0 {
		a.Status, a.UpdatedAt = Releasing, now
		a.ResourceVersion++
		return a, updateAllocation(ctx, tx, a)
	}
	return release(ctx, tx, a, now)
}

// errEnded is nil for an allocation that the project still has.
func (a Allocation) errEnded() error {
	if a.Status == Active || a.Status == Pending {
		return nil
	}
	return fault.New(fault.Conflict, map[Status]fault.Code{
		Releasing: codeAllocationReleasing,
		Released:  codeAllocationReleased,
		NodeLost:  codeAllocationNodeLost,
	}[a.Status], "The allocation is already "+string(a.Status)+".", nil)
}

func release(ctx context.Context, tx db.Tx, a Allocation, now time.Time) (Allocation, error) {
	a.Status, a.UpdatedAt, a.ReleasedAt = Released, now, now
	a.ResourceVersion++
	if err := updateAllocation(ctx, tx, a); err != nil {
		return a, err
	}
	return a, endClaims(ctx, tx, a.ID, now)
}

// LostAllocation is an allocation whose node is lost.
type LostAllocation struct {
	Before Status
	// Allocation is node_lost; its claims and reservations have ended.
	Allocation Allocation
}

// Held sums up the allocations of an org that are not released.
type Held struct {
	Allocations, CPUCores, Accelerators int64
}

// HeldByOrg sums up the allocations of an org that are not released.
func HeldByOrg(ctx context.Context, tx db.Tx, orgID string) (Held, error) {
	return db.SelectOne(ctx, tx, pgx.RowToStructByPos[Held], `
		SELECT count(*), coalesce(sum(cpu_cores), 0)::INT8, coalesce(sum(accelerator_count), 0)::INT8
		FROM allocations WHERE org_id = $1 AND released_at IS NULL`, orgID)
}

// HeldOn returns how many allocations of a node are not released.
func HeldOn(ctx context.Context, tx db.Tx, nodeID string) (int, error) {
	return db.Value[int](ctx, tx, `SELECT count(*) FROM allocations WHERE node_id = $1 AND released_at IS NULL`, nodeID)
}

// MarkLost ends every allocation of a lost node, without proof that its members ended.
func MarkLost(ctx context.Context, tx db.Tx, nodeID string, now time.Time) ([]LostAllocation, error) {
	held, err := selectAllocations(ctx, tx, `WHERE a.node_id = $1 AND a.released_at IS NULL ORDER BY a.id`, nodeID)
	if err != nil {
		return nil, err
	}
	lost := make([]LostAllocation, 0, len(held))
	for _, a := range held {
		before := a.Status
		a.Status, a.UpdatedAt, a.ReleasedAt = NodeLost, now, now
		a.ResourceVersion++
		if err := updateAllocation(ctx, tx, a); err != nil {
			return nil, err
		}
		if err := endClaims(ctx, tx, a.ID, now); err != nil {
			return nil, err
		}
		if err := endReservations(ctx, tx, a.ID); err != nil {
			return nil, err
		}
		lost = append(lost, LostAllocation{Before: before, Allocation: a})
	}
	return lost, nil
}

// Reservation is the part of an allocation that one member uses.
type Reservation struct {
	MemberID     string
	AllocationID string
	NodeID       string
	Choice       plan.Choice
}

// Reserve records what a member uses; the choice must come from AllocationCandidates in the same transaction.
func Reserve(ctx context.Context, tx db.Tx, r Reservation, now time.Time) error {
	if err := insertReservation(ctx, tx, r, now); err != nil {
		return err
	}
	if err := insertReservedPorts(ctx, tx, r); err != nil {
		return err
	}
	return insertReservedAccelerators(ctx, tx, r)
}

// Free ends the reservation of a member that is proved gone. It returns the allocation where that releases it, and nil
// otherwise. Freeing twice changes nothing.
func Free(ctx context.Context, tx db.Tx, memberID string, now time.Time) (*Allocation, error) {
	allocationID, freed, err := endReservation(ctx, tx, memberID)
	if err != nil || !freed {
		return nil, err
	}
	a, err := GetAny(ctx, tx, allocationID)
	if err != nil || a.Status != Releasing {
		return nil, err
	}
	held, err := heldReservations(ctx, tx, allocationID)
	if err != nil || held > 0 {
		return nil, err
	}
	if a, err = release(ctx, tx, a, now); err != nil {
		return nil, err
	}
	return &a, nil
}

// AllocationCandidates returns the free capacity of the named allocations of a project, or of all active ones where
// none is named. A fault points at a named one that is not the project's.
func AllocationCandidates(ctx context.Context, tx db.Tx, projectID string, ids []string) ([]Candidate, error) {
	if len(ids) > 1 {
		return nil, fault.New(fault.Unprocessable, codePlacementUnsupported, "An instance of this version runs in one "+
			"allocation; name one.", nil).
			WithField("/placement_intent/allocation_ids", "names more than one").Permanent()
	}
	var list []Allocation
	for i, id := range ids {
		a, err := Get(ctx, tx, projectID, id)
		if fault.Is(err, fault.NotFound) {
			return nil, fault.New(fault.Unprocessable, codeAllocationUnknown, "An allocation that was named for placement is "+
				"not in this project.", nil).
				WithField(fmt.Sprintf("/placement_intent/allocation_ids/%d", i), "names no allocation of this project")
		}
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	if len(ids) == 0 {
		var err error
		if list, err = selectAllocations(ctx, tx, `WHERE a.project_id = $1 AND a.status = 'active' ORDER BY a.id`,
			projectID); err != nil {
			return nil, err
		}
	}
	allocationIDs := make([]string, 0, len(list))
	for _, a := range list {
		allocationIDs = append(allocationIDs, a.ID)
	}
	free, err := freeAccelerators(ctx, tx, allocationIDs)
	if err != nil {
		return nil, err
	}
	candidates := make([]Candidate, 0, len(list))
	for _, a := range list {
		candidates = append(candidates, Candidate{NodeID: a.NodeID, Allocation: a, Candidate: plan.Candidate{
			ID: a.ID, Usable: a.Status == Active, Shape: string(a.Shape), CPUMillis: a.FreeCPUMillis,
			MemoryBytes: a.FreeMemoryBytes, Accelerators: free[a.ID],
		}})
	}
	return candidates, nil
}

// LentCandidates returns the free capacity of all active allocations of a project, for members of another org: without
// slices of GPUs that no hardware keeps apart.
func LentCandidates(ctx context.Context, tx db.Tx, projectID, orgID string) ([]Candidate, error) {
	candidates, err := AllocationCandidates(ctx, tx, projectID, nil)
	for i := range candidates {
		c := &candidates[i]
		if c.Allocation.OrgID != orgID {
			c.Accelerators = slices.DeleteFunc(c.Accelerators, needsOneOrg)
		}
	}
	return candidates, err
}

// needsOneOrg reports whether one org has to have all slices of the GPU that this is one of.
func needsOneOrg(a plan.Accelerator) bool {
	return a.PartOf != "" && (a.Vendor != protocol.VendorNVIDIA || a.Sharing != "")
}

// Candidate is an allocation with its free capacity.
type Candidate struct {
	plan.Candidate
	NodeID     string
	Allocation Allocation
}

// Choose returns the allocation for one member: the named one if it fits, otherwise the only one that fits.
func Choose(needs []plan.Need, candidates []Candidate, named bool) (Candidate, plan.Choice, error) {
	var (
		at    Candidate
		found plan.Choice
		fits  int
		older int
		// inUse is the last candidate that fits but for a port of its node, shared one that fits but for its way of sharing.
		inUse, shared *Candidate
	)
	for _, r := range candidates {
		c, misfit := plan.FirstFit(needs, r.Candidate)
		if misfit == plan.LacksFeature {
			older++
		}
		if misfit == plan.LacksPort {
			inUse = &r
		}
		if misfit == plan.SharedOtherwise {
			shared = &r
		}
		if misfit != plan.Fits {
			continue
		}
		if fits == 0 {
			at, found = r, c
		}
		fits++
	}
	switch {
	case fits == 1:
		return at, found, nil
	case fits == 0 && older > 0:
		return Candidate{}, plan.Choice{}, FeatureMissing()
	case fits == 0 && inUse != nil:
		return Candidate{}, plan.Choice{}, PortUnavailable(needs[0].HostPorts, inUse.HostPorts)
	case fits == 0 && shared != nil:
		return Candidate{}, plan.Choice{}, sharedOtherwise(needs, *shared)
	case named:
		return Candidate{}, plan.Choice{}, fault.New(fault.Conflict, CodeInsufficient,
			"The named allocation is not active, its node takes nothing new, or it has not enough left for this version.",
			nil).WithField("/placement_intent/allocation_ids", "has no room")
	case fits == 0:
		return Candidate{}, plan.Choice{}, placementRequired("No active allocation of this project has room for this " +
			"version; create one.")
	default:
		return Candidate{}, plan.Choice{}, placementRequired("Several allocations of this project have room; name one.")
	}
}

// ChooseFirst returns the first allocation that fits one member, for who does not choose.
func ChooseFirst(needs []plan.Need, candidates []Candidate) (Candidate, plan.Choice, error) {
	for i, c := range candidates {
		if _, misfit := plan.FirstFit(needs, c.Candidate); misfit == plan.Fits {
			candidates = candidates[i : i+1]
			break
		}
	}
	at, choice, err := Choose(needs, candidates, false)
	if fault.As(err).Code == codePlacementRequired {
		err = fault.New(fault.Conflict, CodeInsufficient, "The platform has no room left for what it manages; ask its "+
			"admin, or try again later.", nil)
	}
	return at, choice, err
}

// FeatureMissing is the fault of a version that uses what no agent in question knows.
func FeatureMissing() error {
	return fault.New(fault.Conflict, codeFeatureMissing, "The node's agent is older than the manifest of this version; "+
		"once the node is updated, try again.", nil).WithField("/version", "needs features that the node lacks")
}

// IsFeatureMissing reports whether an error is FeatureMissing.
func IsFeatureMissing(err error) bool { return fault.As(err).Code == codeFeatureMissing }

// sharedOtherwise is the fault of an instance that needs only another way of sharing to fit the allocation.
func sharedOtherwise(needs []plan.Need, at Candidate) error {
	f := fault.New(fault.Conflict, CodeInsufficient, "The accelerators of the allocation are shared in another way than "+
		"accelerator_sharing says; change it where the version allows that, or use another allocation.", nil)
	const pointer = "/resources/accelerator_sharing"
	if sharing, ok := plan.SharingThatFits(needs, at.Candidate); ok && sharing != "" {
		return f.WithHint(pointer, "the allocation has slices of shared GPUs", sharing)
	}
	return f.WithHint(pointer, "the allocation has GPUs that are not shared", "leave it out")
}

func placementRequired(public string) error {
	return fault.New(fault.Conflict, codePlacementRequired, public, nil).WithField("/placement_intent/allocation_ids",
		"is needed here")
}

// SnapshotFor returns the allocations of a node that are not released, and the ids of its accelerators.
func SnapshotFor(ctx context.Context, tx db.Tx, nodeID string) ([]plan.Allocation, []string, error) {
	held, err := selectAllocations(ctx, tx, `WHERE a.node_id = $1 AND a.released_at IS NULL ORDER BY a.id`, nodeID)
	if err != nil {
		return nil, nil, err
	}
	out := make([]plan.Allocation, 0, len(held))
	for _, a := range held {
		out = append(out, plan.Allocation{
			ID: a.ID, NodeID: a.NodeID, OrgID: a.OrgID, ProjectID: a.ProjectID,
			CPUMillis: a.CPUCores * millisPerCore, MemoryBytes: a.MemoryMiB * mebibyte, AcceleratorIDs: a.AcceleratorIDs,
		})
	}
	ids, err := db.Select(ctx, tx, pgx.RowTo[string], `SELECT id FROM accelerators WHERE node_id = $1 ORDER BY id`, nodeID)
	return out, ids, err
}
