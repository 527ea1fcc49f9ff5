package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// ListSKUs lists the named sizes of allocations.
func (s *Server) ListSKUs(ctx context.Context, r ListSKUsRequestObject) (ListSKUsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]capacity.SKU, error) {
		return s.Queries.SKUs(ctx, principalOf(ctx), p)
	}, func(k capacity.SKU) string { return k.Slug })
	return ListSKUs200JSONResponse{Items: views(items, skuView), NextCursor: next}, err
}

// GetSKU reads one of them.
func (s *Server) GetSKU(ctx context.Context, r GetSKURequestObject) (GetSKUResponseObject, error) {
	sku, err := s.Queries.SKU(ctx, principalOf(ctx), r.Sku)
	return GetSKU200JSONResponse(skuView(sku)), err
}

// CreateSKU adds one.
func (s *Server) CreateSKU(ctx context.Context, r CreateSKURequestObject) (CreateSKUResponseObject, error) {
	sku, err := s.Commands.CreateSKU(ctx, metaFrom(ctx), capacity.SKU{
		Slug: r.Body.Slug, Shape: capacity.Shape(r.Body.CapacityShape), AcceleratorCount: int(r.Body.AcceleratorCount),
		AcceleratorModel: r.Body.AcceleratorModel, CPUCores: int64(r.Body.CPUCores), MemoryMiB: r.Body.MemoryMib,
	})
	return CreateSKU201JSONResponse(skuView(sku)), err
}

// RetireSKU ends its sale.
func (s *Server) RetireSKU(ctx context.Context, r RetireSKURequestObject) (RetireSKUResponseObject, error) {
	sku, err := s.Commands.RetireSKU(ctx, metaFrom(ctx), r.Sku)
	return RetireSKU200JSONResponse(skuView(sku)), err
}

// SuggestSKUs derives SKUs from what nodes report.
func (s *Server) SuggestSKUs(ctx context.Context, _ SuggestSKUsRequestObject) (SuggestSKUsResponseObject, error) {
	items, err := s.Queries.SuggestSKUs(ctx, principalOf(ctx), metaFrom(ctx).Now)
	return SuggestSKUs200JSONResponse{Items: views(items, func(k capacity.SKU) SKUCreate {
		return SKUCreate{
			Slug: k.Slug, CapacityShape: CapacityShape(k.Shape), AcceleratorCount: int32(k.AcceleratorCount),
			AcceleratorModel: k.AcceleratorModel, CPUCores: int32(k.CPUCores), MemoryMib: k.MemoryMiB,
		}
	})}, err
}

func skuView(k capacity.SKU) SKU {
	return SKU{
		Slug: k.Slug, CapacityShape: CapacityShape(k.Shape), AcceleratorCount: int32(k.AcceleratorCount),
		AcceleratorModel: k.AcceleratorModel, CPUCores: int32(k.CPUCores), MemoryMib: k.MemoryMiB,
		CreatedAt: k.CreatedAt, RetiredAt: k.RetiredAt,
	}
}
