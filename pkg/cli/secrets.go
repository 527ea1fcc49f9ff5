package cli

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// secretsCommand manages the secrets of a project, which nobody reads but its apps.
func (a *app) secretsCommand() *cobra.Command {
	columns := []column[client.Secret]{
		{"NAME", func(v client.Secret) string { return v.Name }},
		{"VERSION", func(v client.Secret) string { return strconv.FormatInt(v.Version, 10) }},
		{"STATUS", func(v client.Secret) string { return string(v.Status) }},
		{"INSTANCES", func(v client.Secret) string { return strconv.Itoa(len(v.UsedByAppInstanceIds)) }},
		{"UPDATED", func(v client.Secret) string { return stamp(v.UpdatedAt) }},
		{"ID", func(v client.Secret) string { return v.ID }},
	}
	list := projectListing(a, "list", "Secrets of the project, without their values", cobra.NoArgs, columns,
		func(ctx context.Context, s *session, project string, _ []string, cursor string) (*http.Response, error) {
			return s.hub.ListSecrets(ctx, project, &client.ListSecretsParams{Cursor: cursor, Limit: client.PageSize},
				s.editors()...)
		})
	one := func(use, short string, call func(ctx context.Context, s *session, project, id string) (*http.Response, error),
	) *cobra.Command {
		return a.projectAction(use, short, cobra.ExactArgs(1), func(ctx context.Context, s *session, project string,
			args []string,
		) error {
			id, err := s.secretID(ctx, project, args[0])
			if err != nil {
				return err
			}
			return showAnswer(s, columns)(call(ctx, s, project, id))
		})
	}
	var file string
	create := a.projectAction("create NAME", "Store a secret; a launch refers to it by --param "+
		`NAME={"$secret":"NAME"}`, cobra.ExactArgs(1), func(ctx context.Context, s *session, project string, args []string,
	) error {
		value, err := s.secretValue(file)
		if err != nil {
			return err
		}
		return showAnswer(s, columns)(s.hub.CreateSecret(ctx, project, client.SecretCreate{Name: args[0], Value: value},
			s.editors()...))
	})
	rotate := one("rotate SECRET", "Give a secret another value, which reaches the app instances that refer to it",
		func(ctx context.Context, s *session, project, id string) (*http.Response, error) {
			value, err := s.secretValue(file)
			if err != nil {
				return nil, err
			}
			return s.hub.RotateSecret(ctx, project, id, client.SecretRotate{Value: value}, s.editors()...)
		})
	for _, c := range []*cobra.Command{create, rotate} {
		c.Flags().StringVar(&file, "value-file", "-", "file with the value, without its last line break; - for stdin")
	}
	return group("secrets", "Secrets of the project for its apps", list, create, rotate,
		one("get SECRET", "One secret, without its value", func(ctx context.Context, s *session, project, id string,
		) (*http.Response, error) {
			return s.hub.GetSecret(ctx, project, id, nil, s.editors()...)
		}),
		one("revoke SECRET", "Destroy the value of a secret; app instances that refer to it get an empty one",
			func(ctx context.Context, s *session, project, id string) (*http.Response, error) {
				return s.hub.RevokeSecret(ctx, project, id, s.editors()...)
			}))
}

// secretValue reads a value from a file: other users of a machine see arguments.
func (s *session) secretValue(file string) (string, error) {
	text, err := readInput(s.env.Stdin, file)
	if err != nil {
		return "", usage(err)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r"), nil
}

// secretID returns the id of a secret that is named by its id or its name.
func (s *session) secretID(ctx context.Context, project, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	secrets := func(cursor string) (*http.Response, error) {
		return s.hub.ListSecrets(ctx, project, &client.ListSecretsParams{Cursor: cursor, Limit: client.PageSize})
	}
	return only(want, "secret", secrets, func(v client.Secret) (string, bool) { return v.ID, v.Name == want })
}
