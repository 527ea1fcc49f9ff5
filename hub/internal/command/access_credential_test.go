package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// signs reports whether a private key is that of the public one.
func signs(t *testing.T, private, public string) bool {
	t.Helper()
	signer, err := ssh.ParsePrivateKey([]byte(private))
	require.NoError(t, err)
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(public))
	require.NoError(t, err)
	return string(signer.PublicKey().Marshal()) == string(key.Marshal())
}

// wrapped is the private key of the newest wrapping token, sealed.
func (w *world) wrapped(credentialID string) (sealed string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		found, err := db.Value[[]byte](ctx, tx, `SELECT sealed FROM wrapping_tokens WHERE credential_id = $1
			ORDER BY expires_at DESC, id DESC LIMIT 1`, credentialID)
		sealed = string(found)
		return err
	})
	require.NotEmpty(w.T, sealed)
	return sealed
}

// Law 11: a private key leaves the hub once, by a wrapping token, and only to who asked for it.
func TestLaw11AWrappingTokenDeliversOnceToItsRequester(t *testing.T) {
	w := newWorld(t)
	commands := w.Commands()
	commands.Sealer = sealer(t)
	project := w.Project.ID
	made, err := commands.CreateAccessCredential(t.Context(), w.Meta("create"), project, "bootstrap")
	require.NoError(t, err)
	again, err := commands.CreateAccessCredential(t.Context(), w.Meta("create"), project, "bootstrap")
	require.NoError(t, err)
	require.Equal(t, made, again, "a repeated request gets the same token")
	_, err = commands.CreateAccessCredential(t.Context(), w.Meta("other"), project, "bootstrap")
	require.EqualValues(t, "access_credential_exists", fault.As(err).Code)
	_, err = commands.Unwrap(t.Context(), w.Meta(""), "gpuaas_wrap_guessed")
	require.EqualValues(t, "wrapping_token_invalid", fault.As(err).Code)

	wrapped := w.wrapped(made.Credential.ID)
	out, err := commands.Unwrap(t.Context(), w.Meta(""), made.Token)
	require.NoError(t, err)
	require.True(t, signs(t, out.PrivateKeyPEM, made.Credential.PublicKey))
	w.RequireHidden(wrapped)
	require.Equal(t, "iam.access_credential.unwrap", w.auditOf("access_credential", made.Credential.ID).Action)
	_, err = commands.Unwrap(t.Context(), w.Meta(""), made.Token)
	require.EqualValues(t, "wrapping_token_used", fault.As(err).Code)
	require.Equal(t, "used_again", w.auditOf("access_credential", made.Credential.ID).Reason)

	next, err := commands.RotateAccessCredential(t.Context(), w.Meta("rotate"), project, made.Credential.ID)
	require.NoError(t, err)
	require.EqualValues(t, 2, next.Credential.Version)
	require.NotEqual(t, made.Credential.PublicKey, next.Credential.PublicKey)
	_, err = commands.Unwrap(t.Context(), w.Meta(""), made.Token)
	require.EqualValues(t, "wrapping_token_used", fault.As(err).Code, "of the key before, too, it is a misuse")
	_, outsider := w.NewTenant("other")
	foreign := w.Meta("")
	foreign.Principal = outsider
	wrapped = w.wrapped(made.Credential.ID)
	_, err = commands.Unwrap(t.Context(), foreign, next.Token)
	require.EqualValues(t, "wrapping_token_invalid", fault.As(err).Code, "as if it were a guess")
	require.Equal(t, "not_the_requester", w.auditOf("access_credential", made.Credential.ID).Reason)
	_, err = commands.Unwrap(t.Context(), w.Meta(""), next.Token)
	require.EqualValues(t, "wrapping_token_used", fault.As(err).Code, "others know it: it has ended")
	w.RequireHidden(wrapped)

	late := w.Meta("")
	next, err = commands.RotateAccessCredential(t.Context(), w.Meta("rotate 2"), project, made.Credential.ID)
	require.NoError(t, err)
	late.Now = late.Now.Add(secret.WrappingTokenTTL)
	_, err = commands.Unwrap(t.Context(), late, next.Token)
	require.EqualValues(t, "wrapping_token_expired", fault.As(err).Code)
	revoked, err := commands.RevokeAccessCredential(t.Context(), w.Meta("revoke"), project, made.Credential.ID)
	require.NoError(t, err)
	require.Equal(t, secret.StatusRevoked, revoked.Status)
	_, err = commands.Unwrap(t.Context(), w.Meta(""), next.Token)
	require.EqualValues(t, "wrapping_token_invalid", fault.As(err).Code)
	_, err = commands.RotateAccessCredential(t.Context(), w.Meta("rotate 3"), project, made.Credential.ID)
	require.EqualValues(t, "access_credential_revoked", fault.As(err).Code)
	require.Equal(t, []string{
		"iam.access_credential.created", "security.wrapping_token.misused", "iam.access_credential.rotated",
		"security.wrapping_token.misused", "security.wrapping_token.misused", "security.wrapping_token.misused",
		"iam.access_credential.rotated", "iam.access_credential.revoked",
	}, w.EventTypes(made.Credential.ID))
	w.RequireHidden("PRIVATE KEY", made.Token)
}

func law08ChangesOfAccessCredentialsAreOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{
		{"create credential", "access_credentials", func(w *world) func(commandtest.Around) error {
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Sealer = sealer(w.T)
				return second(s.CreateAccessCredential(ctx, m, w.Project.ID, "bootstrap"))
			})
		}},
	})
}

// Law 11: a private key is for who has the right to it when it leaves the hub, and the token waits for that.
func TestLaw11WhoHasLostTheRightUnwrapsNothing(t *testing.T) {
	w := newWorld(t)
	commands := w.Commands()
	commands.Sealer = sealer(t)
	made, err := commands.CreateAccessCredential(t.Context(), w.Meta("create"), w.Project.ID, "bootstrap")
	require.NoError(t, err)
	without := w.Meta("")
	without.Principal.PlatformAdmin, without.Principal.Bindings = false, nil
	out, err := commands.Unwrap(t.Context(), without, made.Token)
	require.True(t, fault.Is(err, fault.NotFound) || fault.Is(err, fault.Forbidden), "%v", err)
	require.Empty(t, out.PrivateKeyPEM)
	out, err = commands.Unwrap(t.Context(), w.Meta(""), made.Token)
	require.NoError(t, err)
	require.True(t, signs(t, out.PrivateKeyPEM, made.Credential.PublicKey))
}
