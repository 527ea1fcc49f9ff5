package command_test

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// account is what an app reads of its service account.
type account struct {
	HubURL           string `json:"hub_url"`
	ProjectID        string `json:"project_id"`
	AppInstanceID    string `json:"app_instance_id"`
	ServiceAccountID string `json:"service_account_id"`
	KeyID            string `json:"key_id"`
	PrivateKeyPEM    string `json:"private_key_pem"`
	NodeID           string `json:"node_id"`
	NodePublicKeyPEM string `json:"node_public_key_pem"`
}

// publishWithIdentity publishes version 4.0.0 of the demo, whose instances get service accounts.
func (w *world) publishWithIdentity() {
	w.T.Helper()
	doc := strings.NewReplacer("version: 1.0.0", "version: 4.0.0", "  metering:",
		"  instance_identity: service_account\n  secrets: {on_change: none}\n  metering:").Replace(commandtest.Manifest())
	verified, env := w.Sign(doc)
	w.PublishVersion("4.0.0", verified, env)
}

func (w *world) launchWithIdentity(commands *command.Service) (instance.Instance, error) {
	in := w.InstanceInput()
	in.Version = "4.0.0"
	return commands.CreateInstance(w.T.Context(), w.Meta("launch "+db.NewID()), in)
}

// identified is a world whose node runs an instance with a service account.
func identified(t *testing.T) (w *world, pair protocol.SealingKeyPair, i instance.Instance) {
	t.Helper()
	w = newWorld(t)
	w.Allocation()
	w.publishWithIdentity()
	pair = w.sealingNode()
	i, err := w.launchWithIdentity(w.Commands())
	require.NoError(t, err)
	return w, pair, i
}

// account is the service account as the node delivers it, and the intent of the node.
func (w *world) account(pair protocol.SealingKeyPair, i instance.Instance) (a account, rev int64) {
	w.T.Helper()
	files, _, rev := w.told(pair, i)
	require.NoError(w.T, json.Unmarshal([]byte(files[protocol.InstanceIdentityParameter]), &a))
	w.RequireHidden(a.PrivateKeyPEM, strings.Split(a.PrivateKeyPEM, "\n")[1])
	return a, rev
}

// mint exchanges an assertion that the account's key signs for a token, and returns whom that is of.
func (w *world) mint(a account) (p iam.Principal, err error) {
	w.T.Helper()
	block, _ := pem.Decode([]byte(a.PrivateKeyPEM))
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(w.T, err)
	claims := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.RegisteredClaims{
		Issuer: a.ServiceAccountID, Subject: a.ServiceAccountID, Audience: jwt.ClaimStrings{iam.Audience}, ID: db.NewID(),
		IssuedAt: jwt.NewNumericDate(w.Now), ExpiresAt: jwt.NewNumericDate(w.Now.Add(time.Minute)),
	})
	claims.Header["kid"] = a.KeyID
	assertion, err := claims.SignedString(key)
	require.NoError(w.T, err)
	seal := sealer(w.T)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return iam.EnsureSigningKey(ctx, tx, seal, db.NewID(), w.Now)
	})
	err = db.WriteTx(w.T.Context(), w.DB, func(tx db.Tx) error {
		token, err := iam.Mint(w.T.Context(), tx, iam.Proof{Assertion: assertion}, seal, db.NewID(), time.Minute, w.Now)
		if err == nil {
			p, err = iam.Authenticate(w.T.Context(), tx, nil, nil, token.Text, w.Now)
		}
		return err
	})
	return p, err
}

func (w *world) renewIdentities() {
	w.T.Helper()
	hub := change.Hub{URL: "https://hub.test", CA: []byte("ca")}
	require.NoError(w.T, w.passes().RenewIdentities(w.T.Context(), hub, w.Now))
}

// seen sets the last contact with the node to now.
func (w *world) seen() {
	w.Exec(`UPDATE node_sessions SET seen_at = $2 WHERE node_id = $1`, w.Node, w.Now)
}

