package httpapi

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// defaultSecretOverlap is how long a rotated secret still signs where the caller does not say.
const defaultSecretOverlap = 24 * time.Hour

// ListWebhooks lists the webhooks of an org.
func (s *Server) ListWebhooks(ctx context.Context, r ListWebhooksRequestObject) (ListWebhooksResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]webhook.Webhook, error) {
		return s.Queries.Webhooks(ctx, principalOf(ctx), r.OrgID, p)
	}, func(w webhook.Webhook) string { return w.ID })
	return ListWebhooks200JSONResponse{Items: views(items, webhookView), NextCursor: next}, err
}

// CreateWebhook makes a webhook; the answer holds its secret.
func (s *Server) CreateWebhook(ctx context.Context, r CreateWebhookRequestObject) (CreateWebhookResponseObject, error) {
	made, err := s.Commands.CreateWebhook(ctx, metaFrom(ctx), webhook.Webhook{
		OrgID:       r.OrgID,
		ProjectID:   r.Body.ProjectID,
		URL:         r.Body.URL,
		Description: r.Body.Description,
		Types:       r.Body.Types,
	})
	return CreateWebhook201JSONResponse(webhookWithSecret(made)), err
}

// GetWebhook gives one webhook.
func (s *Server) GetWebhook(ctx context.Context, r GetWebhookRequestObject) (GetWebhookResponseObject, error) {
	w, err := s.Queries.Webhook(ctx, principalOf(ctx), r.OrgID, r.WebhookID)
	return GetWebhook200JSONResponse(webhookView(w)), err
}

// DeleteWebhook removes a webhook.
func (s *Server) DeleteWebhook(ctx context.Context, r DeleteWebhookRequestObject) (DeleteWebhookResponseObject, error) {
	return DeleteWebhook204Response{}, s.Commands.DeleteWebhook(ctx, metaFrom(ctx), r.OrgID, r.WebhookID)
}

// EnableWebhook lets a disabled webhook go on.
func (s *Server) EnableWebhook(ctx context.Context, r EnableWebhookRequestObject) (EnableWebhookResponseObject, error) {
	w, err := s.Commands.EnableWebhook(ctx, metaFrom(ctx), r.OrgID, r.WebhookID)
	return EnableWebhook200JSONResponse(webhookView(w)), err
}

// RotateWebhookSecret gives a webhook another secret; the answer holds it.
func (s *Server) RotateWebhookSecret(ctx context.Context,
	r RotateWebhookSecretRequestObject,
) (RotateWebhookSecretResponseObject, error) {
	overlap := defaultSecretOverlap
	if r.Body != nil && r.Body.OverlapSeconds != nil {
		overlap = time.Duration(*r.Body.OverlapSeconds) * time.Second
	}
	rotated, err := s.Commands.RotateWebhookSecret(ctx, metaFrom(ctx), r.OrgID, r.WebhookID, overlap)
	return RotateWebhookSecret200JSONResponse(webhookWithSecret(rotated)), err
}

// ListWebhookDeadLetters lists what a webhook could not deliver.
func (s *Server) ListWebhookDeadLetters(ctx context.Context,
	r ListWebhookDeadLettersRequestObject,
) (ListWebhookDeadLettersResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]webhook.DeadLetter, error) {
		return s.Queries.DeadLetters(ctx, principalOf(ctx), r.OrgID, r.WebhookID, p)
	}, func(d webhook.DeadLetter) string { return d.EventID })
	return ListWebhookDeadLetters200JSONResponse{Items: views(items, deadLetterView), NextCursor: next}, err
}

// ReplayWebhook has dead letters sent once more.
func (s *Server) ReplayWebhook(ctx context.Context, r ReplayWebhookRequestObject) (ReplayWebhookResponseObject, error) {
	eventID := ""
	if r.Body != nil {
		eventID = r.Body.EventID
	}
	w, err := s.Commands.ReplayWebhook(ctx, metaFrom(ctx), r.OrgID, r.WebhookID, eventID)
	return ReplayWebhook202JSONResponse(webhookView(w)), err
}

func webhookWithSecret(w command.WebhookWithSecret) Webhook {
	out := webhookView(w.Webhook)
	out.Secret = w.Secret
	return out
}

func webhookView(w webhook.Webhook) Webhook {
	return Webhook{
		ID:                  w.ID,
		OrgID:               w.OrgID,
		ProjectID:           w.ProjectID,
		URL:                 w.URL,
		Description:         w.Description,
		Types:               w.Types,
		Owner:               RequestedBy{Type: RequestedByType(w.Owner.Type), ID: w.Owner.ID},
		Status:              WebhookStatus(w.Status),
		DisabledReason:      WebhookDisabledReason(w.DisabledReason),
		Position:            w.Pos,
		Tries:               int32(w.Tries),
		NextTryAt:           orZero(w.NextTryAt),
		FailingSince:        orZero(w.FailingSince),
		LastError:           w.LastError,
		DeliveredAt:         orZero(w.DeliveredAt),
		PreviousSecretUntil: w.PreviousUntil(),
		ResourceVersion:     w.ResourceVersion,
		CreatedAt:           w.CreatedAt,
		UpdatedAt:           w.UpdatedAt,
	}
}

func deadLetterView(d webhook.DeadLetter) WebhookDeadLetter {
	return WebhookDeadLetter{
		EventID:   d.EventID,
		Type:      d.Type,
		Subject:   d.Subject,
		Position:  d.Pos,
		Tries:     int32(d.Tries),
		LastError: d.LastError,
		FailedAt:  d.FailedAt,
		Replaying: d.Replaying,
	}
}

// orZero is the time, or the zero time where there is none.
func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}
