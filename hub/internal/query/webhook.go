package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// Webhooks lists the webhooks of an org.
func (s *Service) Webhooks(ctx context.Context, p iam.Principal, orgID string,
	page db.Page,
) ([]webhook.Webhook, error) {
	return listIn(ctx, s, access.Org(p, iam.WebhookRead, orgID), webhook.List, orgID, page)
}

// Webhook reads one webhook.
func (s *Service) Webhook(ctx context.Context, p iam.Principal, orgID, id string) (webhook.Webhook, error) {
	return read(ctx, s, access.Org(p, iam.WebhookRead, orgID), func(tx db.Tx, org iam.Org) (webhook.Webhook, error) {
		return webhook.Get(ctx, tx, org.ID, id)
	})
}

// DeadLetters lists the dead letters of a webhook.
func (s *Service) DeadLetters(ctx context.Context, p iam.Principal, orgID, id string, page db.Page,
) ([]webhook.DeadLetter, error) {
	check := access.Org(p, iam.WebhookRead, orgID)
	return read(ctx, s, check, func(tx db.Tx, org iam.Org) ([]webhook.DeadLetter, error) {
		w, err := webhook.Get(ctx, tx, org.ID, id)
		if err != nil {
			return nil, err
		}
		return webhook.DeadLetters(ctx, tx, w.ID, page)
	})
}