// Law 11: the key of an app instance is in no row but sealed to the node that runs it; with it the app is its own
// instance, from the launch to the end of the instance, and its key changes each day.
func TestLaw11AnAppInstanceHasAServiceAccountOfItsOwn(t *testing.T) {
	w, pair, i := identified(t)
	first, rev := w.account(pair, i)
	require.Equal(t, []string{"https://hub.test", w.Project.ID, i.ID, w.Node},
		[]string{first.HubURL, first.ProjectID, first.AppInstanceID, first.NodeID})
	block, _ := pem.Decode([]byte(first.NodePublicKeyPEM))
	public, err := x509.ParsePKIXPublicKey(block.Bytes)
	require.NoError(t, err)
	var node fleet.Node
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		node, err = fleet.Get(ctx, tx, w.Node)
		return err
	})
	require.Equal(t, node.PublicKey, public.(ed25519.PublicKey))
	p, err := w.mint(first)
	require.NoError(t, err)
	require.Equal(t, []string{first.ServiceAccountID, w.Project.OrgID, w.Project.ID, i.ID},
		[]string{p.ID, p.OrgID, p.ProjectID, p.AppInstanceID})

	i = w.ready(i)
	w.renewIdentities()
	again, same := w.account(pair, i)
	require.Equal(t, first, again, "not due")
	require.Equal(t, rev, same)
	w.Now = w.Now.Add(24 * time.Hour)
	w.renewIdentities()
	again, _ = w.account(pair, i)
	require.Equal(t, first, again, "a node that is away keeps the key that it has")
	w.Now = w.Now.Add(time.Hour)
	w.seen()
	w.renewIdentities()
	second, told := w.account(pair, i)
	require.NotEqual(t, first.KeyID, second.KeyID)
	require.Equal(t, first.ServiceAccountID, second.ServiceAccountID)
	require.Greater(t, told, rev, "the node is told")
	for _, a := range []account{first, second} {
		_, err := w.mint(a)
		require.NoError(t, err, "both count until the app has read the new one")
	}
	w.Now = w.Now.Add(25 * time.Hour)
	_, err = w.mint(first)
	require.True(t, fault.Is(err, fault.Unauthenticated))
	w.seen()
	w.renewIdentities()
	require.Equal(t, 2, w.Count(`SELECT count(*) FROM service_account_keys`), "dead keys are deleted")
	third, _ := w.account(pair, i)

	w.decommissioned(i)
	_, err = w.mint(third)
	require.NoError(t, err, "the app may have something to finish")
	w.Report(uint64(i.Revision)+1, w.Removed(i))
	_, err = w.mint(third)
	require.True(t, fault.Is(err, fault.Unauthenticated))
	for _, table := range []string{"service_account_keys", "instance_identities"} {
		require.Zero(t, w.Count(`SELECT count(*) FROM `+table), table)
	}
	require.Equal(t, []string{
		"iam.service_account.created", "iam.service_account.key_rotated", "iam.service_account.key_rotated",
		"iam.service_account.deleted",
	}, w.EventTypes(third.ServiceAccountID))
}

// The account belongs to the instance, not to a revision, and nobody handles it by hand.
func TestTheAccountOfAnAppInstanceIsNoneOfTheProjectsOwn(t *testing.T) {
	w, pair, i := identified(t)
	before, _ := w.account(pair, i)
	i = w.ready(i)
	i, err := w.upgrade(i, command.UpgradeInstanceInput{Version: "4.0.0", Parameters: map[string]any{"greeting": "again"}})
	require.NoError(t, err)
	after, _ := w.account(pair, i)
	require.Equal(t, before, after, "an upgrade keeps it")
	i = w.ready(i)
	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "1.0.0", Parameters: map[string]any{}})
	require.NoError(t, err)
	require.JSONEq(t, `{}`, i.ParametersJSON, "a version without does not get it")
	i = w.ready(i)
	i, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.NoError(t, err)
	after, _ = w.account(pair, i)
	require.Equal(t, before, after, "a rollback gives it back")

	i = w.ready(i)
	for value, code := range map[any]fault.Code{"mine": manifest.CodeParametersInvalid, "hf": "secret_unknown"} {
		in := command.UpgradeInstanceInput{Version: "4.0.0", Parameters: map[string]any{}}
		in.Parameters[protocol.InstanceIdentityParameter] = value
		if value == "hf" {
			in.Parameters[protocol.InstanceIdentityParameter] = map[string]any{protocol.SecretReferenceKey: value}
		}
		_, err = w.upgrade(i, in)
		require.Equal(t, code, fault.As(err).Code)
	}

	require.Zero(t, w.used(iam.QuotaServiceAccounts))
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		own, err := iam.ListServiceAccounts(ctx, tx, w.Project.ID, w.Now, db.Page{Limit: 10})
		require.Empty(t, own)
		return err
	})
	commands := w.Commands()
	commands.Sealer = sealer(t)
	id := before.ServiceAccountID
	_, err = commands.RotateServiceAccountKey(t.Context(), w.Meta("rotate"), w.Project.ID, id, 0)
	require.True(t, fault.Is(err, fault.NotFound))
	_, err = commands.DisableServiceAccount(t.Context(), w.Meta("disable"), w.Project.ID, id)
	require.True(t, fault.Is(err, fault.NotFound))
	require.True(t, fault.Is(commands.DeleteServiceAccount(t.Context(), w.Meta("delete"), w.Project.ID, id),
		fault.NotFound))
	_, err = w.mint(before)
	require.NoError(t, err)
}

