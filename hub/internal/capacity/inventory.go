package capacity

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

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
		if named[id] || gone.Health == protocol.HealthMissing {
			continue
		}
		if err := setMissing(ctx, tx, nodeID, id, now); err != nil {
			return err
		}
	}
	return nil
}

// reportedAs is an accelerator as its node reports it, truncated to the bounds.
func reportedAs(r *protocol.Accelerator, now time.Time) accelerator {
	description := bounded(r)
	// An error is one of texts that are not UTF-8, and those are cut.
	raw, _ := proto.MarshalOptions{Deterministic: true}.Marshal(description)
	digest := sha256.Sum256(raw)
	return accelerator{
		ID: description.GetId(), Vendor: description.GetVendor(), Model: description.GetModel(),
		MemoryBytes: int64(description.GetMemoryBytes()), Health: description.GetHealth(),
		digest: string(digest[:]), description: description, at: now,
	}
}

// bounded copies the known fields of an accelerator, each within its bound.
func bounded(r *protocol.Accelerator) *protocol.Accelerator {
	out := &protocol.Accelerator{
		Id: cut(r.GetId()), Vendor: cut(r.GetVendor()), Model: cut(r.GetModel()),
		MemoryBytes: min(r.GetMemoryBytes(), maxMemoryBytes), Health: cmp.Or(cut(r.GetHealth()), protocol.HealthOK),
		PciAddress: cut(r.GetPciAddress()), NumaNode: r.NumaNode, Cores: r.GetCores(),
		DriverVersion: cut(r.GetDriverVersion()), RuntimeVersion: cut(r.GetRuntimeVersion()),
	}
	for _, l := range r.GetLinks()[:min(len(r.GetLinks()), protocol.MaxAcceleratorParts)] {
		out.Links = append(out.Links, &protocol.AcceleratorLink{
			PeerId: cut(l.GetPeerId()), Kind: cut(l.GetKind()), Count: l.GetCount(),
		})
	}
	for _, p := range r.GetPartitions()[:min(len(r.GetPartitions()), protocol.MaxAcceleratorParts)] {
		out.Partitions = append(out.Partitions, &protocol.AcceleratorPartition{
			Id: cut(p.GetId()), Profile: cut(p.GetProfile()), MemoryBytes: min(p.GetMemoryBytes(), maxMemoryBytes),
		})
	}
	return out
}

// Accelerators returns the accelerators of nodes, by node and sorted by their ids, with those that are missing.
func Accelerators(ctx context.Context, tx db.Tx, nodeIDs ...string) (map[string][]*protocol.Accelerator, error) {
	var (
		node, health string
		description  []byte
		invalid      error
	)
	out := map[string][]*protocol.Accelerator{}
	err := db.ForEach(ctx, tx, []any{&node, &description, &health}, func() {
		a := &protocol.Accelerator{}
		// Another release may have written a field that this one does not know.
		err := protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(description, a)
		invalid, a.Health = errors.Join(invalid, err), health
		out[node] = append(out[node], a)
	}, `SELECT node_id, description, health FROM accelerators WHERE node_id = ANY($1::uuid[]) ORDER BY node_id, id`,
		nodeIDs)
	return out, errors.Join(err, invalid)
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
	// digest is the SHA-256 of the description: it detects a change without reading the stored one.
	digest string
	// description and at are set of a reported one only.
	description *protocol.Accelerator
	at          time.Time
}

func (a accelerator) same(b accelerator) bool { return a.digest == b.digest && a.Health == b.Health }

// NodeCandidates returns the capacity of nodes that no allocation holds.
func NodeCandidates(ctx context.Context, tx db.Tx, nodes []Node, orgID string) ([]plan.Candidate, error) {
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
