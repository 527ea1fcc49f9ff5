package command_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealer seals what the hub stores with a key of the test.
func sealer(t *testing.T) *secret.Sealer {
	t.Helper()
	kek, err := secret.NewKEK([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	return secret.NewSealer(kek)
}

// told are the secret parameters that the node is to have for an instance, as it opens them, and its intent.
func (w *world) told(pair protocol.SealingKeyPair, i instance.Instance) (out map[string]string, sealed []byte,
	rev int64,
) {
	w.T.Helper()
	out = map[string]string{}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		members, err := instance.SnapshotFor(ctx, tx, w.Node)
		require.NoError(w.T, err)
		require.NoError(w.T, secret.Fill(ctx, tx, members))
		for _, m := range members {
			if m.ID != i.Members[0].ID {
				continue
			}
			for name, value := range protocol.SealedParameters(m.ParametersJSON) {
				opened, err := pair.Open(m.ID, name, value)
				require.NoError(w.T, err)
				out[name], sealed = string(opened), value
			}
		}
		rev, err = fleet.LockIntent(ctx, tx, w.Node)
		return err
	})
	return out, sealed, rev
}

// Law 11: a secret of a project is stored sealed, in all its versions, and what refers to it reaches a node as that
// node alone opens it: at the launch, after a rotation and after a revocation.
func TestLaw11ASecretReachesTheNodesThatReferToItAndNobodyElse(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.publishWithSecret()
	pair := w.sealingNode()
	commands := w.Commands()
	commands.Sealer = sealer(t)
	project := w.Project.ID
	launch := func(refer string) (instance.Instance, error) {
		in := w.InstanceInput()
		in.Version = "3.0.0"
		in.Parameters = map[string]any{"greeting": "hello", "token": map[string]any{"$secret": refer}}
		return commands.CreateInstance(t.Context(), w.Meta("launch "+db.NewID()), in)
	}
	before := w.Contents()
	_, err := launch("hf")
	require.EqualValues(t, "secret_unknown", fault.As(err).Code)
	require.Equal(t, "/parameters/token", fault.As(err).Fields[0].Pointer)
	require.Equal(t, before, w.Contents())

	v, err := commands.CreateSecret(t.Context(), w.Meta("issue"), project, "hf", "correct-horse")
	require.NoError(t, err)
	_, err = commands.CreateSecret(t.Context(), w.Meta("again"), project, "hf", "correct-horse")
	require.EqualValues(t, "secret_exists", fault.As(err).Code)
	i, err := launch("hf")
	require.NoError(t, err)
	require.JSONEq(t, `{"greeting":"hello","token":{"$secret":"hf"}}`, i.ParametersJSON)
	got, first, _ := w.told(pair, i)
	require.Equal(t, map[string]string{"token": "correct-horse"}, got)
	i = w.ready(i)

	i, err = commands.UpgradeInstance(t.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: project, InstanceID: i.ID, Version: "3.0.0",
		Parameters: map[string]any{"greeting": "again", "token": map[string]any{"$secret": "hf"}},
	})
	require.NoError(t, err)
	_, second, _ := w.told(pair, i)
	require.Equal(t, first, second, "the same value is not sealed anew: that would replace containers")
	i = w.ready(i)

	_, _, rev := w.told(pair, i)
	v, err = commands.RotateSecret(t.Context(), w.Meta("rotate"), project, v.ID, "battery-staple")
	require.NoError(t, err)
	require.EqualValues(t, 2, v.Version)
	got, _, next := w.told(pair, i)
	require.Equal(t, map[string]string{"token": "battery-staple"}, got)
	require.Greater(t, next, rev, "the node is told")

	v, err = commands.RevokeSecret(t.Context(), w.Meta("revoke"), project, v.ID)
	require.NoError(t, err)
	require.Equal(t, secret.StatusRevoked, v.Status)
	got, _, _ = w.told(pair, i)
	require.Equal(t, map[string]string{"token": ""}, got)
	_, err = launch("hf")
	require.EqualValues(t, "secret_unknown", fault.As(err).Code)
	_, err = commands.RotateSecret(t.Context(), w.Meta("too late"), project, v.ID, "x")
	require.EqualValues(t, "secret_revoked", fault.As(err).Code)
	v, err = commands.CreateSecret(t.Context(), w.Meta("anew"), project, "hf", "third-horse")
	require.NoError(t, err)
	require.EqualValues(t, 4, v.Version, "the revocation is a version, too")
	got, _, _ = w.told(pair, i)
	require.Equal(t, map[string]string{"token": "third-horse"}, got)
	require.Equal(t, []string{
		"apps.secret.issued", "apps.secret.rotated", "apps.secret.revoked", "apps.secret.issued",
	}, w.EventTypes(v.ID))

	w.RequireHidden("correct-horse", "battery-staple", "third-horse")
	w.decommissioned(i)
	w.Report(uint64(i.Revision)+1, w.Removed(i))
	require.Zero(t, w.Count(`SELECT count(*) FROM runtime_secret_deliveries`), "nothing stays of a removed member")
}