// An agent that does not know the feature gets no such instance, and neither does a node without a sealing key.
func TestANodeThatCannotHaveAnIdentityGetsNoSuchInstance(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.publishWithIdentity()
	before := w.Contents()
	_, err := w.launchWithIdentity(w.Commands())
	require.EqualValues(t, "feature_missing", fault.As(err).Code)
	w.sealingNode()
	w.SetFeatures(manifest.SchemaV1, manifest.FeatureSecretDelivery)
	_, err = w.launchWithIdentity(w.Commands())
	require.EqualValues(t, "feature_missing", fault.As(err).Code)
	require.Equal(t, before["service_accounts"], w.Contents()["service_accounts"])
}

// Who has the key of a node that is banned can open what was sealed to it.
func TestABanEndsTheAccountsOfTheNodesInstances(t *testing.T) {
	w, pair, i := identified(t)
	a, _ := w.account(pair, i)
	require.NoError(t, w.Commands().BanNode(t.Context(), w.Admin("ban"), w.Node, "stolen"))
	_, err := w.mint(a)
	require.True(t, fault.Is(err, fault.Unauthenticated))
	w.Now = w.Now.Add(25 * time.Hour)
	w.renewIdentities()
	require.Zero(t, w.Count(`SELECT count(*) FROM service_account_keys`), "a banned node gets no other")
}

// withIdentity is a running instance with a service account.
func (w *world) withIdentity() instance.Instance {
	w.Allocation()
	w.publishWithIdentity()
	w.sealingNode()
	i, err := w.launchWithIdentity(w.Commands())
	require.NoError(w.T, err)
	return w.ready(i)
}

// dueIdentity is one that is due, on a node that can be told.
func (w *world) dueIdentity() secret.Identity {
	w.withIdentity()
	w.Now = w.Now.Add(25 * time.Hour)
	w.seen()
	var due []secret.Identity
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		due, err = secret.DueIdentities(ctx, tx, "", w.Now, 1)
		return err
	})
	return due[0]
}

// Law 8: a crash between any two statements leaves no account without its instance, and no key without its delivery.
func law08AnIdentityIsIssuedRenewedAndEndedInOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{
		{"issue", "instance_identities", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			w.publishWithIdentity()
			w.sealingNode()
			m, in := w.Meta("k"), w.InstanceInput()
			in.Version = "4.0.0"
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.CreateInstance(ctx, m, in))
			})
		}},
		{"renew", "service_account_keys", func(w *world) func(commandtest.Around) error {
			due := w.dueIdentity()
			return w.InTx(func(ctx context.Context, tx db.Tx) error {
				return change.RenewIdentity(ctx, tx, change.BySystem(db.NewID(), w.Now), change.Hub{}, due)
			})
		}},
		{"end", "service_account_keys", func(w *world) func(commandtest.Around) error {
			i := w.withIdentity()
			w.decommissioned(i)
			r := w.NodeReport(uint64(i.Revision)+1, w.Removed(i))
			r.Counter = 9
			return w.report(r)
		}},
	})
}
