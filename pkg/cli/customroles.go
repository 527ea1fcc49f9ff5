package cli

import (
	"context"
	"net/http"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func customRoleColumns() []column[client.CustomRole] {
	return []column[client.CustomRole]{
		{"SLUG", func(r client.CustomRole) string { return r.Slug }},
		{"NAME", func(r client.CustomRole) string { return r.DisplayName }},
		{"PERMISSIONS", func(r client.CustomRole) string { return joined(r.Permissions) }},
		{"ID", func(r client.CustomRole) string { return r.ID }},
	}
}

// customRolesCommand is about roles that an org makes of permissions.
func (a *app) customRolesCommand() *cobra.Command {
	var org string
	list := listing(a, "list", "Roles that the org has made", cobra.NoArgs, customRoleColumns(),
		func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
			id, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return nil, err
			}
			return s.customRoles(ctx, id)(cursor)
		})
	create := a.createCustomRoleCommand(&org)
	one := func(verb, short string, run func(ctx context.Context, s *session, org, id string) error) *cobra.Command {
		return a.action(verb+" ROLE", short, cobra.ExactArgs(1), func(ctx context.Context, s *session, args []string) error {
			orgID, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return err
			}
			id, err := s.customRoleID(ctx, orgID, args[0])
			if err != nil {
				return err
			}
			return run(ctx, s, orgID, id)
		})
	}
	var name, description string
	var permissions []string
	set := one("set", "Change name, description or permissions of a role, for all who hold it",
		func(ctx context.Context, s *session, org, id string) error {
			res, err := s.hub.GetCustomRole(ctx, org, id) //nolint:bodyclose // Read closes it
			if err != nil {
				return err
			}
			r, err := client.Read[client.CustomRole](res, nil)
			if err != nil {
				return err
			}
			body := client.CustomRolePut{
				DisplayName: or(name, r.DisplayName), Description: or(description, r.Description), Permissions: r.Permissions,
			}
			if len(permissions) > 0 {
				body.Permissions = permissions
			}
			editors := append(s.editors(), client.IfMatch(res)) // what is not named stays as it was read
			return showAnswer(s, customRoleColumns())(s.hub.PutCustomRole(ctx, org, id, body, editors...))
		})
	f := set.Flags()
	f.StringVar(&name, "name", "", "display name (default: unchanged)")
	f.StringVar(&description, "description", "", "what it is for (default: unchanged)")
	f.StringSliceVar(&permissions, "permission", nil, "permission of the role, instead of those it has (repeatable)")
	c := group("custom", "Roles that an org makes of permissions", list, create, set,
		one("get", "One role", func(ctx context.Context, s *session, org, id string) error {
			return showAnswer(s, customRoleColumns())(s.hub.GetCustomRole(ctx, org, id, s.editors()...))
		}),
		one("delete", "Remove a role that nobody holds", func(ctx context.Context, s *session, org, id string) error {
			return closed(s.hub.DeleteCustomRole(ctx, org, id, s.editors()...))
		}))
	c.PersistentFlags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	return c
}

func (a *app) createCustomRoleCommand(org *string) *cobra.Command {
	var name, description string
	c := a.action("create SLUG PERMISSION…", "Make a role of permissions that you hold yourself", cobra.MinimumNArgs(2),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.orgOrOwn(ctx, *org)
			if err != nil {
				return err
			}
			return showAnswer(s, customRoleColumns())(s.hub.CreateCustomRole(ctx, id, client.CustomRoleCreate{
				Slug: args[0], DisplayName: or(name, args[0]), Description: description, Permissions: args[1:],
			}, s.editors()...))
		})
	c.Example = "  gpuaas roles custom create restarter apps.instance.read apps.instance.stop apps.instance.start"
	c.Flags().StringVar(&name, "name", "", "display name (default: the slug)")
	c.Flags().StringVar(&description, "description", "", "what it is for")
	return c
}

// customFlag is the flag of commands that set roles.
func customFlag(f *pflag.FlagSet, into *[]string) {
	f.StringSliceVar(into, "custom", nil, "role that the org has made, by id or slug (repeatable); none takes them all "+
		"(default: unchanged)")
}

// customRoleIDs are the ids of the roles that --custom names.
func (s *session) customRoleIDs(ctx context.Context, org string, given []string) (*[]string, error) {
	ids := []string{}
	for _, name := range slices.DeleteFunc(slices.Clone(given), func(n string) bool { return n == "none" }) {
		id, err := s.customRoleID(ctx, org, name)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return &ids, nil
}

func (s *session) customRoles(ctx context.Context, org string) func(string) (*http.Response, error) {
	return func(cursor string) (*http.Response, error) {
		return s.hub.ListCustomRoles(ctx, org,
			&client.ListCustomRolesParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
	}
}

// customRoleID finds a role of the org by id or slug.
func (s *session) customRoleID(ctx context.Context, org, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	//nolint:bodyclose // client.All closes what it asks for
	return only(want, "role", s.customRoles(ctx, org), func(r client.CustomRole) (string, bool) {
		return r.ID, r.Slug == want
	})
}
