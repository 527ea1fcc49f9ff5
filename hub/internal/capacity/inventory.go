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
	// maxKnownAccelerators bounds the stored accelerators of one node, missing ones included, and as many partitions;
	// further ones are ignored.
	maxKnownAccelerators = 4 * protocol.MaxAccelerators
	// maxTextBytes bounds each text of an accelerator; a longer one is truncated.
	maxTextBytes = 128
	// maxMemoryBytes bounds the memory that a node may report for an accelerator.
	maxMemoryBytes = 1 << 50
)

// HealthChange is a change of what a node says about the health of an accelerator.
type HealthChange struct {
	NodeID, AcceleratorID string
	// IsPart: it is a partition, whose health is that of the whole.
	IsPart bool
	// Health is the new one, Cause the node's explanation.
	Health, Cause string
}

// ApplyInventory stores which accelerators a node reports. One that it no longer reports stays, as missing: it may be
// claimed, and it may come back.
func ApplyInventory(ctx context.Context, tx db.Tx, nodeID string, reported []*protocol.Accelerator,
	now time.Time,
) ([]HealthChange, error) {
	return ApplyInventories(ctx, tx, map[string][]*protocol.Accelerator{nodeID: reported}, now)
}

// ApplyInventories is ApplyInventory for many nodes; one statement serves those whose report changes nothing.
func ApplyInventories(ctx context.Context, tx db.Tx, reported map[string][]*protocol.Accelerator,
	now time.Time,
) (changes []HealthChange, err error) {
	nodes := slices.Sorted(maps.Keys(reported))
	known, err := selectAccelerators(ctx, tx, nodes)
	if err != nil {
		return nil, err
	}
	for _, id := range nodes {
		changed, err := applyInventory(ctx, tx, id, known[id], reported[id], now)
		if err != nil {
			return nil, err
		}
		changes = append(changes, changed...)
	}
	return changes, nil
}

func applyInventory(ctx context.Context, tx db.Tx, nodeID string, known map[string]accelerator,
	reported []*protocol.Accelerator, now time.Time,
) (changes []HealthChange, err error) {
	room := map[bool]int{false: maxKnownAccelerators, true: maxKnownAccelerators}
	for _, k := range known {
		room[k.PartOf != ""]--
	}
	named := map[string]bool{}
	for _, a := range reportedAs(reported, now) {
		before, ok := known[a.ID]
		isPart := a.PartOf != ""
		if a.ID == "" || named[a.ID] || !ok && room[isPart] <= 0 {
			continue
		}
		named[a.ID] = true
		if ok && before.same(a) {
			continue
		}
		if !ok {
			room[isPart]--
		}
		if err := upsertAccelerator(ctx, tx, nodeID, a); err != nil {
			return nil, err
		}
		cause := a.description.GetHealthReason()
		if ok && (before.Health != a.Health || before.cause != cause) || !ok && a.Health != protocol.HealthOK {
			changes = append(changes, HealthChange{nodeID, a.ID, isPart, a.Health, cause})
		}
	}
	for id, gone := range known {
		if named[id] || gone.Health == protocol.HealthMissing {
			continue
		}
		if err := setMissing(ctx, tx, nodeID, id, now); err != nil {
			return nil, err
		}
		changes = append(changes, HealthChange{nodeID, id, gone.PartOf != "", protocol.HealthMissing, ""})
	}
	slices.SortFunc(changes, func(a, b HealthChange) int { return cmp.Compare(a.AcceleratorID, b.AcceleratorID) })
	return changes, nil
}

// reportedAs lists accelerators as their node reports them, truncated to the bounds, each with its partitions after it.
func reportedAs(reported []*protocol.Accelerator, now time.Time) (list []accelerator) {
	for _, r := range reported[:min(len(reported), protocol.MaxAccelerators)] {
		whole := bounded(r)
		list = append(list, described(whole, "", "", now))
		for _, p := range whole.GetPartitions() {
			list = append(list, described(partition(whole, p), whole.GetId(), p.GetSharing(), now))
		}
	}
	return list
}

