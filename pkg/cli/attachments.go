package cli

import (
	"context"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func attachmentColumns() []column[client.Attachment] {
	return []column[client.Attachment]{
		{"NAME", func(a client.Attachment) string { return a.DisplayName }},
		{"APP", func(a client.Attachment) string { return a.AppSlug + " " + a.Version }},
		{"STATUS", func(a client.Attachment) string { return string(a.Status) }},
		{"HEALTH", func(a client.Attachment) string { return string(a.Health) }},
		{"ENDPOINT", func(a client.Attachment) string {
			urls := make([]string, len(a.Endpoints))
			for n, e := range a.Endpoints {
				urls[n] = e.URL
			}
			return strings.Join(urls, " ")
		}},
		{"INSTANCE", func(a client.Attachment) string { return a.AppInstanceID }},
		{"PROJECT", func(a client.Attachment) string { return a.ProjectID }},
		{"ID", func(a client.Attachment) string { return a.ID }},
	}
}

// attachmentsCommand shares app instances among the projects of an org.
func (a *app) attachmentsCommand() *cobra.Command {
	list := projectListing(a, "list [INSTANCE]", "Shared instances that the project uses, or who uses one",
		cobra.MaximumNArgs(1), attachmentColumns(),
		func(ctx context.Context, s *session, project string, args []string, cursor string) (*http.Response, error) {
			if len(args) == 0 {
				return s.hub.ListAttachments(ctx, project,
					&client.ListAttachmentsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
			}
			id, err := s.instanceID(ctx, project, args[0])
			if err != nil {
				return nil, err
			}
			return s.hub.ListAppInstanceAttachments(ctx, project, id,
				&client.ListAppInstanceAttachmentsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
	create := a.instanceAction("create", "Attach the project to an instance of another one, by its id",
		func(ctx context.Context, s *session, project, id string) error {
			return showAnswer(s, attachmentColumns())(s.hub.AttachAppInstance(ctx, project, id, s.editors()...))
		})
	one := func(verb, short string, run func(ctx context.Context, s *session, project, instance, id string) error,
	) *cobra.Command {
		return a.projectAction(verb+" INSTANCE ATTACHMENT", short, cobra.ExactArgs(2), func(ctx context.Context, s *session,
			project string, args []string,
		) error {
			id, err := s.instanceID(ctx, project, args[0])
			if err != nil {
				return err
			}
			return run(ctx, s, project, id, args[1])
		})
	}
	return group("attachments", "App instances that projects of an org share", list, create,
		one("get", "One attachment", func(ctx context.Context, s *session, project, instance, id string) error {
			return showAnswer(s, attachmentColumns())(s.hub.GetAppInstanceAttachment(ctx, project, instance, id, nil,
				s.editors()...))
		}),
		one("delete", "End an attachment, for either project", func(ctx context.Context, s *session, project, instance,
			id string,
		) error {
			return closed(s.hub.DetachAppInstance(ctx, project, instance, id, s.editors()...))
		}))
}
