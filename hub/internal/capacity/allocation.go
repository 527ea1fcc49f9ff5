package capacity

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Create places an allocation on one of the nodes and claims its accelerators. It is active at once: nothing has to
// happen on the node before something can be placed in it.
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
	rooms, err := nodeRooms(ctx, tx, nodes, n.OrgID)
	if err != nil {
		return Allocation{}, err
	}
	a, err := n.place(nodes, rooms, now)
	if err != nil {
		return Allocation{}, err
	}
	if err := insertAllocation(ctx, tx, a); err != nil {
		return Allocation{}, err
	}
	for _, id := range a.AcceleratorIDs {
		if err := insertClaim(ctx, tx, a, id, now); err != nil {
			return Allocation{}, err
		}
	}
	return a, nil
}

// Candidates gives the nodes that have room for n, the tightest first, at most limit. By the time of Create that may
// have changed.
func Candidates(ctx context.Context, tx db.Tx, n NewAllocation, nodes []Node, limit int) ([]string, error) {
	if err := n.readSKU(ctx, tx); err != nil {
		return nil, err
	}
	rooms, err := nodeRooms(ctx, tx, nodes, n.OrgID)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, c := range plan.Fitting(n.need(), rooms) {
		if len(ids) == limit {
			break
		}
		ids = append(ids, c.ID)
	}
	return ids, nil
}

// readSKU completes n by its SKU, where it names one.
func (n *NewAllocation) readSKU(ctx context.Context, tx db.Tx) error {
	if n.SKU == "" {
		return nil
	}
	sku, err := skuBySlug(ctx, tx, n.SKU)
	if err != nil {
		return err
	}
	if err := n.asSKU(sku); err != nil {
		return err
	}
	n.AcceleratorModel = sku.AcceleratorModel
	return nil
}

// Get gives an allocation of the project; another project's answers like none.
func Get(ctx context.Context, tx db.Tx, projectID, id string) (Allocation, error) {
	if !db.IsID(id) {
		return Allocation{}, errNotFound()
	}
	list, err := selectAllocations(ctx, tx, `WHERE a.project_id = $1 AND a.id = $2`, projectID, id)
	if err != nil {
		return Allocation{}, err
	}
	if len(list) == 0 {
		return Allocation{}, errNotFound()
	}
	return list[0], nil
}

// GetAny gives an allocation, whosever it is; commands on behalf of a principal use Get.
func GetAny(ctx context.Context, tx db.Tx, id string) (Allocation, error) {
	list, err := selectAllocations(ctx, tx, `WHERE a.id = $1`, id)
	if err == nil && len(list) == 0 {
		err = errNotFound()
	}
	if err != nil {
		return Allocation{}, err
	}
	return list[0], nil
}

// Filter narrows a list; After is the id that the page before ended with.
type Filter struct {
	ProjectID string
	Status    Status
	After     string
	Limit     int
}

// List gives a page of a project's allocations, the newest first.
func List(ctx context.Context, tx db.Tx, f Filter) ([]Allocation, error) {
	where, args := `WHERE a.project_id = $1`, []any{f.ProjectID}
	if f.Status != "" {
		args = append(args, string(f.Status))
		where += fmt.Sprintf(` AND a.status = $%d`, len(args))
	}
	if f.After != "" {
		args = append(args, f.After)
		where += fmt.Sprintf(` AND a.id < $%d`, len(args))
	}
	args = append(args, f.Limit)
	return selectAllocations(ctx, tx, where+fmt.Sprintf(` ORDER BY a.id DESC LIMIT $%d`, len(args)), args...)
}

