package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func userColumns() []column[client.User] {
	return []column[client.User]{
		{"EMAIL", func(u client.User) string { return u.Email }},
		{"NAME", func(u client.User) string { return u.DisplayName }},
		{"ROLES", func(u client.User) string { return joined(u.Roles) }},
		{"PLATFORM ADMIN", func(u client.User) string { return fmt.Sprint(u.PlatformAdmin) }},
		{"STATUS", func(u client.User) string { return string(u.Status) }},
		{"ORG", func(u client.User) string { return u.OrgID }},
		{"ID", func(u client.User) string { return u.ID }},
	}
}

func (a *app) usersCommand() *cobra.Command {
	var org string
	list := listing(a, "list", "Users of your org; all of them for a platform admin", cobra.NoArgs, userColumns(),
		func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
			return s.users(ctx, org)(cursor)
		})
	list.Flags().StringVar(&org, "org", "", "org, by id or slug")
	return group("users", "Users of an org", list, a.createUserCommand(), a.createTokenCommand(), a.setRolesCommand(),
		a.oneUser("get", "One user", func(ctx context.Context, s *session, id string) error {
			return showAnswer(s, userColumns())(s.hub.GetUser(ctx, id, s.editors()...))
		}),
		a.oneUser("disable", "Refuse a user and all tokens of the user from now on", func(ctx context.Context, s *session,
			id string,
		) error {
			return showAnswer(s, userColumns())(s.hub.DisableUser(ctx, id, s.editors()...))
		}),
		a.oneUser("enable", "Let a disabled user in again", func(ctx context.Context, s *session, id string) error {
			return showAnswer(s, userColumns())(s.hub.EnableUser(ctx, id, s.editors()...))
		}),
		a.oneUser("remove", "Remove a user from the org for good", func(ctx context.Context, s *session, id string) error {
			u, err := client.Read[client.User](s.hub.GetUser(ctx, id))
			if err != nil {
				return err
			}
			return closed(s.hub.RemoveOrgUser(ctx, u.OrgID, id, s.editors()...))
		}))
}

func (a *app) createUserCommand() *cobra.Command {
	var (
		name, org     string
		roles, custom []string
		admin         bool
	)
	c := a.action("create EMAIL", "Make a user (platform admin)", cobra.ExactArgs(1), func(ctx context.Context, s *session,
		args []string,
	) error {
		orgID, err := s.orgID(ctx, org)
		if err != nil {
			return err
		}
		body := client.UserCreate{OrgID: orgID, Email: args[0], DisplayName: or(name, args[0]), PlatformAdmin: admin}
		for _, r := range roles {
			body.Roles = append(body.Roles, client.UserRole(r))
		}
		ids, err := s.customRoleIDs(ctx, orgID, custom)
		if err != nil {
			return err
		}
		body.CustomRoles = *ids
		return showAnswer(s, userColumns())(s.hub.CreateUser(ctx, body, s.editors()...))
	})
	f := c.Flags()
	f.StringVar(&name, "name", "", "display name (default: the address)")
	f.StringVar(&org, "org", "", "org, by id or slug")
	f.StringSliceVar(&roles, "role", nil, "org_admin, org_member, org_billing or app_publisher (repeatable)")
	f.StringSliceVar(&custom, "custom", nil, "role that the org has made, by id or slug (repeatable)")
	f.BoolVar(&admin, "platform-admin", false, "may do everything in every org")
	return c
}

func (a *app) createTokenCommand() *cobra.Command {
	var (
		seconds     int64
		description string
	)
	c := a.oneUser("token", "Make a personal token for a user (platform admin); it is shown once",
		func(ctx context.Context, s *session, id string) error {
			t, err := client.Read[client.UserToken](s.hub.CreateUserToken(ctx, id, client.UserTokenCreate{
				Description: description, ExpiresInSeconds: seconds,
			}, s.editors()...))
			if err != nil {
				return err
			}
			return show(s, t, []column[client.UserToken]{
				{"TOKEN", func(t client.UserToken) string { return t.Token }},
				{"EXPIRES", func(t client.UserToken) string { return stamp(t.ExpiresAt) }},
			})
		})
	c.Flags().Var(lifeFlag{&seconds}, "life", "how long it is valid (default: what the hub gives)")
	c.Flags().StringVar(&description, "description", "", "what it is for")
	return c
}

func (a *app) setRolesCommand() *cobra.Command {
	var platformAdmin string
	var custom []string
	c := a.action("set-roles USER [ROLE…]", "Set the roles that a user holds in the whole org", cobra.MinimumNArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.userID(ctx, args[0])
			if err != nil {
				return err
			}
			body := client.UserRolesPut{Roles: []client.UserRole{}}
			for _, r := range args[1:] {
				body.Roles = append(body.Roles, client.UserRole(r))
			}
			if custom != nil {
				u, err := client.Read[client.User](s.hub.GetUser(ctx, id))
				if err != nil {
					return err
				}
				if body.CustomRoles, err = s.customRoleIDs(ctx, u.OrgID, custom); err != nil {
					return err
				}
			}
			switch platformAdmin {
			case "":
			case "true", "false":
				admin := platformAdmin == "true"
				body.PlatformAdmin = &admin
			default:
				return usage(errors.New("--platform-admin is true or false"))
			}
			return showAnswer(s, userColumns())(s.hub.PutUserRoles(ctx, id, body, s.editors()...))
		})
	c.Long = "Set the roles that a user holds in the whole org: org_admin, org_member, org_billing, app_publisher. " +
		"Roles that are not named are taken."
	customFlag(c.Flags(), &custom)
	c.Flags().StringVar(&platformAdmin, "platform-admin", "", "true or false, for platform admins (default: unchanged)")
	return c
}

