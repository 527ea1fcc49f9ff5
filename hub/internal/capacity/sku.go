package capacity

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// MaxSKUPage is how many SKUs one page holds at most.
const MaxSKUPage = 200

// SKU is a named size of an allocation. Prices may be for one SKU. It never changes: another size is another SKU.
type SKU struct {
	Slug             string
	Shape            Shape
	AcceleratorModel string
	AcceleratorCount int
	CPUCores         int64
	MemoryMiB        int64
	CreatedAt        time.Time
	// RetiredAt is zero while new allocations may name it.
	RetiredAt time.Time
}

// sameSize reports whether two SKUs sell the same.
func (s SKU) sameSize(o SKU) bool {
	return s.Shape == o.Shape && s.AcceleratorModel == o.AcceleratorModel && s.AcceleratorCount == o.AcceleratorCount &&
		s.CPUCores == o.CPUCores && s.MemoryMiB == o.MemoryMiB
}

// CreateSKU adds a SKU. One of the same slug and size is the same SKU; of another size it is a conflict.
func CreateSKU(ctx context.Context, tx db.Tx, s SKU, now time.Time) (SKU, error) {
	if (s.AcceleratorCount > 0) != (s.AcceleratorModel != "") {
		return SKU{}, fault.New(fault.Unprocessable, codeSKUInvalid, "The size of the SKU contradicts itself.", nil).
			WithField("/accelerator_model", "belongs to a SKU with accelerators, which needs it").Permanent()
	}
	known, err := skuBySlug(ctx, tx, s.Slug)
	switch {
	case fault.Is(err, fault.Unprocessable):
		s.CreatedAt = now
		return s, tx.Queue(ctx,
			`INSERT INTO skus (slug, capacity_shape, accelerator_model, accelerator_count, cpu_cores, memory_mib, created_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7)`,
			s.Slug, string(s.Shape), s.AcceleratorModel, s.AcceleratorCount, s.CPUCores, s.MemoryMiB, s.CreatedAt)
	case err != nil:
		return SKU{}, err
	case !known.sameSize(s) || !known.RetiredAt.IsZero():
		return SKU{}, fault.New(fault.Conflict, codeSKUExists, "There is a SKU of this name already, of another size or "+
			"retired; choose another name.", nil).WithField("/slug", "is taken").Permanent()
	}
	return known, nil
}

// RetireSKU ends the sale of a SKU; allocations that name it stay. Retiring twice changes nothing.
func RetireSKU(ctx context.Context, tx db.Tx, slug string, now time.Time) (before, after SKU, err error) {
	before, err = GetSKU(ctx, tx, slug)
	if err != nil || !before.RetiredAt.IsZero() {
		return before, before, err
	}
	after = before
	after.RetiredAt = now
	return before, after, tx.Queue(ctx, `UPDATE skus SET retired_at = $2 WHERE slug = $1`, slug, now)
}

// GetSKU returns one SKU.
func GetSKU(ctx context.Context, tx db.Tx, slug string) (SKU, error) {
	s, err := skuBySlug(ctx, tx, slug)
	if fault.Is(err, fault.Unprocessable) {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "There is no such SKU.", nil)
	}
	return s, err
}

const skuColumns = `slug, capacity_shape, accelerator_model, accelerator_count, cpu_cores, memory_mib, created_at,
	retired_at`

func scanSKU(row pgx.CollectableRow) (s SKU, err error) {
	err = row.Scan(&s.Slug, &s.Shape, &s.AcceleratorModel, &s.AcceleratorCount, &s.CPUCores, &s.MemoryMiB, &s.CreatedAt,
		(*zeronull.Timestamptz)(&s.RetiredAt))
	return s, err
}

// ListSKUs lists all SKUs in the order of their slugs, retired ones too: bills name them.
func ListSKUs(ctx context.Context, tx db.Tx, p db.Page) ([]SKU, error) {
	limit := MaxSKUPage
	if p.Limit > 0 {
		limit = min(p.Limit, MaxSKUPage+1)
	}
	return db.Select(ctx, tx, scanSKU, `SELECT `+skuColumns+` FROM skus WHERE slug > $1 ORDER BY slug LIMIT $2`, p.After,
		limit)
}

func skuBySlug(ctx context.Context, tx db.Tx, slug string) (SKU, error) {
	s, err := db.SelectOne(ctx, tx, scanSKU, `SELECT `+skuColumns+` FROM skus WHERE slug = $1`, slug)
	if db.IsNoRows(err) {
		return SKU{}, fault.New(fault.Unprocessable, codeSKUUnknown, "There is no such SKU; leave it out to ask for a shape.",
			nil).WithField("/sku", "names no SKU").Permanent()
	}
	return s, err
}

// readSKU checks n against its SKU, where it names one, and copies the SKU's accelerator model.
func (n *NewAllocation) readSKU(ctx context.Context, tx db.Tx) error {
	if n.SKU == "" {
		return nil
	}
	sku, err := skuBySlug(ctx, tx, n.SKU)
	if err != nil {
		return err
	}
	if !sku.RetiredAt.IsZero() {
		return fault.New(fault.Unprocessable, codeSKURetired, "The SKU is not sold any more.", nil).
			WithField("/sku", "is retired").Permanent()
	}
	if err := n.asSKU(sku); err != nil {
		return err
	}
	n.AcceleratorModel = sku.AcceleratorModel
	return nil
}

