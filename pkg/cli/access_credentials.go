package cli

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func credentialColumns() []column[client.AccessCredential] {
	return []column[client.AccessCredential]{
		{"NAME", func(c client.AccessCredential) string { return c.Name }},
		{"KIND", func(c client.AccessCredential) string { return string(c.Kind) }},
		{"VERSION", func(c client.AccessCredential) string { return strconv.FormatInt(c.Version, 10) }},
		{"STATUS", func(c client.AccessCredential) string { return string(c.Status) }},
		{"PUBLIC KEY", func(c client.AccessCredential) string { return c.PublicKey }},
		{"ID", func(c client.AccessCredential) string { return c.ID }},
	}
}

// accessCredentialsCommand manages the SSH key pairs of a project.
func (a *app) accessCredentialsCommand() *cobra.Command {
	list := projectListing(a, "list", "Access credentials of the project", cobra.NoArgs, credentialColumns(),
		func(ctx context.Context, s *session, project string, _ []string, cursor string) (*http.Response, error) {
			return s.hub.ListAccessCredentials(ctx, project,
				&client.ListAccessCredentialsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
	one := func(use, short string, call func(ctx context.Context, s *session, project, id string) (*http.Response, error),
	) *cobra.Command {
		return a.projectAction(use, short, cobra.ExactArgs(1), func(ctx context.Context, s *session, project string,
			args []string,
		) error {
			id, err := s.credentialID(ctx, project, args[0])
			if err != nil {
				return err
			}
			return showAnswer(s, credentialColumns())(call(ctx, s, project, id))
		})
	}
	return group("access-credentials", "SSH key pairs of the project", list, a.createCredential(), a.rotateCredential(),
		a.unwrapCommand(),
		one("get CREDENTIAL", "One access credential", func(ctx context.Context, s *session, project, id string,
		) (*http.Response, error) {
			return s.hub.GetAccessCredential(ctx, project, id, nil, s.editors()...)
		}),
		one("revoke CREDENTIAL", "End an access credential", func(ctx context.Context, s *session, project, id string,
		) (*http.Response, error) {
			return s.hub.RevokeAccessCredential(ctx, project, id, s.editors()...)
		}))
}

func (a *app) createCredential() *cobra.Command {
	var save string
	c := a.projectAction("create NAME", "Make an SSH key pair", cobra.ExactArgs(1), func(ctx context.Context, s *session,
		project string, args []string,
	) error {
		if err := refuseExisting(save); err != nil {
			return err
		}
		made, err := client.Read[client.AccessCredential](s.hub.CreateAccessCredential(ctx, project,
			client.AccessCredentialCreate{Name: args[0]}, s.editors()...))
		return s.deliver(ctx, made, save, err)
	})
	saveFlag(c, &save)
	return c
}

func (a *app) rotateCredential() *cobra.Command {
	var save string
	c := a.projectAction("rotate CREDENTIAL", "Replace the key pair of an access credential", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			if err := refuseExisting(save); err != nil {
				return err
			}
			id, err := s.credentialID(ctx, project, args[0])
			if err != nil {
				return err
			}
			made, err := client.Read[client.AccessCredential](s.hub.RotateAccessCredential(ctx, project, id,
				s.editors()...))
			return s.deliver(ctx, made, save, err)
		})
	saveFlag(c, &save)
	return c
}

func saveFlag(c *cobra.Command, save *string) {
	c.Flags().StringVar(save, "save", "", "unwrap the private key into this new file (default: show the wrapping token, "+
		"for access-credentials unwrap)")
}

// deliver shows a credential with its wrapping token, or uses that at once.
func (s *session) deliver(ctx context.Context, made client.AccessCredential, save string, err error) error {
	if err != nil {
		return err
	}
	if save != "" {
		if err := s.unwrap(ctx, made.WrappingToken.Token, save); err != nil {
			return err
		}
		made.WrappingToken = client.WrappingToken{}
		return show(s, made, credentialColumns())
	}
	if s.output == "table" {
		// A table has no place for a token, and without it the key is of no use.
		s.progress.stop()
		return encode(s.env.Stdout, "json", made)
	}
	return show(s, made, credentialColumns())
}

func (a *app) unwrapCommand() *cobra.Command {
	var file string
	c := a.action("unwrap FILE", "Write the private key of a wrapping token to a new file, once", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			if err := refuseExisting(args[0]); err != nil {
				return err
			}
			text, err := readInput(s.env.Stdin, file)
			if err != nil {
				return usage(err)
			}
			return s.unwrap(ctx, strings.TrimSpace(string(text)), args[0])
		})
	c.Flags().StringVar(&file, "token-file", "-", "file with the wrapping token; - for stdin")
	return c
}

// refuseExisting returns a usage error if the file exists: it may hold a key that is in use. It is called before a key
// is made or a wrapping token used.
func refuseExisting(file string) error {
	if file == "" {
		return nil
	}
	if _, err := os.Lstat(file); err == nil {
		return usage(fmt.Errorf("%s exists; name a new file for the key", file))
	}
	return nil
}

func (s *session) unwrap(ctx context.Context, token, file string) error {
	out, err := client.Read[client.Unwrapped](s.hub.Unwrap(ctx, client.Unwrap{Token: token}, s.editors()...))
	if err != nil {
		return err
	}
	if err := writePrivate(file, []byte(out.PrivateKeyPem)); err != nil {
		return fmt.Errorf("the wrapping token is used, but the key could not be saved; make another with gpuaas "+
			"access-credentials rotate %s: %w", out.AccessCredentialID, err)
	}
	return nil
}

// credentialID returns the id of an active access credential that is named by its id or its name.
func (s *session) credentialID(ctx context.Context, project, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	credentials := func(cursor string) (*http.Response, error) {
		return s.hub.ListAccessCredentials(ctx, project,
			&client.ListAccessCredentialsParams{Cursor: cursor, Limit: client.PageSize})
	}
	return only(want, "access credential", credentials, func(c client.AccessCredential) (string, bool) {
		return c.ID, c.Name == want && c.Status == client.AccessCredentialStatusActive
	})
}
