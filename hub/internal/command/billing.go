package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// CreatePrice adds a row to the price book. Its id and what it buys in base units are made here.
func (s *Service) CreatePrice(ctx context.Context, m Meta, in ledger.Price) (ledger.Price, error) {
	check := access.Platform(m.Principal, iam.PriceWrite)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (ledger.Price, error) {
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
			Data:         data,
			After:        data,
		})
	})
}

// GrantCreditInput says to whom, how much and why.
type GrantCreditInput struct {
	OrgID       string
	Currency    string
	Nanos       int64
	Description string
}

// GrantCredit puts money into an org's wallet.
func (s *Service) GrantCredit(ctx context.Context, m Meta, in GrantCreditInput) (ledger.Posting, error) {
	key := db.NewID()
	check := access.Platform(m.Principal, iam.CreditGrant)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (ledger.Posting, error) {
		org, err := iam.GetOrg(ctx, tx, in.OrgID)
		if err != nil {
			return ledger.Posting{}, err
		}
		p, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID:         org.ID,
			Currency:      in.Currency,
			Nanos:         in.Nanos,
			Description:   in.Description,
			CorrelationID: m.CorrelationID,
			Key:           key,
		}, m.Now)
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
			OrgID:        org.ID,
			Data:         data,
			After:        data,
		})
	})
}
