package cli

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func webhookColumns() []column[client.Webhook] {
	return []column[client.Webhook]{
		{"ID", func(w client.Webhook) string { return w.ID }},
		{"URL", func(w client.Webhook) string { return w.URL }},
		{"TYPES", func(w client.Webhook) string { return or(strings.Join(w.Types, ","), "all") }},
		{"STATUS", func(w client.Webhook) string {
			if w.DisabledReason != "" {
				return fmt.Sprintf("%s (%s)", w.Status, w.DisabledReason)
			}
			return string(w.Status)
		}},
		{"DELIVERED", func(w client.Webhook) string { return stamp(w.DeliveredAt) }},
		{"LAST ERROR", func(w client.Webhook) string { return w.LastError }},
	}
}

// secretColumns are those of an answer that shows the secret.
func secretColumns() []column[client.Webhook] {
	return []column[client.Webhook]{
		{"ID", func(w client.Webhook) string { return w.ID }},
		{"URL", func(w client.Webhook) string { return w.URL }},
		{"SECRET", func(w client.Webhook) string { return w.Secret }},
	}
}

func (a *app) webhooksCommand() *cobra.Command {
	var org string
	list := listing(a, "list", "Webhooks of an org", cobra.NoArgs, webhookColumns(),
		func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
			id, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return nil, err
			}
			return s.hub.ListWebhooks(ctx, id, &client.ListWebhooksParams{Cursor: cursor, Limit: client.PageSize},
				s.editors()...)
		})
	one := func(verb, short string, run func(ctx context.Context, s *session, orgID, id string) error) *cobra.Command {
		return a.action(verb+" WEBHOOK", short, cobra.ExactArgs(1), func(ctx context.Context, s *session,
			args []string,
		) error {
			orgID, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return err
			}
			return run(ctx, s, orgID, args[0])
		})
	}
	c := group("webhooks", "Events of an org, sent to a URL", list, a.createWebhookCommand(&org),
		one("get", "One webhook", func(ctx context.Context, s *session, orgID, id string) error {
			return showAnswer(s, webhookColumns())(s.hub.GetWebhook(ctx, orgID, id, s.editors()...))
		}),
		one("enable", "Let a disabled webhook go on where it stopped", func(ctx context.Context, s *session, orgID,
			id string,
		) error {
			return showAnswer(s, webhookColumns())(s.hub.EnableWebhook(ctx, orgID, id, s.editors()...))
		}),
		one("delete", "Remove a webhook with its dead letters", func(ctx context.Context, s *session, orgID,
			id string,
		) error {
			return closed(s.hub.DeleteWebhook(ctx, orgID, id, s.editors()...))
		}),
		rotateWebhookCommand(one), replayWebhookCommand(one), a.deadLettersCommand(&org))
	c.PersistentFlags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	return c
}

func (a *app) createWebhookCommand(org *string) *cobra.Command {
	var (
		body      client.WebhookCreate
		inProject bool
	)
	c := a.action("create URL", "Have events sent to an https URL; the secret that signs them is shown once",
		cobra.ExactArgs(1), func(ctx context.Context, s *session, args []string) error {
			orgID, err := s.orgOrOwn(ctx, *org)
			if err != nil {
				return err
			}
			if inProject {
				if body.ProjectID, err = s.projectID(ctx); err != nil {
					return err
				}
			}
			body.URL = args[0]
			return showAnswer(s, secretColumns())(s.hub.CreateWebhook(ctx, orgID, body, s.editors()...))
		})
	f := c.Flags()
	f.StringSliceVar(&body.Types, "type", nil, "type of events, or what they begin with, like apps.instance (repeatable; "+
		"default: all)")
	f.StringVar(&body.Description, "description", "", "what it is for")
	f.BoolVar(&inProject, "in-project", false, "only events of the project of --project or of the context")
	return c
}

// oneWebhook makes a leaf about one webhook.
type oneWebhook func(verb, short string, run func(ctx context.Context, s *session, orgID, id string) error,
) *cobra.Command

func rotateWebhookCommand(one oneWebhook) *cobra.Command {
	var overlap time.Duration
	c := one("rotate-secret", "Give a webhook a new secret; it is shown once", func(ctx context.Context, s *session, orgID,
		id string,
	) error {
		seconds := int64(overlap.Seconds())
		return showAnswer(s, secretColumns())(s.hub.RotateWebhookSecret(ctx, orgID, id,
			client.WebhookSecretRotate{OverlapSeconds: &seconds}, s.editors()...))
	})
	c.Flags().DurationVar(&overlap, "overlap", 24*time.Hour, "how long the secret before signs as well, at most 168h")
	return c
}

func replayWebhookCommand(one oneWebhook) *cobra.Command {
	var body client.WebhookReplay
	c := one("replay", "Send dead letters once more", func(ctx context.Context, s *session, orgID, id string) error {
		return showAnswer(s, webhookColumns())(s.hub.ReplayWebhook(ctx, orgID, id, body, s.editors()...))
	})
	c.Flags().StringVar(&body.EventID, "event", "", "only the dead letter of this event, by id (default: all)")
	return c
}

func (a *app) deadLettersCommand(org *string) *cobra.Command {
	columns := []column[client.WebhookDeadLetter]{
		{"EVENT", func(d client.WebhookDeadLetter) string { return d.EventID }},
		{"TYPE", func(d client.WebhookDeadLetter) string { return d.Type }},
		{"SUBJECT", func(d client.WebhookDeadLetter) string { return d.Subject }},
		{"TRIES", func(d client.WebhookDeadLetter) string { return strconv.Itoa(int(d.Tries)) }},
		{"LAST ERROR", func(d client.WebhookDeadLetter) string { return d.LastError }},
		{"FAILED", func(d client.WebhookDeadLetter) string { return stamp(d.FailedAt) }},
	}
	return listing(a, "dead-letters WEBHOOK", "Events that a webhook could not deliver", cobra.ExactArgs(1), columns,
		func(ctx context.Context, s *session, args []string, cursor string) (*http.Response, error) {
			orgID, err := s.orgOrOwn(ctx, *org)
			if err != nil {
				return nil, err
			}
			return s.hub.ListWebhookDeadLetters(ctx, orgID, args[0],
				&client.ListWebhookDeadLettersParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
}