// partition describes a partition as an accelerator of its own. A MIG instance has the name that NVIDIA's driver gives
// it. Partitions have no links: MIG instances do not reach each other, and those of an AMD GPU share its memory.
func partition(whole *protocol.Accelerator, p *protocol.AcceleratorPartition) *protocol.Accelerator {
	kind := ""
	if whole.GetVendor() == protocol.VendorNVIDIA && p.GetSharing() == "" {
		kind = "MIG "
	}
	return &protocol.Accelerator{
		Id: p.GetId(), Vendor: whole.GetVendor(), Model: cut(whole.GetModel() + " " + kind + p.GetProfile()),
		MemoryBytes: p.GetMemoryBytes(), Health: whole.GetHealth(), NumaNode: whole.NumaNode,
		DriverVersion: whole.GetDriverVersion(), RuntimeVersion: whole.GetRuntimeVersion(),
		HealthReason: whole.GetHealthReason(),
	}
}

func described(d *protocol.Accelerator, partOf, sharing string, now time.Time) accelerator {
	// An error is one of texts that are not UTF-8, and those are cut.
	raw, _ := proto.MarshalOptions{Deterministic: true}.Marshal(d)
	digest := sha256.Sum256(slices.Concat(raw, []byte(partOf), []byte(sharing)))
	return accelerator{
		ID: d.GetId(), Vendor: d.GetVendor(), Model: d.GetModel(), MemoryBytes: int64(d.GetMemoryBytes()),
		Health: d.GetHealth(), PartOf: partOf, Sharing: sharing, digest: string(digest[:]), description: d, at: now,
	}
}

// bounded copies the known fields of an accelerator, each within its bound.
func bounded(r *protocol.Accelerator) *protocol.Accelerator {
	out := &protocol.Accelerator{
		Id: cut(r.GetId()), Vendor: cut(r.GetVendor()), Model: cut(r.GetModel()),
		MemoryBytes: min(r.GetMemoryBytes(), maxMemoryBytes), Health: cmp.Or(cut(r.GetHealth()), protocol.HealthOK),
		PciAddress: cut(r.GetPciAddress()), NumaNode: r.NumaNode, Cores: r.GetCores(),
		DriverVersion: cut(r.GetDriverVersion()), RuntimeVersion: cut(r.GetRuntimeVersion()),
		HealthReason: cut(r.GetHealthReason()),
	}
	for _, l := range r.GetLinks()[:min(len(r.GetLinks()), protocol.MaxAcceleratorParts)] {
		out.Links = append(out.Links, &protocol.AcceleratorLink{
			PeerId: cut(l.GetPeerId()), Kind: cut(l.GetKind()), Count: l.GetCount(),
		})
	}
	for _, p := range r.GetPartitions()[:min(len(r.GetPartitions()), protocol.MaxAcceleratorParts)] {
		out.Partitions = append(out.Partitions, &protocol.AcceleratorPartition{
			Id: cut(p.GetId()), Profile: cut(p.GetProfile()), MemoryBytes: min(p.GetMemoryBytes(), maxMemoryBytes),
			Sharing: cut(p.GetSharing()),
		})
	}
	return out
}

// Accelerators returns the accelerators of nodes, by node and sorted by their ids, with those that are missing. Each
// holds its partitions.
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
	}, `SELECT node_id, description, health FROM accelerators WHERE node_id = ANY($1::uuid[]) AND part_of = ''
		ORDER BY node_id, id`, nodeIDs)
	return out, errors.Join(err, invalid)
}

// cut truncates a text from a node, and drops what the database cannot store as text.
func cut(s string) string { return cutTo(s, maxTextBytes) }

func cutTo(s string, limit int) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s[:min(len(s), limit)], "\x00", ""), "")
}

type accelerator struct {
	ID          string
	Vendor      string
	Model       string
	MemoryBytes int64
	Health      string
	// PartOf is the id of the accelerator that this is a partition of; empty for a whole one.
	PartOf string
	// Sharing is how this slice of a GPU is shared; empty where hardware keeps it apart.
	Sharing string
	// digest is the SHA-256 of the description: it detects a change without reading the stored one.
	digest string
	// cause is the node's explanation of the health; set of a stored one only.
	cause string
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
	unclaimed, err := unclaimedAccelerators(ctx, tx, ids, orgID)
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
