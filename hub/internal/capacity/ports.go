package capacity

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// SetHostPorts gives each candidate the ports of its node that may be chosen; allowed are those that the owners of the
// nodes allow, by node.
func SetHostPorts(ctx context.Context, tx db.Tx, candidates []Candidate, allowed map[string]*protocol.PortRange,
) error {
	taken, err := takenPorts(ctx, tx, slices.Collect(maps.Keys(allowed)), "")
	for n, c := range candidates {
		candidates[n].HostPorts = plan.HostPorts{Allowed: allowed[c.NodeID], Taken: taken[c.NodeID]}
	}
	return err
}

// PortUnavailable is the fault of ports that a node cannot give; it names each.
func PortUnavailable(chosen []uint32, at plan.HostPorts) error {
	f := fault.New(fault.Conflict, codePortUnavailable, "The node cannot publish the app on a port that was chosen; "+
		"choose another, or leave it to the node.", nil)
	for n, port := range chosen {
		if reason := at.Refuses(port); reason != "" {
			f = f.WithField(fmt.Sprintf("/ports/%d/host_port", n), reason)
		}
	}
	return f
}

// takenPorts returns the ports that members of nodes have chosen, by node, except those of one member.
func takenPorts(ctx context.Context, tx db.Tx, nodeIDs []string, except string) (map[string][]uint32, error) {
	var (
		node string
		port int64
	)
	out := map[string][]uint32{}
	return out, db.ForEach(ctx, tx, []any{&node, &port}, func() { out[node] = append(out[node], uint32(port)) },
		`SELECT node_id, port FROM reserved_ports WHERE node_id = ANY($1::UUID[]) AND member_id::TEXT <> $2`, nodeIDs, except)
}

// insertReservedPorts relies on the primary key: a port of the node has one member. What the member has already stays.
func insertReservedPorts(ctx context.Context, tx db.Tx, r Reservation) error {
	ports := portNumbers(r.Choice.Need.HostPorts)
	if len(ports) == 0 {
		return nil
	}
	tag, err := tx.Exec(ctx,
		`INSERT INTO reserved_ports (node_id, port, member_id, allocation_id)
		SELECT $1::UUID, x.port, $2::UUID, $3::UUID FROM unnest($4::INT8[]) AS x(port)
		ON CONFLICT (node_id, port) DO UPDATE SET allocation_id = excluded.allocation_id
			WHERE reserved_ports.member_id = excluded.member_id`,
		r.NodeID, r.MemberID, r.AllocationID, ports)
	if err == nil && tag.RowsAffected() != int64(len(ports)) {
		return fault.New(fault.Conflict, codePortUnavailable, "Another instance chose the same port just now; try again.",
			nil)
	}
	return err
}

// portNumbers names each port once, and leaves out what the node chooses.
func portNumbers(ports []uint32) []int64 {
	numbers := []int64{}
	for _, p := range ports {
		if p != 0 && !slices.Contains(numbers, int64(p)) {
			numbers = append(numbers, int64(p))
		}
	}
	return numbers
}
