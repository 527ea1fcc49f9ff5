package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// CreatePrice adds a row to the price book. Its id and what it buys in base units are made here.
func (s *Service) CreatePrice(ctx context.Context, m Meta, in ledger.Price) (ledger.Price, error) {
	if err := iam.Authorize(m.Principal, iam.PriceWrite, "", ""); err != nil {
		return ledger.Price{}, err
	}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (ledger.Price, error) {
		return Idempotent(ctx, tx, m, func() (ledger.Price, error) {
			p, err := ledger.CreatePrice(ctx, tx, in, m.Now)
			if err != nil {
				return ledger.Price{}, err
			}
			return p, m.recordBilling(ctx, tx, billingChange{
				event: "billing.price.created", action: iam.PriceWrite, resourceType: resourcePrice, resourceID: p.ID,
				data: map[string]any{
					"meter": p.Meter, "app_slug": p.AppSlug, "sku": p.SKU, "currency": p.Currency,
					"price": ledger.FormatNanos(p.Nanos), "per": p.Per,
					"host_basis_points": p.HostBasisPoints, "from": p.From,
				},
			})
		})
	})
}
