package capacity

import (
	"context"
	"math"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Use is what a member uses of its allocation.
type Use struct {
	CPUMillis, MemoryBytes int64
	AcceleratorIDs         []string
	// HostPorts are the ports of the node that were chosen.
	HostPorts []uint32
	// Volumes are those of the project.
	Volumes []VolumeUse
}

// UseOf is what a member uses that runs the services. One that builds an environment runs in place of another.
func UseOf(services []*protocol.Service) (u Use) {
	for _, s := range services {
		if s.GetEnvironment().GetBuilds() {
			continue
		}
		r := s.GetResources()
		u.CPUMillis += int64(r.GetCpuMillis())
		u.MemoryBytes += int64(r.GetMemoryBytes())
		u.AcceleratorIDs = append(u.AcceleratorIDs, r.GetAcceleratorIds()...)
	}
	u.HostPorts, u.Volumes = manifest.HostPortsOf(services), volumeUses(services)
	return u
}

// Resize chooses what a member uses next of its allocation, its own accelerators first, and reserves it beside what it
// uses now: a node runs one or the other, and may go back. Where beside has no reason against it, the node runs what
// beside returns along with what it runs now, and both are reserved if the allocation has room; why says what keeps it
// from that. Settle ends that. Whether the node's owner lets a tenant choose the ports of the node is the caller's
// question.
func Resize(ctx context.Context, tx db.Tx, memberID string, needs []plan.Need,
	beside func(plan.Choice) (Use, string, error),
) (choice plan.Choice, why string, err error) {
	at, now, err := inPlace(ctx, tx, memberID)
	if err != nil {
		return plan.Choice{}, "", err
	}
	choice, misfit := plan.FirstFit(needs, at.Candidate)
	switch misfit {
	case plan.Fits:
	case plan.LacksPort:
		return plan.Choice{}, "", PortUnavailable(needs[0].HostPorts, at.HostPorts)
	case plan.SharedOtherwise:
		return plan.Choice{}, "", sharedOtherwise(needs, at)
	default:
		return plan.Choice{}, "", misfitInPlace(misfit)
	}
	next := Use{
		CPUMillis:      choice.Need.CPUMillis,
		MemoryBytes:    choice.Need.MemoryBytes,
		AcceleratorIDs: choice.AcceleratorIDs,
		HostPorts:      choice.Need.HostPorts,
	}
	more, why, err := beside(choice)
	if err != nil {
		return plan.Choice{}, "", err
	}
	next, why = at.with(next, now, more, why)
	return choice, why, at.reserve(ctx, tx, memberID, next)
}

// with adds to what a member uses next what runs along with what it uses now, where there is room and nothing against
// it.
func (c Candidate) with(next, now, more Use, against string) (use Use, why string) {
	cpu, memory := now.CPUMillis+more.CPUMillis, now.MemoryBytes+more.MemoryBytes
	switch {
	case against != "":
		return next, against
	case cpu > c.CPUMillis || memory > c.MemoryBytes:
		return next, "the allocation has no room for both"
	}
	next.CPUMillis, next.MemoryBytes = max(next.CPUMillis, cpu), max(next.MemoryBytes, memory)
	return next, ""
}

// Regain reserves what a member used once, beside what it uses now. Where nothing is against it, the node runs more
// along with what it runs now; why is as Resize returns it.
func Regain(ctx context.Context, tx db.Tx, memberID string, use, more Use, against string) (why string, err error) {
	at, now, err := inPlace(ctx, tx, memberID)
	if err != nil {
		return "", err
	}
	for _, id := range use.AcceleratorIDs {
		if !slices.ContainsFunc(at.Accelerators, func(a plan.Accelerator) bool { return a.ID == id }) {
			return "", misfitInPlace(plan.LacksAccelerators)
		}
	}
	need := plan.Need{CPUMillis: use.CPUMillis, MemoryBytes: use.MemoryBytes, HostPorts: use.HostPorts}
	if _, misfit := plan.Fit(need, at.Candidate); misfit != plan.Fits {
		return "", misfitInPlace(misfit)
	}
	use, why = at.with(use, now, more, against)
	return why, at.reserve(ctx, tx, memberID, use)
}

// Settle leaves a member with what it uses; what was reserved beside that is free.
func Settle(ctx context.Context, tx db.Tx, memberID string, use Use) error {
	if err := tx.Queue(ctx, `UPDATE reservations SET cpu_millis = $2, memory_bytes = $3
		WHERE member_id = $1 AND freed_at IS NULL`, memberID, use.CPUMillis, use.MemoryBytes); err != nil {
		return err
	}
	if err := tx.Queue(ctx, `DELETE FROM reserved_ports WHERE member_id = $1 AND port <> ALL($2::INT8[])`, memberID,
		portNumbers(use.HostPorts)); err != nil {
		return err
	}
	if err := keepVolumes(ctx, tx, memberID, use.Volumes); err != nil {
		return err
	}
	return tx.Queue(ctx, `DELETE FROM reserved_accelerators WHERE member_id = $1 AND accelerator_id <> ALL($2::TEXT[])`,
		memberID, append([]string{}, use.AcceleratorIDs...))
}

// SettleEither leaves a member with the larger of two sizes: it runs one or the other. Accelerators, ports and volumes
// of both stay its own.
func SettleEither(ctx context.Context, tx db.Tx, memberID string, a, b Use) error {
	return tx.Queue(ctx, `UPDATE reservations SET cpu_millis = least(cpu_millis, $2),
		memory_bytes = least(memory_bytes, $3) WHERE member_id = $1 AND freed_at IS NULL`, memberID,
		max(a.CPUMillis, b.CPUMillis), max(a.MemoryBytes, b.MemoryBytes))
}

// inPlace returns the allocation of a member, with the capacity that is free or the member's own,
// and what of that is its own.
func inPlace(ctx context.Context, tx db.Tx, memberID string) (c Candidate, use Use, err error) {
	var allocationID string
	if err := tx.QueryRow(ctx, `SELECT allocation_id, cpu_millis, memory_bytes FROM reservations
		WHERE member_id = $1 AND freed_at IS NULL`, memberID).Scan(&allocationID, &use.CPUMillis,
		&use.MemoryBytes); err != nil {
		return Candidate{}, Use{}, err
	}
	a, err := GetAny(ctx, tx, allocationID)
	if err != nil {
		return Candidate{}, Use{}, err
	}
	c = Candidate{NodeID: a.NodeID, Allocation: a, Candidate: plan.Candidate{
		ID: a.ID, Usable: true, Shape: string(a.Shape), CPUMillis: a.FreeCPUMillis + use.CPUMillis,
		MemoryBytes: a.FreeMemoryBytes + use.MemoryBytes,
	}}
	var row acceleratorRow
	var mine bool
	err = db.ForEach(ctx, tx, append(row.targets(), &mine), func() {
		free := row.free()
		// The member keeps one that is unhealthy: a change of size is no repair.
		free.Mine, free.Healthy = mine, mine || free.Healthy
		c.Accelerators = append(c.Accelerators, free)
	}, `SELECT `+acceleratorColumns+`, r.member_id IS NOT NULL
		FROM claims c JOIN accelerators g ON g.node_id = c.node_id AND g.id = c.accelerator_id
		LEFT JOIN reserved_accelerators r ON r.node_id = g.node_id AND r.accelerator_id = g.id AND r.freed_at IS NULL
		WHERE c.allocation_id = $1 AND c.released_at IS NULL AND (r.member_id IS NULL OR r.member_id = $2)
		ORDER BY g.id`, allocationID, memberID)
	if err != nil {
		return Candidate{}, Use{}, err
	}
	taken, err := takenPorts(ctx, tx, []string{a.NodeID}, memberID)
	c.HostPorts = plan.HostPorts{
		Allowed: &protocol.PortRange{First: 1, Last: math.MaxUint16},
		Taken:   taken[a.NodeID],
	}
	return c, use, err
}

func (c Candidate) reserve(ctx context.Context, tx db.Tx, memberID string, use Use) error {
	if err := tx.Queue(ctx, `UPDATE reservations SET cpu_millis = greatest(cpu_millis, $2),
		memory_bytes = greatest(memory_bytes, $3) WHERE member_id = $1 AND freed_at IS NULL`, memberID, use.CPUMillis,
		use.MemoryBytes); err != nil {
		return err
	}
	added := slices.DeleteFunc(slices.Clone(use.AcceleratorIDs), func(id string) bool {
		return slices.ContainsFunc(c.Accelerators, func(a plan.Accelerator) bool { return a.ID == id && a.Mine })
	})
	r := Reservation{
		MemberID:     memberID,
		AllocationID: c.ID,
		NodeID:       c.NodeID,
		Choice:       plan.Choice{AcceleratorIDs: added, Need: plan.Need{HostPorts: use.HostPorts}},
	}
	if err := insertReservedPorts(ctx, tx, r); err != nil {
		return err
	}
	if err := reserveVolumes(ctx, tx, memberID, c.ID, use.Volumes); err != nil {
		return err
	}
	return insertReservedAccelerators(ctx, tx, r)
}

// misfitInPlace names the field that the allocation has too little for.
func misfitInPlace(misfit plan.Misfit) error {
	f := fault.New(fault.Conflict, CodeInsufficient, "The allocation of the app instance has not enough left for this; "+
		"ask for less, or deploy it in a larger allocation.", nil)
	switch misfit {
	case plan.LacksCPU:
		return f.WithField("/resources/cpu_millis", "is more than the allocation has left")
	case plan.LacksMemory:
		return f.WithField("/resources/memory_mib", "is more than the allocation has left")
	case plan.LacksAccelerators:
		return f.WithField("/resources/accelerators", "is more than the allocation has left")
	case plan.LacksPort:
		return fault.New(fault.Conflict, codePortUnavailable, "Another instance has a port of the node that this revision "+
			"was published on; upgrade to its version with another port.", nil).
			WithField("/version", "was published on a port that is in use")
	case plan.Fits, plan.NotUsable, plan.NotEmpty, plan.WrongShape, plan.LacksFeature, plan.NotEntitled,
		plan.VolumeElsewhere, plan.SharedOtherwise:
	}
	return f.WithField("/version", "does not run in this allocation: "+string(misfit))
}
