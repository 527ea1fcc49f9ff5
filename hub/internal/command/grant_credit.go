package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// GrantCreditInput says to whom, how much and why.
type GrantCreditInput struct {
	OrgID       string
	Currency    string
	Nanos       int64
	Description string
}

// GrantCredit puts money into an org's wallet.
func (s *Service) GrantCredit(ctx context.Context, m Meta, in GrantCreditInput) (ledger.Posting, error) {
	if err := iam.Authorize(m.Principal, iam.CreditGrant, "", ""); err != nil {
		return ledger.Posting{}, err
	}
	key := db.NewID()
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (ledger.Posting, error) {
		return Idempotent(ctx, tx, m, func() (ledger.Posting, error) {
			org, err := iam.GetOrg(ctx, tx, in.OrgID)
			if err != nil {
				return ledger.Posting{}, err
			}
			p, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
				OrgID: org.ID, Currency: in.Currency, Nanos: in.Nanos, Description: in.Description, CorrelationID: m.CorrelationID,
				Key: key,
			}, m.Now)
			if err != nil {
				return ledger.Posting{}, err
			}
			return p, m.recordBilling(ctx, tx, billingChange{
				event: "billing.credit.granted", action: iam.CreditGrant, resourceType: resourcePosting, resourceID: p.ID,
				orgID: org.ID,
				data: map[string]any{
					"amount": ledger.FormatNanos(in.Nanos), "currency": in.Currency,
					"description": in.Description,
				},
			})
		})
	})
}