// Law 13: a node that shows no key to seal to, or a key to nothing, keeps no secret from being rotated or revoked. Its
// own member gets a value that does not open, until an upgrade on the mended node names the secret.
func TestLaw13ANodeThatNothingCanBeSealedToDelaysNoSecret(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.publishWithSecret()
	w.sealingNode()
	commands := w.Commands()
	commands.Sealer = sealer(t)
	v, err := commands.CreateSecret(t.Context(), w.Meta("issue"), w.Project.ID, "hf", "correct-horse")
	require.NoError(t, err)
	in := w.InstanceInput()
	in.Version = "3.0.0"
	in.Parameters = map[string]any{"greeting": "hello", "token": map[string]any{"$secret": "hf"}}
	i, err := commands.CreateInstance(t.Context(), w.Meta("launch"), in)
	require.NoError(t, err)
	i = w.ready(i)
	sealedBytes := func() int {
		return w.Count(`SELECT octet_length(sealed) FROM runtime_secret_deliveries WHERE member_id = $1`, i.Members[0].ID)
	}

	w.Exec(`UPDATE nodes SET facts = '{}' WHERE id = $1`, w.Node)
	_, err = commands.RotateSecret(t.Context(), w.Meta("rotate"), w.Project.ID, v.ID, "battery-staple")
	require.NoError(t, err)
	require.Zero(t, sealedBytes(), "the old value is not kept")
	_, err = commands.RevokeSecret(t.Context(), w.Meta("revoke"), w.Project.ID, v.ID)
	require.NoError(t, err)
	require.Zero(t, sealedBytes())
	_, err = commands.CreateSecret(t.Context(), w.Meta("anew"), w.Project.ID, "hf", "third-horse")
	require.NoError(t, err)

	pair := w.sealingNode()
	i, err = commands.UpgradeInstance(t.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "3.0.0",
		Parameters: map[string]any{"greeting": "again", "token": map[string]any{"$secret": "hf"}},
	})
	require.NoError(t, err)
	got, _, _ := w.told(pair, i)
	require.Equal(t, map[string]string{"token": "third-horse"}, got)
}

func TestASecretHasANameThatAParameterCanReferTo(t *testing.T) {
	w := newWorld(t)
	s := w.Commands()
	s.Sealer = sealer(t)
	create := func(name string) error {
		return second(s.CreateSecret(t.Context(), w.Meta("secret "+name), w.Project.ID, name, "x"))
	}
	for _, name := range []string{"", ".hidden", "a b", "a/b", "ä", strings.Repeat("a", 65)} {
		w.requireRefused(create(name), fault.CodeInvalid, "/name")
	}
	for _, name := range []string{"_", "hf.token-2", strings.Repeat("a", 64)} {
		require.NoError(t, create(name), name)
	}
}

// Law 10: another org neither sees a secret nor refers to it.
func TestLaw10AnotherOrgsSecretAnswersAsIfAbsent(t *testing.T) {
	w := newWorld(t)
	commands := w.Commands()
	commands.Sealer = sealer(t)
	v, err := commands.CreateSecret(t.Context(), w.Meta("issue"), w.Project.ID, "hf", "correct-horse")
	require.NoError(t, err)
	own, outsider := w.NewTenant("other")
	m := w.Meta("k")
	m.Principal = outsider
	for _, project := range []string{w.Project.ID, own.ID} {
		foreign := second(commands.RotateSecret(t.Context(), m, project, v.ID, "x"))
		never := second(commands.RotateSecret(t.Context(), m, project, db.NewID(), "x"))
		require.True(t, fault.Is(foreign, fault.NotFound))
		require.Equal(t, fault.As(never).Public, fault.As(foreign).Public)
	}
}

func law08ChangesOfSecretsAreOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{
		{"issue secret", "runtime_secrets", func(w *world) func(commandtest.Around) error {
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Sealer = sealer(w.T)
				return second(s.CreateSecret(ctx, m, w.Project.ID, "hf", "x"))
			})
		}},
		{"rotate secret", "runtime_secrets", func(w *world) func(commandtest.Around) error {
			m, commands := w.Meta("k"), w.Commands()
			commands.Sealer = sealer(w.T)
			v, err := commands.CreateSecret(w.T.Context(), w.Meta("issue"), w.Project.ID, "hf", "x")
			require.NoError(w.T, err)
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Sealer = commands.Sealer
				return second(s.RotateSecret(ctx, m, w.Project.ID, v.ID, "y"))
			})
		}},
	})
}
