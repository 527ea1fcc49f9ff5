package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
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
		owner, err := checkScope(ctx, tx, in)
		if err != nil {
			return ledger.Price{}, err
		}
		p, err := ledger.CreatePrice(ctx, tx, in, m.Now)
		if err != nil {
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
			OrgID:        owner, // the event says the app's name
			Data:         data,
			After:        data,
		})
	})
}

// checkScope refuses an app or a SKU that does not exist: nothing would ever be charged the price. It returns the org
// whose own app it is, if any.
func checkScope(ctx context.Context, tx db.Tx, p ledger.Price) (owner string, err error) {
	if p.SKU != "" {
		if _, err := capacity.GetSKU(ctx, tx, p.SKU); err != nil {
			return "", err
		}
	}
	if p.AppSlug == "" {
		return "", nil
	}
	app, err := catalog.GetApp(ctx, tx, p.AppSlug)
	if fault.Is(err, fault.NotFound) {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "There is no such app; register a version of it first.", nil)
	}
	return app.OrgID, err
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