func (a *app) tokensCommand() *cobra.Command {
	var user string
	columns := []column[client.UserTokenInfo]{
		{"ID", func(t client.UserTokenInfo) string { return t.ID }},
		{"DESCRIPTION", func(t client.UserTokenInfo) string { return t.Description }},
		{"CREATED", func(t client.UserTokenInfo) string { return stamp(t.CreatedAt) }},
		{"EXPIRES", func(t client.UserTokenInfo) string { return stamp(t.ExpiresAt) }},
	}
	list := listing(a, "list", "Tokens that are valid, without their text", cobra.NoArgs, columns,
		func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
			id, err := s.userOrSelf(ctx, user)
			if err != nil {
				return nil, err
			}
			return s.hub.ListUserTokens(ctx, id,
				&client.ListUserTokensParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
	var all bool
	revoke := a.action("revoke [TOKEN_ID]", "Revoke a token; it is refused from now on", cobra.MaximumNArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			if all == (len(args) == 1) {
				return usage(errors.New("give a token's id (gpuaas tokens list shows them) or --all"))
			}
			id, err := s.userOrSelf(ctx, user)
			if err != nil {
				return err
			}
			if all {
				return closed(s.hub.RevokeUserTokens(ctx, id, s.editors()...))
			}
			return closed(s.hub.RevokeUserToken(ctx, id, args[0], s.editors()...))
		})
	revoke.Flags().BoolVar(&all, "all", false, "revoke every token of the user, the one in use included")
	c := group("tokens", "Personal tokens: your own, or those of a user of your org", list, revoke)
	c.PersistentFlags().StringVar(&user, "user", "", "user, by id or e-mail address (default: yourself)")
	return c
}

func (a *app) rolesCommand() *cobra.Command {
	columns := []column[client.ProjectRoles]{
		{"EMAIL", func(p client.ProjectRoles) string { return p.Email }},
		{"NAME", func(p client.ProjectRoles) string { return p.DisplayName }},
		{"ROLES", func(p client.ProjectRoles) string { return joined(p.Roles) }},
		{"USER", func(p client.ProjectRoles) string { return p.UserID }},
	}
	var custom []string
	set := a.projectAction("set USER [ROLE…]", "Set the roles that a user holds in the project; no role takes the user "+
		"out",
		cobra.MinimumNArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			id, err := s.userID(ctx, args[0])
			if err != nil {
				return err
			}
			body := client.ProjectRolesPut{Roles: []client.ProjectRole{}}
			for _, r := range args[1:] {
				body.Roles = append(body.Roles, client.ProjectRole(r))
			}
			if custom != nil {
				p, err := client.Read[client.Project](s.hub.GetProject(ctx, project))
				if err != nil {
					return err
				}
				if body.CustomRoles, err = s.customRoleIDs(ctx, p.OrgID, custom); err != nil {
					return err
				}
			}
			return showAnswer(s, columns)(s.hub.PutProjectRoles(ctx, project, id, body, s.editors()...))
		})
	set.Long = "Set the roles that a user of the org holds in this project only: project_admin, app_operator, viewer."
	customFlag(set.Flags(), &custom)
	return group("roles", "Roles in a project, and those that an org makes", set, a.customRolesCommand(),
		projectListing(a, "list", "Users who hold roles in this project only", cobra.NoArgs, columns,
			func(ctx context.Context, s *session, project string, _ []string,
				cursor string,
			) (*http.Response, error) {
				return s.hub.ListProjectRoles(ctx, project,
					&client.ListProjectRolesParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
			}))
}

// oneUser is a leaf about one user, by id or e-mail address.
func (a *app) oneUser(verb, short string, run func(ctx context.Context, s *session, id string) error) *cobra.Command {
	return a.action(verb+" USER", short, cobra.ExactArgs(1), func(ctx context.Context, s *session, args []string) error {
		id, err := s.userID(ctx, args[0])
		if err != nil {
			return err
		}
		return run(ctx, s, id)
	})
}

// users pages through the users of the org (by id or slug); where it is empty, of the caller's org, or all for a
// platform admin.
func (s *session) users(ctx context.Context, org string) func(string) (*http.Response, error) {
	return func(cursor string) (*http.Response, error) {
		orgID, err := s.orgID(ctx, org)
		if err != nil {
			return nil, err
		}
		if orgID == "" {
			who, err := client.Read[client.Whoami](s.hub.Whoami(ctx))
			if err != nil {
				return nil, err
			}
			if who.PlatformAdmin {
				return s.hub.ListUsers(ctx, &client.ListUsersParams{Cursor: cursor, Limit: client.PageSize})
			}
			orgID = who.OrgID
		}
		return s.hub.ListOrgUsers(ctx, orgID, &client.ListOrgUsersParams{Cursor: cursor, Limit: client.PageSize})
	}
}

// userID finds a user by id or e-mail address.
func (s *session) userID(ctx context.Context, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	//nolint:bodyclose // client.All closes what it asks for
	return only(want, "user", s.users(ctx, ""), func(u client.User) (string, bool) { return u.ID, u.Email == want })
}

// userOrSelf is userID, and the caller where none is named.
func (s *session) userOrSelf(ctx context.Context, want string) (string, error) {
	if want != "" {
		return s.userID(ctx, want)
	}
	who, err := client.Read[client.Whoami](s.hub.Whoami(ctx))
	if err != nil {
		return "", err
	}
	if who.Type != "user" {
		return "", usage(errors.New("a service account has no personal tokens; rotate its key instead: gpuaas sa rotate-key"))
	}
	return who.ID, nil
}