// Release gives an allocation back. What still has to be removed from the node keeps it releasing until Free was called
// for the last of it. live is how many instances in it are not being decommissioned: they are never ended by a side
// effect.
func Release(ctx context.Context, tx db.Tx, a Allocation, live int, now time.Time) (Allocation, error) {
	switch {
	case a.Status != Active && a.Status != Pending:
		return a, fault.New(fault.Conflict, map[Status]fault.Code{
			Releasing: codeAllocationReleasing,
			Released:  codeAllocationReleased,
			NodeLost:  codeAllocationNodeLost,
		}[a.Status], "The allocation is already "+string(a.Status)+".", nil)
	case live > 0:
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

func release(ctx context.Context, tx db.Tx, a Allocation, now time.Time) (Allocation, error) {
	a.Status, a.UpdatedAt, a.ReleasedAt = Released, now, now
	a.ResourceVersion++
	if err := updateAllocation(ctx, tx, a); err != nil {
		return a, err
	}
	return a, endClaims(ctx, tx, a.ID, now)
}

// Loss is an allocation whose node is gone for good.
type Loss struct {
	Before Status
	// Allocation is as it is now: node_lost, its claims and all that members took of it ended.
	Allocation Allocation
}

// Held is what the allocations of an org hold that are not released.
type Held struct {
	Allocations, CPUCores, Accelerators int64
}

// HeldByOrg sums up the allocations of an org that are not released.
func HeldByOrg(ctx context.Context, tx db.Tx, orgID string) (Held, error) {
	return sumHeld(ctx, tx, orgID)
}

// HeldOn is how many allocations a node still has to serve.
func HeldOn(ctx context.Context, tx db.Tx, nodeID string) (int, error) {
	return countHeld(ctx, tx, nodeID)
}

// Lose ends every allocation of a node that is gone for good, without any proof of what became of what ran there.
func Lose(ctx context.Context, tx db.Tx, nodeID string, now time.Time) ([]Loss, error) {
	held, err := selectAllocations(ctx, tx, `WHERE a.node_id = $1 AND a.released_at IS NULL ORDER BY a.id`, nodeID)
	if err != nil {
		return nil, err
	}
	losses := make([]Loss, 0, len(held))
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
		losses = append(losses, Loss{Before: before, Allocation: a})
	}
	return losses, nil
}

// Reservation is what one member takes of an allocation.
type Reservation struct {
	MemberID     string
	AllocationID string
	NodeID       string
	Choice       plan.Choice
}

// Reserve writes down what a member takes; the choice must have been made from Rooms in this transaction.
func Reserve(ctx context.Context, tx db.Tx, r Reservation, now time.Time) error {
	if err := insertReservation(ctx, tx, r, now); err != nil {
		return err
	}
	for _, id := range r.Choice.AcceleratorIDs {
		if err := insertReservedAccelerator(ctx, tx, r, id); err != nil {
			return err
		}
	}
	return nil
}

// Free gives back what a member took, once it is proved gone. It returns the allocation when that was the last thing
// that kept it from being released, and nil otherwise. Freeing twice changes nothing.
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

// Rooms gives what a project's allocations have left: those named, or all active ones where none is. A named one that
// is not there, or is another project's, is a fault that points at it.
func Rooms(ctx context.Context, tx db.Tx, projectID string, ids []string) ([]Room, error) {
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
	rooms := make([]Room, 0, len(list))
	for _, a := range list {
		rooms = append(rooms, Room{NodeID: a.NodeID, Allocation: a, Room: plan.Room{
			ID: a.ID, Usable: a.Status == Active, Shape: string(a.Shape), CPUMillis: a.FreeCPUMillis,
			MemoryBytes: a.FreeMemoryBytes, Accelerators: free[a.ID],
		}})
	}
	return rooms, nil
}

// Room is what an allocation has left, and where it is.
type Room struct {
	plan.Room
	NodeID     string
	Allocation Allocation
}

// Choose picks the allocation for one member: the named one if it fits, otherwise the only one with room.
func Choose(needs []plan.Need, rooms []Room, named bool) (Room, plan.Choice, error) {
	var (
		at    Room
		found plan.Choice
		fits  int
	)
	for _, r := range rooms {
		if c, ok := plan.FirstFit(needs, r.Room); ok {
			if fits == 0 {
				at, found = r, c
			}
			fits++
		}
	}
	switch {
	case fits == 1:
		return at, found, nil
	case named:
		return Room{}, plan.Choice{}, fault.New(fault.Conflict, CodeInsufficient,
			"The named allocation is not active, its node takes nothing new, or it has not enough left for this version.",
			nil).WithField("/placement_intent/allocation_ids", "has no room")
	case fits == 0:
		return Room{}, plan.Choice{}, placementRequired("No active allocation of this project has room for this version; " +
			"create one.")
	default:
		return Room{}, plan.Choice{}, placementRequired("Several allocations of this project have room; name one.")
	}
}

func placementRequired(public string) error {
	return fault.New(fault.Conflict, codePlacementRequired, public, nil).WithField("/placement_intent/allocation_ids",
		"is needed here")
}

// SnapshotFor gives what of a node is held, and its accelerators, for the compiler.
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
	ids, err := acceleratorIDs(ctx, tx, nodeID)
	return out, ids, err
}