// asSKU checks that the requested sizes are those of the SKU, for which the price is.
func (n NewAllocation) asSKU(s SKU) error {
	f := fault.New(fault.Unprocessable, codeSKUMismatch, "The shape asked for is not the one of the SKU; leave the SKU "+
		"out or ask for its shape.", nil).Permanent()
	for _, field := range []struct {
		pointer string
		same    bool
		want    any
	}{
		{"/capacity_shape", n.Shape == s.Shape, s.Shape},
		{"/accelerator_count", n.AcceleratorCount == s.AcceleratorCount, s.AcceleratorCount},
		{"/accelerator_model", n.AcceleratorModel == "" || n.AcceleratorModel == s.AcceleratorModel, s.AcceleratorModel},
		{"/cpu_cores", n.CPUCores == s.CPUCores, s.CPUCores},
		{"/memory_mib", n.MemoryMiB == s.MemoryMiB, s.MemoryMiB},
	} {
		if !field.same {
			f = f.WithHint(field.pointer, "differs from the SKU", fmt.Sprintf("the SKU has %v", field.want))
		}
	}
	if len(f.Fields) > 0 {
		return f
	}
	return nil
}

// SuggestSKUs derives SKUs for the accelerators of nodes, without those that are sold already, in the order of their
// slugs. For each model it offers slices of 1, 2, 4 … accelerators, each with the share of cores and memory that every
// node of the model can give, and each whole node; of partitions it offers one at a time. A node with several models is
// left out: what of its cores belongs to which is for the admin to say.
func SuggestSKUs(ctx context.Context, tx db.Tx, nodes []Node) ([]SKU, error) {
	byID := map[string]Node{}
	for _, n := range nodes {
		byID[n.ID] = n
	}
	sold, err := db.Select(ctx, tx, scanSKU, `SELECT `+skuColumns+` FROM skus WHERE retired_at IS NULL`)
	if err != nil {
		return nil, err
	}
	hosts, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (h host, err error) {
		var id string
		err = row.Scan(&id, &h.model, &h.count, &h.partitions)
		h.cpuCores, h.memoryMiB = byID[id].CPUCores, byID[id].MemoryBytes/mebibyte
		return h, err
	}, `SELECT node_id, min(model), count(*), bool_or(part_of <> '') FROM accelerators
		WHERE node_id = ANY($1::uuid[]) AND health <> $2 AND NOT partitioned GROUP BY node_id HAVING min(model) = max(model)
		AND min(model) <> ''`,
		slices.Collect(maps.Keys(byID)), protocol.HealthMissing)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(suggest(hosts), func(s SKU) bool { return slices.ContainsFunc(sold, s.sameSize) }), nil
}

// host is a node whose accelerators are all of one model.
type host struct {
	model               string
	count               int
	cpuCores, memoryMiB int64
	// partitions says that its accelerators are partitions.
	partitions bool
}

func suggest(hosts []host) []SKU {
	byModel := map[string][]host{}
	for _, h := range hosts {
		if h.cpuCores < int64(h.count) {
			continue // no slice of it would have a core
		}
		byModel[h.model] = append(byModel[h.model], h)
	}
	var out []SKU
	for model, of := range byModel {
		name, largest := slugOf(model), 0
		cores, memory := int64(1)<<62, int64(1)<<62
		for _, h := range of {
			cores, memory = min(cores, h.cpuCores/int64(h.count)), min(memory, h.memoryMiB/int64(h.count))
			if h.partitions {
				largest = max(largest, 1)
				continue
			}
			largest = max(largest, h.count)
			out = append(out, SKU{
				Slug: fmt.Sprintf("%s-node-x%d-%dc-%dg", name, h.count, h.cpuCores, h.memoryMiB>>10), Shape: Baremetal,
				AcceleratorModel: model, AcceleratorCount: h.count, CPUCores: h.cpuCores, MemoryMiB: h.memoryMiB,
			})
		}
		for n := 1; n <= largest; n *= 2 {
			out = append(out, SKU{
				Slug: fmt.Sprintf("%s-x%d", name, n), Shape: GPUSlice, AcceleratorModel: model, AcceleratorCount: n,
				CPUCores: cores * int64(n), MemoryMiB: memory * int64(n),
			})
		}
	}
	// Nodes that differ by less than a GiB are one size: the smallest, which each of them has.
	slices.SortFunc(out, func(a, b SKU) int {
		return cmp.Or(cmp.Compare(a.Slug, b.Slug), cmp.Compare(a.AcceleratorModel, b.AcceleratorModel),
			cmp.Compare(a.MemoryMiB, b.MemoryMiB))
	})
	return slices.CompactFunc(out, func(a, b SKU) bool {
		return a.Slug == b.Slug && a.AcceleratorModel == b.AcceleratorModel
	})
}

// maxSlugOfModel leaves room for what makes a slug of at most 63 characters of it.
const maxSlugOfModel = 36

// slugOf makes the beginning of a slug of a model's name.
func slugOf(model string) string {
	words := strings.FieldsFunc(strings.ToLower(model), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	name := strings.Join(words, "-")
	return cmp.Or(strings.Trim(name[:min(len(name), maxSlugOfModel)], "-"), "accelerator")
}
