package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// authCommand explains decisions.
func (a *app) authCommand() *cobra.Command {
	return group("auth", "What you may do, and why", a.whyCommand())
}

func (a *app) whyCommand() *cobra.Command {
	var (
		org, user, account, instance string
		platform                     bool
	)
	c := a.action("why PERMISSION", "Why a permission is held, or why not", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) (err error) {
			if user != "" && account != "" || platform && org != "" || instance != "" && (platform || org != "") {
				return usage(errors.New("--user and --service-account exclude each other, and so do --platform, --org and " +
					"--instance"))
			}
			q := client.AccessQuestion{Permission: args[0]}
			switch {
			case platform:
			case org != "":
				q.OrgID, err = s.orgID(ctx, org)
			default:
				q.ProjectID, err = s.projectID(ctx)
			}
			if err != nil {
				return err
			}
			if instance != "" {
				if q.AppInstanceID, err = s.instanceID(ctx, q.ProjectID, instance); err != nil {
					return err
				}
			}
			switch {
			case user != "":
				q.Principal.Type = client.AccessPrincipalTypeUser
				q.Principal.ID, err = s.userID(ctx, user)
			case account != "":
				q.Principal.Type = client.AccessPrincipalTypeServiceAccount
				q.Principal.ID, err = s.serviceAccountID(ctx, q.ProjectID, account)
			}
			if err != nil {
				return err
			}
			return showAnswer(s, whyColumns())(s.hub.ExplainAccess(ctx, q, s.editors()...))
		})
	c.Long = `Say whether you, or another user or a service account, have a permission on what belongs to the project,
with --instance on one app instance, with --org on the org as a whole, or with --platform on the platform, and which
rule decided.`
	c.Example = `  gpuaas auth why apps.instance.create
  gpuaas auth why iam.user.read --org acme --user ada@acme.example`
	f := c.Flags()
	f.StringVar(&org, "org", "", "about the org as a whole, by id or slug")
	f.BoolVar(&platform, "platform", false, "about what belongs to the platform, like nodes and prices")
	f.StringVar(&instance, "instance", "", "about doing it to this app instance, by id or display name")
	f.StringVar(&user, "user", "", "about this user, by id or e-mail address (default: yourself)")
	f.StringVar(&account, "service-account", "", "about this service account, by id, or by slug in the project")
	return c
}

func whyColumns() []column[client.AccessExplanation] {
	return []column[client.AccessExplanation]{
		{"ALLOWED", func(e client.AccessExplanation) string { return fmt.Sprint(e.Allowed) }},
		{"REASON", func(e client.AccessExplanation) string { return string(e.Reason) }},
		{"RULE", func(e client.AccessExplanation) string {
			var rules []string
			for _, r := range e.Rules {
				rules = append(rules, r.ID+": "+r.Description)
			}
			return strings.Join(rules, " ")
		}},
		{"ROLES WITH IT", func(e client.AccessExplanation) string {
			return or(joined(e.RolesWithPermission), "none: platform admins only")
		}},
	}
}

// serviceAccountID finds an account of the project by id or slug.
func (s *session) serviceAccountID(ctx context.Context, project, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	return only(want, "service account", func(cursor string) (*http.Response, error) {
		return s.hub.ListServiceAccounts(ctx, project,
			&client.ListServiceAccountsParams{Cursor: cursor, Limit: client.PageSize})
	}, func(sa client.ServiceAccount) (string, bool) { return sa.ID, sa.Slug == want })
}
