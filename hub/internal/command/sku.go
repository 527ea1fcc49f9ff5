package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateSKU adds a named size of allocations.
func (s *Service) CreateSKU(ctx context.Context, m Meta, in capacity.SKU) (capacity.SKU, error) {
	check := access.Platform(m.Principal, iam.SKUWrite)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (capacity.SKU, error) {
		sku, err := capacity.CreateSKU(ctx, tx, in, m.Now)
		if err != nil {
			return capacity.SKU{}, err
		}
		return sku, m.recordSKU(ctx, tx, "capacity.sku.created", sku)
	})
}

// RetireSKU ends the sale of a size; allocations of it stay.
func (s *Service) RetireSKU(ctx context.Context, m Meta, slug string) (capacity.SKU, error) {
	check := access.Platform(m.Principal, iam.SKUWrite)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (capacity.SKU, error) {
		before, after, err := capacity.RetireSKU(ctx, tx, slug, m.Now)
		if err != nil || before == after {
			return after, err
		}
		return after, m.recordSKU(ctx, tx, "capacity.sku.retired", after)
	})
}

func (m Meta) recordSKU(ctx context.Context, tx db.Tx, eventType string, s capacity.SKU) error {
	data := map[string]any{
		"capacity_shape":    string(s.Shape),
		"accelerator_model": s.AcceleratorModel,
		"accelerator_count": s.AcceleratorCount,
		"cpu_cores":         s.CPUCores,
		"memory_mib":        s.MemoryMiB,
	}
	version := int64(1)
	if !s.RetiredAt.IsZero() {
		version = 2
	}
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       iam.SKUWrite,
		ResourceType: resourceSKU,
		ResourceID:   s.Slug,
		Version:      version,
		Data:         data,
		After:        data,
	})
}
