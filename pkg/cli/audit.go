package cli

import (
	"context"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// auditCommand reads and verifies the audit trail.
func (a *app) auditCommand() *cobra.Command {
	var (
		p       client.ListAuditParams
		outcome string
	)
	columns := []column[client.AuditRow]{
		{"AT", func(r client.AuditRow) string { return stamp(r.At) }},
		{"ACTOR", func(r client.AuditRow) string { return string(r.Actor.Type) + " " + r.Actor.ID }},
		{"ACTION", func(r client.AuditRow) string { return r.Action }},
		{"OUTCOME", func(r client.AuditRow) string { return string(r.Outcome) }},
		{"REASON", func(r client.AuditRow) string { return r.Reason }},
		{"RESOURCE", func(r client.AuditRow) string { return r.ResourceType + " " + r.ResourceID }},
		{"FROM", func(r client.AuditRow) string { return r.SourceAddress }},
		{"CORRELATION", func(r client.AuditRow) string { return r.CorrelationID }},
	}
	list := listing(a, "list", "Who did, or tried to do, what; newest first", cobra.NoArgs, columns,
		func(ctx context.Context, s *session, _ []string, cursor string) (_ *http.Response, err error) {
			p.Cursor, p.Limit, p.Outcome = cursor, client.PageSize, client.AuditOutcome(outcome)
			if p.ProjectID, _, err = s.billed(ctx, ""); err != nil {
				return nil, err
			}
			return s.hub.ListAudit(ctx, &p, s.editors()...)
		})
	f := list.Flags()
	f.StringVar(&p.OrgID, "org", "", "only of this org, by id (platform admin)")
	f.StringVar(&p.ActorID, "actor", "", "only by this user, service account or node, by id")
	f.StringVar(&p.Action, "action", "", "only this action, like apps.instance.create")
	f.StringVar(&p.ResourceType, "resource-type", "", "only on resources of this type, like app_instance")
	f.StringVar(&p.ResourceID, "resource", "", "only on this resource, by id")
	f.StringVar(&p.CorrelationID, "correlation", "", "only what one request led to, by its X-Request-ID")
	f.StringVar(&outcome, "outcome", "", "done, denied or failed")
	f.Var(timeFlag{&p.From}, "from", "only what happened after this time (RFC 3339, or a span back from now)")
	f.Var(timeFlag{&p.To}, "to", "only what happened before this time")
	return group("audit", "The audit trail", list, a.exportAuditCommand(), a.verifyAuditCommand())
}
