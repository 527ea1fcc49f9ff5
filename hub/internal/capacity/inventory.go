package capacity

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// MaxAcceleratorsPerNode bounds one node's inventory; what a report names beyond it is left out.
const MaxAcceleratorsPerNode = 256

// ApplyInventory takes over which accelerators a node has. One that is not named any more stays, as missing: it may be claimed,
// and it may come back.
func ApplyInventory(ctx context.Context, tx db.Tx, nodeID string, reported []*protocol.Accelerator, now time.Time) error {
	return ApplyInventories(ctx, tx, map[string][]*protocol.Accelerator{nodeID: reported}, now)
}

// ApplyInventories is ApplyInventory for many nodes; those that name what they named before cost a part of one statement.
func ApplyInventories(ctx context.Context, tx db.Tx, reported map[string][]*protocol.Accelerator, now time.Time) error {
	nodes := slices.Sorted(maps.Keys(reported))
	known, err := selectAccelerators(ctx, tx, nodes)
	if err != nil {
		return err
	}
	for _, id := range nodes {
		if err := applyInventory(ctx, tx, id, known[id], reported[id], now); err != nil {
			return err
		}
	}
	return nil
}

func applyInventory(ctx context.Context, tx db.Tx, nodeID string, known map[string]accelerator, reported []*protocol.Accelerator, now time.Time) error {
	for i, r := range reported {
		if i == MaxAcceleratorsPerNode {
			break
		}
		if r.GetId() == "" {
			continue
		}
		health := r.GetHealth()
		if health == "" {
			health = HealthOK
		}
		now := accelerator{ID: r.GetId(), Vendor: r.GetVendor(), Model: r.GetModel(), MemoryBytes: int64(r.GetMemoryBytes()), Health: health, at: now}
		before, ok := known[now.ID]
		delete(known, now.ID)
		if ok && before.same(now) {
			continue
		}
		if err := upsertAccelerator(ctx, tx, nodeID, now); err != nil {
			return err
		}
	}
	for _, gone := range known {
		if gone.Health == HealthMissing {
			continue
		}
		gone.Health, gone.at = HealthMissing, now
		if err := upsertAccelerator(ctx, tx, nodeID, gone); err != nil {
			return err
		}
	}
	return nil
}

type accelerator struct {
	ID          string
	Vendor      string
	Model       string
	MemoryBytes int64
	Health      string
	at          time.Time
}

func (a accelerator) same(b accelerator) bool {
	b.at = a.at
	return a == b
}

func (a accelerator) free() plan.Accelerator {
	return plan.Accelerator{ID: a.ID, Vendor: a.Vendor, Model: a.Model, Healthy: a.Health == HealthOK}
}

// nodeRooms gives what nodes have left beside the allocations on them.
func nodeRooms(ctx context.Context, tx db.Tx, nodes []Node) ([]plan.Room, error) {
	ids := make([]string, 0, len(nodes))
	for _, n := range nodes {
		ids = append(ids, n.ID)
	}
	held, err := heldByNode(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	unclaimed, err := unclaimedAccelerators(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	rooms := make([]plan.Room, 0, len(nodes))
	for _, n := range nodes {
		h := held[n.ID]
		rooms = append(rooms, plan.Room{
			ID: n.ID, Usable: n.Usable, Empty: h.allocations == 0,
			CPUMillis: n.CPUCores*millisPerCore - h.cpuMillis, MemoryBytes: n.MemoryBytes - h.memoryBytes,
			Accelerators: unclaimed[n.ID],
		})
	}
	return rooms, nil
}
