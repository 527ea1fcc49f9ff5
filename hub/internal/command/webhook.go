package command

import (
	"context"
	"net/netip"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// WebhookWithSecret holds the secret, which is shown this once.
type WebhookWithSecret struct {
	Webhook webhook.Webhook
	Secret  string
}

// CreateWebhook makes a webhook of an org that begins with the next event.
func (s *Service) CreateWebhook(ctx context.Context, m Meta, wanted webhook.Webhook) (WebhookWithSecret, error) {
	wanted.ID, wanted.Owner, wanted.CreatedAt = db.NewID(), m.Principal.Actor(), m.Now
	check := access.Org(m.Principal, iam.WebhookWrite, wanted.OrgID)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, org iam.Org) (out WebhookWithSecret, err error) {
		if err := webhook.CheckURL(wanted.URL, s.mayDial); err != nil {
			return out, err
		}
		if wanted.ProjectID != "" {
			project, err := iam.InProject(ctx, tx, m.Principal, iam.ProjectRead, wanted.ProjectID)
			if err != nil {
				return out, err
			}
			if project.OrgID != org.ID {
				return out, iam.ErrNotFound()
			}
		}
		if _, wanted.Pos, err = event.Kept(ctx, tx); err != nil {
			return out, err
		}
		secret := webhook.NewSecret()
		if wanted.SealedSecret, err = s.Sealer.Seal([]byte(secret), webhook.SecretAAD(wanted.ID)); err != nil {
			return out, err
		}
		made, err := webhook.Create(ctx, tx, wanted)
		if err != nil {
			return out, err
		}
		return WebhookWithSecret{made, secret}, m.recordWebhook(ctx, tx, "iam.webhook.created", made, nil,
			map[string]any{"url": made.URL, "types": made.Types})
	})
}

// EnableWebhook lets a disabled webhook go on where it stopped; the caller owns it from now on.
func (s *Service) EnableWebhook(ctx context.Context, m Meta, orgID, id string) (webhook.Webhook, error) {
	return once(ctx, s, m, webhookToChange(m, orgID, id), func(tx db.Tx, w webhook.Webhook) (webhook.Webhook, error) {
		after, err := webhook.Enable(ctx, tx, w, m.Principal.Actor(), m.Now)
		if err != nil {
			return webhook.Webhook{}, err
		}
		return after, m.recordWebhook(ctx, tx, "iam.webhook.enabled", after,
			map[string]any{"status": w.Status, "reason": w.DisabledReason}, map[string]any{"status": after.Status})
	})
}

// RotateWebhookSecret gives a webhook another secret; those before sign as well for their overlaps.
func (s *Service) RotateWebhookSecret(ctx context.Context, m Meta, orgID, id string,
	overlap time.Duration,
) (WebhookWithSecret, error) {
	check := webhookToChange(m, orgID, id)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, w webhook.Webhook) (out WebhookWithSecret, err error) {
		secret := webhook.NewSecret()
		sealed, err := s.Sealer.Seal([]byte(secret), webhook.SecretAAD(w.ID))
		if err != nil {
			return out, err
		}
		after, err := webhook.Rotate(ctx, tx, w, sealed, overlap, m.Now)
		if err != nil {
			return out, err
		}
		return WebhookWithSecret{after, secret}, m.recordWebhook(ctx, tx, "iam.webhook.secret_rotated", after, nil,
			map[string]any{"overlap_seconds": overlap / time.Second})
	})
}

// ReplayWebhook has the dead letters of a webhook, or the one of an event, sent once more.
func (s *Service) ReplayWebhook(ctx context.Context, m Meta, orgID, id, eventID string) (webhook.Webhook, error) {
	return once(ctx, s, m, webhookToChange(m, orgID, id), func(tx db.Tx, w webhook.Webhook) (webhook.Webhook, error) {
		n, err := webhook.Replay(ctx, tx, w.ID, eventID)
		if err == nil && n == 0 && eventID != "" {
			err = iam.ErrNotFound()
		}
		if err != nil {
			return webhook.Webhook{}, err
		}
		return w, m.recordWebhook(ctx, tx, "iam.webhook.replay_requested", w, nil, map[string]any{"dead_letters": n})
	})
}

// DeleteWebhook removes a webhook.
func (s *Service) DeleteWebhook(ctx context.Context, m Meta, orgID, id string) error {
	return do(ctx, s, webhookToChange(m, orgID, id), func(tx db.Tx, w webhook.Webhook) error {
		if err := webhook.Delete(ctx, tx, w.ID); err != nil {
			return err
		}
		w.ResourceVersion++
		return m.recordWebhook(ctx, tx, "iam.webhook.deleted", w, map[string]any{"url": w.URL, "status": w.Status}, nil)
	})
}

func webhookToChange(m Meta, orgID, id string) access.Check[webhook.Webhook] {
	inOrg := access.Org(m.Principal, iam.WebhookWrite, orgID)
	return func(ctx context.Context, tx db.Tx) (webhook.Webhook, error) {
		org, err := inOrg(ctx, tx)
		if err != nil {
			return webhook.Webhook{}, err
		}
		return webhook.Get(ctx, tx, org.ID, id)
	}
}

func (m Meta) recordWebhook(ctx context.Context, tx db.Tx, eventType string, w webhook.Webhook, before,
	after any,
) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       iam.WebhookWrite,
		ResourceType: change.Webhook,
		ResourceID:   w.ID,
		Version:      w.ResourceVersion,
		OrgID:        w.OrgID,
		ProjectID:    w.ProjectID,
		Before:       before,
		After:        after,
	})
}

// mayDial is MayDial; without one no address is permitted, only names.
func (s *Service) mayDial(ip netip.Addr) bool { return s.MayDial != nil && s.MayDial(ip) }
