package capacity

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxKnownAccelerators bounds the stored accelerators of one node, missing ones included; further ones are ignored.
	maxKnownAccelerators = 4 * protocol.MaxAccelerators
	// maxTextBytes bounds each text of an accelerator; a longer one is truncated.
	maxTextBytes = 128
	// maxMemoryBytes bounds the memory that a node may report for an accelerator.
	maxMemoryBytes = 1 << 50
)

// ApplyInventory stores which accelerators a node reports. One that it no longer reports stays, as missing: it may be
// claimed, and it may come back.
func ApplyInventory(ctx context.Context, tx db.Tx, nodeID string, reported []*protocol.Accelerator,
	now time.Time,
) error {
	return ApplyInventories(ctx, tx, map[string][]*protocol.Accelerator{nodeID: reported}, now)
}

// ApplyInventories is ApplyInventory for many nodes; one statement serves those whose report changes nothing.
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

func applyInventory(ctx context.Context, tx db.Tx, nodeID string, known map[string]accelerator,
	reported []*protocol.Accelerator, now time.Time,
) error {
	room := maxKnownAccelerators - len(known)
	named := map[string]bool{}
	for _, r := range reported[:min(len(reported), protocol.MaxAccelerators)] {
		a := reportedAs(r, now)
		before, ok := known[a.ID]
		if a.ID == "" || named[a.ID] || !ok && room == 0 {
			continue
		}
		named[a.ID] = true
		if ok && before.same(a) {
			continue
		}
		if !ok {
			room--
		}
		if err := upsertAccelerator(ctx, tx, nodeID, a); err != nil {
			return err
		}
	}
	for id, gone := range known {
		if named[id] || gone.Health == HealthMissing {
			continue
		}
		gone.Health, gone.at = HealthMissing, now
		if err := upsertAccelerator(ctx, tx, nodeID, gone); err != nil {
			return err
		}
	}
	return nil
}

// reportedAs is an accelerator as its node reports it, truncated to the bounds.
func reportedAs(r *protocol.Accelerator, now time.Time) accelerator {
	a := accelerator{
		ID: cut(r.GetId()), Vendor: cut(r.GetVendor()), Model: cut(r.GetModel()),
		MemoryBytes: int64(min(r.GetMemoryBytes(), maxMemoryBytes)),
		Health:      cut(r.GetHealth()), at: now,
	}
	if a.Health == "" {
		a.Health = HealthOK
	}
	return a
}

// cut truncates a text from a node, and drops what the database cannot store as text.
func cut(s string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s[:min(len(s), maxTextBytes)], "\x00", ""), "")
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

// nodeCandidates returns the capacity of nodes that no allocation holds.
func nodeCandidates(ctx context.Context, tx db.Tx, nodes []Node, orgID string) ([]plan.Candidate, error) {
	ids := make([]string, 0, len(nodes))
	for _, n := range nodes {
		ids = append(ids, n.ID)
	}
	held, err := heldByNode(ctx, tx, ids, orgID)
	if err != nil {
		return nil, err
	}
	unclaimed, err := unclaimedAccelerators(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	candidates := make([]plan.Candidate, 0, len(nodes))
	for _, n := range nodes {
		h := held[n.ID]
		candidates = append(candidates, plan.Candidate{
			ID: n.ID, Usable: n.Usable && (!n.OneOrg || h.foreign == 0), Empty: h.allocations == 0,
			CPUMillis: (n.CPUCores - h.cores) * millisPerCore, MemoryBytes: n.MemoryBytes - h.memoryMiB*mebibyte,
			Accelerators: unclaimed[n.ID],
		})
	}
	return candidates, nil
}
