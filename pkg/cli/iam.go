package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func (a *app) orgsCommand() *cobra.Command {
	columns := []column[client.Org]{
		{"SLUG", func(o client.Org) string { return o.Slug }},
		{"NAME", func(o client.Org) string { return o.DisplayName }},
		{"ID", func(o client.Org) string { return o.ID }},
		{"CREATED", func(o client.Org) string { return stamp(o.CreatedAt) }},
	}
	var name string
	create := a.action("create SLUG", "Make an org", cobra.ExactArgs(1), func(ctx context.Context, s *session,
		args []string,
	) error {
		return showAnswer(s, columns)(s.hub.CreateOrg(ctx, client.OrgCreate{
			Slug:        args[0],
			DisplayName: or(name, args[0]),
		}, s.editors()...))
	})
	create.Flags().StringVar(&name, "name", "", "display name (default: the slug)")
	return group("orgs", "Orgs (platform admin)", create, a.quotaCommand(), a.setQuotaCommand(),
		listing(a, "list", "Orgs you may see", cobra.NoArgs, columns, func(ctx context.Context, s *session, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListOrgs(ctx, &client.ListOrgsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}))
}

func (a *app) projectsCommand() *cobra.Command {
	columns := []column[client.Project]{
		{"SLUG", func(p client.Project) string { return p.Slug }},
		{"NAME", func(p client.Project) string { return p.DisplayName }},
		{"ID", func(p client.Project) string { return p.ID }},
		{"ORG", func(p client.Project) string { return p.OrgID }},
		{"CREATED", func(p client.Project) string { return stamp(p.CreatedAt) }},
	}
	var name, org string
	var platform bool
	create := a.action("create SLUG", "Make a project", cobra.ExactArgs(1), func(ctx context.Context, s *session,
		args []string,
	) error {
		orgID, err := s.orgID(ctx, org)
		if err != nil {
			return err
		}
		return showAnswer(s, columns)(s.hub.CreateProject(ctx, client.ProjectCreate{
			OrgID: orgID, Slug: args[0],
			DisplayName: or(name, args[0]), Platform: platform,
		}, s.editors()...))
	})
	create.Flags().StringVar(&name, "name", "", "display name (default: the slug)")
	create.Flags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	create.Flags().BoolVar(&platform, "platform", false, "what the platform manages runs in its allocations")
	return group("projects", "Projects", create,
		listing(a, "list", "Projects you may see", cobra.NoArgs, columns, func(ctx context.Context, s *session, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.projects(ctx)(cursor)
		}),
		a.projectAction("get", "The project of --project", cobra.NoArgs, func(ctx context.Context, s *session, id string,
			_ []string,
		) error {
			return showAnswer(s, columns)(s.hub.GetProject(ctx, id, s.editors()...))
		}))
}

func (a *app) serviceAccountsCommand() *cobra.Command {
	columns := []column[client.ServiceAccount]{
		{"SLUG", func(sa client.ServiceAccount) string { return sa.Slug }},
		{"NAME", func(sa client.ServiceAccount) string { return sa.Name }},
		{"ROLE", func(sa client.ServiceAccount) string { return or(string(sa.Role), sa.CustomRole) }},
		{"STATUS", func(sa client.ServiceAccount) string { return string(sa.Status) }},
		{"ID", func(sa client.ServiceAccount) string { return sa.ID }},
		{"KEYS", keysOf},
		{"CREATED", func(sa client.ServiceAccount) string { return stamp(sa.CreatedAt) }},
	}
	return group("sa", "Service accounts: identities for programs", a.createServiceAccountCommand(columns),
		a.rotateKeyCommand(columns),
		a.oneServiceAccount("disable", "Refuse a service account from now on", func(ctx context.Context, s *session, project,
			id string,
		) error {
			return showAnswer(s, columns)(s.hub.DisableServiceAccount(ctx, project, id, s.editors()...))
		}),
		a.oneServiceAccount("delete", "Remove a service account for good", func(ctx context.Context, s *session, project,
			id string,
		) error {
			return closed(s.hub.DeleteServiceAccount(ctx, project, id, s.editors()...))
		}),
		projectListing(a, "list", "Service accounts of the project", cobra.NoArgs, columns, func(ctx context.Context,
			s *session, project string, _ []string, cursor string,
		) (*http.Response, error) {
			return s.hub.ListServiceAccounts(ctx, project,
				&client.ListServiceAccountsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}),
		a.action("token FILE", "Mint a short-lived token with the file of sa create --save", cobra.ExactArgs(1),
			func(ctx context.Context, s *session, args []string) error {
				account, err := readServiceAccount(args[0])
				if err != nil {
					return err
				}
				credential, err := client.NewServiceAccountCredential(s.conf, account.ID, account.KeyID,
					[]byte(account.PrivateKeyPEM))
				if err != nil {
					return usage(err)
				}
				token, err := credential.Bearer(ctx)
				if err != nil {
					return err
				}
				s.progress.stop()
				_, err = fmt.Fprintln(s.env.Stdout, token)
				return err
			}))
}

func (a *app) createServiceAccountCommand(columns []column[client.ServiceAccount]) *cobra.Command {
	var name, description, role, custom, save string
	c := a.projectAction("create SLUG", "Make a service account; its key is shown once", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			body := client.ServiceAccountCreate{
				Name: or(name, args[0]), Slug: args[0], Description: description, Role: client.ServiceAccountRole(role),
			}
			if custom != "" {
				p, err := client.Read[client.Project](s.hub.GetProject(ctx, project))
				if err != nil {
					return err
				}
				if body.CustomRole, err = s.customRoleID(ctx, p.OrgID, custom); err != nil {
					return err
				}
			}
			sa, err := client.Read[client.ServiceAccount](s.hub.CreateServiceAccount(ctx, project, body, s.editors()...))
			if err != nil {
				return err
			}
			return s.showKeyOnce(sa, save, columns)
		})
	f := c.Flags()
	f.StringVar(&name, "name", "", "name (default: the slug)")
	f.StringVar(&description, "description", "", "what it is for")
	f.StringVar(&role, "role", "", "app_operator, app_publisher or viewer (default: app_operator)")
	f.StringVar(&custom, "custom", "", "role that the org has made, by id or slug, instead of --role")
	f.StringVar(&save, "save", "", "write the account with its key to this file (mode 0600) instead of showing the key")
	return c
}

// showKeyOnce saves or shows an account with the key that is in no later answer.
func (s *session) showKeyOnce(sa client.ServiceAccount, save string, columns []column[client.ServiceAccount]) error {
	if save != "" {
		text, err := json.MarshalIndent(sa, "", "  ")
		if err != nil {
			return err
		}
		if err := writePrivate(save, append(text, '\n')); err != nil {
			return fmt.Errorf("the account has a new key, but it could not be saved; make another with gpuaas sa rotate-key "+
				"%s: %w", sa.ID, err)
		}
		sa.Key = client.ServiceAccountKey{}
		return show(s, sa, columns)
	}
	if s.output == "table" {
		// A table has no place for a key, and without it the account is of no use.
		s.progress.stop()
		return encode(s.env.Stdout, "json", sa)
	}
	return show(s, sa, columns)
}

// oneServiceAccount is a leaf about one account, by id or slug.
func (a *app) oneServiceAccount(verb, short string, run func(ctx context.Context, s *session, project,
	id string) error,
) *cobra.Command {
	return a.projectAction(verb+" ACCOUNT", short, cobra.ExactArgs(1), func(ctx context.Context, s *session,
		project string, args []string,
	) error {
		id, err := s.serviceAccountID(ctx, project, args[0])
		if err != nil {
			return err
		}
		return run(ctx, s, project, id)
	})
}

func (a *app) rotateKeyCommand(columns []column[client.ServiceAccount]) *cobra.Command {
	var save string
	var overlap time.Duration
	c := a.oneServiceAccount("rotate-key", "Replace the key of a service account; the new one is shown once",
		func(ctx context.Context, s *session, project, id string) error {
			sa, err := client.Read[client.ServiceAccount](s.hub.RotateServiceAccountKey(ctx, project, id,
				client.ServiceAccountKeyRotation{OverlapSeconds: int64(overlap.Seconds())}, s.editors()...))
			if err != nil {
				return err
			}
			return s.showKeyOnce(sa, save, columns)
		})
	c.Flags().StringVar(&save, "save", "", "write the account with its key to this file (mode 0600) instead of showing "+
		"the key")
	c.Flags().DurationVar(&overlap, "overlap", 0, "how long the key before stays valid, at most 720h (default: it ends "+
		"at once)")
	return c
}

// keysOf names the valid keys of an account, with their ends.
func keysOf(sa client.ServiceAccount) string {
	var all []string
	for _, k := range sa.Keys {
		text := k.KeyID
		if !k.ExpiresAt.IsZero() {
			text += " until " + stamp(k.ExpiresAt)
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

// closed ends a request whose answer has no content.
func closed(res *http.Response, err error) error {
	if err != nil {
		return err
	}
	return res.Body.Close()
}

func or(value, otherwise string) string {
	if value != "" {
		return value
	}
	return otherwise
}
