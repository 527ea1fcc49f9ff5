package cli

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// totpSecretBytes is what RFC 4226, section 4, recommends.
const totpSecretBytes = 20

func invitationColumns() []column[client.Invitation] {
	return []column[client.Invitation]{
		{"EMAIL", func(i client.Invitation) string { return i.Email }},
		{"ROLES", func(i client.Invitation) string { return joined(i.Roles) }},
		{"EXPIRES", func(i client.Invitation) string { return stamp(i.ExpiresAt) }},
		{"ID", func(i client.Invitation) string { return i.ID }},
	}
}

func (a *app) invitationsCommand() *cobra.Command {
	var org string
	list := listing(a, "list", "Invitations that are open", cobra.NoArgs, invitationColumns(),
		func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
			id, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return nil, err
			}
			return s.hub.ListInvitations(ctx, id, &client.ListInvitationsParams{Cursor: cursor, Limit: client.PageSize},
				s.editors()...)
		})
	revoke := a.action("revoke INVITATION", "Take an invitation back", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return err
			}
			return closed(s.hub.RevokeInvitation(ctx, id, args[0], s.editors()...))
		})
	create := a.createInvitationCommand(&org)
	for _, c := range []*cobra.Command{list, revoke, create} {
		c.Flags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	}
	return group("invitations", "Invite people into an org", create, list, revoke, a.acceptInvitationCommand())
}

func (a *app) createInvitationCommand(org *string) *cobra.Command {
	var roles, custom []string
	var seconds int64
	c := a.action("create EMAIL", "Invite an e-mail address; the token is shown once", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.orgOrOwn(ctx, *org)
			if err != nil {
				return err
			}
			body := client.InvitationCreate{Email: args[0], ExpiresInSeconds: seconds}
			for _, r := range roles {
				body.Roles = append(body.Roles, client.UserRole(r))
			}
			ids, err := s.customRoleIDs(ctx, id, custom)
			if err != nil {
				return err
			}
			body.CustomRoles = *ids
			columns := append(invitationColumns(), column[client.Invitation]{
				"TOKEN", func(i client.Invitation) string { return i.Token },
			})
			return showAnswer(s, columns)(s.hub.CreateInvitation(ctx, id, body, s.editors()...))
		})
	f := c.Flags()
	f.StringSliceVar(&roles, "role", nil, "org_admin, org_member, org_billing or app_publisher (repeatable; default: "+
		"org_member, without --custom)")
	f.StringSliceVar(&custom, "custom", nil, "role that the org has made, by id or slug (repeatable)")
	f.Var(lifeFlag{&seconds}, "life", "how long it is valid (default: what the hub gives)")
	return c
}

func (a *app) acceptInvitationCommand() *cobra.Command {
	var at loginFlags
	var displayName, tokenFile string
	var codes bool
	c := &cobra.Command{
		Use:   "accept --url https://HOST:PORT --display-name NAME --token-file FILE",
		Short: "Become a user by an invitation, and log in",
		Long: `Become a user by an invitation, and log in. The password is asked for, or a line of stdin. With
--one-time-codes it sets up an authenticator app as the second factor; that needs a terminal.`,
		Args: checked(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			fresh, name, err := at.context(a)
			if err != nil {
				return err
			}
			token, err := readSecretFile(tokenFile)
			if err != nil {
				return usage(err)
			}
			secrets, err := a.askSecrets("New password, 12 characters or more: ")
			if err != nil {
				return err
			}
			body := client.InvitationAcceptance{
				Token: strings.TrimSpace(token), DisplayName: displayName, Password: secrets[0],
			}
			if codes {
				if body.Totp, err = a.setUpCodes(displayName, fresh.URL); err != nil {
					return err
				}
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			if err := a.startSession(&fresh, func(hub *client.Hub) (*http.Response, error) {
				return hub.AcceptInvitation(ctx, body)
			}); err != nil {
				return err
			}
			return a.login(ctx, name, fresh)
		},
	}
	at.add(c)
	f := c.Flags()
	f.StringVar(&displayName, "display-name", "", "your name")
	f.StringVar(&tokenFile, "token-file", "", "file with the invitation's token")
	f.BoolVar(&codes, "one-time-codes", false, "also need a code of an authenticator app at each login")
	_ = c.MarkFlagRequired("display-name") // exists
	_ = c.MarkFlagRequired("token-file")
	return c
}

// totp is what sets up one-time codes, as the contract has it.
type totp = struct {
	Code   client.OneTimeCode `json:"code"`
	Secret string             `json:"secret"`
}

// setUpCodes shows a new secret for an authenticator app and asks for a code that proves it works.
func (a *app) setUpCodes(name, hub string) (*totp, error) {
	if a.env.ReadSecret == nil {
		return nil, usage(errors.New("--one-time-codes needs a terminal"))
	}
	raw := make([]byte, totpSecretBytes)
	_, _ = rand.Read(raw) // never fails; it ends the program
	secret := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(raw)
	uri := url.URL{
		Scheme: "otpauth", Host: "totp", Path: "/GPUaaS:" + name,
		RawQuery: url.Values{"secret": {secret}, "issuer": {"GPUaaS " + hub}}.Encode(),
	}
	fmt.Fprintf(a.env.Stderr, "Add this to your authenticator app:\n%s\n", printable(uri.String()))
	answers, err := a.askSecrets("The code that it shows: ")
	if err != nil {
		return nil, err
	}
	return &totp{Code: answers[0], Secret: secret}, nil
}
