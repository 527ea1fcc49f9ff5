package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// CreatePrice adds a row to the price book. Its id and what it buys in base units are made here.
func (s *Service) CreatePrice(ctx context.Context, m Meta, in ledger.Price) (ledger.Price, error) {
	check := access.Platform(m.Principal, iam.PriceWrite)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (ledger.Price, error) {
		p, err := ledger.CreatePrice(ctx, tx, in, m.Now)
		if err != nil {
			return ledger.Price{}, err
		}
		// The event says the app's name: where the app is an org's own, it is for that org.
		app, err := catalog.GetApp(ctx, tx, p.AppSlug)
		if err != nil && !fault.Is(err, fault.NotFound) {
			return ledger.Price{}, err
		}
		data := map[string]any{
			"meter":             p.Meter,
			"app_slug":          p.AppSlug,
			"sku":               p.SKU,
			"currency":          p.Currency,
			"price":             ledger.FormatNanos(p.Nanos),
			"per":               p.Per,
			"host_basis_points": p.HostBasisPoints,
			"from":              p.From,
		}
		return p, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "billing.price.created",
			Action:       iam.PriceWrite,
			ResourceType: resourcePrice,
			ResourceID:   p.ID,
			OrgID:        app.OrgID,
			Data:         data,
			After:        data,
		})
	})
}

// GrantCredit puts money into an org's wallet. It sets the grant's key.
func (s *Service) GrantCredit(ctx context.Context, m Meta, in ledger.Grant) (ledger.Posting, error) {
	in.Key, in.CorrelationID = db.NewID(), m.CorrelationID
	check := access.Platform(m.Principal, iam.CreditGrant)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (ledger.Posting, error) {
		if _, err := iam.GetOrg(ctx, tx, in.OrgID); err != nil {
			return ledger.Posting{}, err
		}
		p, err := ledger.GrantCredit(ctx, tx, in, m.Now)
		if err != nil {
			return ledger.Posting{}, err
		}
		data := map[string]any{
			"amount":      ledger.FormatNanos(in.Nanos),
			"currency":    in.Currency,
			"description": in.Description,
		}
		return p, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "billing.credit.granted",
			Action:       iam.CreditGrant,
			ResourceType: resourcePosting,
			ResourceID:   p.ID,
			OrgID:        in.OrgID,
			Data:         data,
			After:        data,
		})
	})
}
