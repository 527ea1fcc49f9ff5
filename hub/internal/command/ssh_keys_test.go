package command_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

func sshKeyOf(t *testing.T, user string) capacity.SSHKey {
	t.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	key, err := ssh.NewPublicKey(public)
	require.NoError(t, err)
	return capacity.SSHKey{User: user, PublicKey: strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))}
}

// newSSHWorld is a world with an allocation on a node that serves SSH keys.
func newSSHWorld(t *testing.T) (*world, capacity.Allocation) {
	t.Helper()
	w := newWorld(t)
	w.SetFeatures(append(manifest.KnownFeatures(), manifest.FeatureSSHKeys)...)
	return w, w.Allocation()
}

func (w *world) putSSHKeys(a capacity.Allocation, managedBy string,
	keys ...capacity.SSHKey,
) (capacity.SSHKeySet, error) {
	return w.Commands().PutSSHKeys(w.T.Context(), w.Meta(""), w.Project.ID, a.ID,
		capacity.SSHKeySet{ManagedBy: managedBy, Keys: keys})
}

// desired are the keys for the node's state, as "managed by/account/fingerprint".
func (w *world) desiredSSHKeys() (out []string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		keys, err := capacity.DesiredSSHKeys(ctx, tx, w.Node)
		for _, k := range keys {
			key, err := ssh.ParsePublicKey(k.GetPublicKey())
			require.NoError(w.T, err)
			out = append(out, k.GetManagedBy()+"/"+k.GetUser()+"/"+ssh.FingerprintSHA256(key))
		}
		return err
	})
	return out
}

// intentRev is the revision of the node's intent.
func (w *world) intentRev() (rev int64) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		rev, err = fleet.LockIntent(ctx, tx, w.Node)
		return err
	})
	return rev
}

func named(managedBy string, k capacity.SSHKey) string {
	return managedBy + "/" + k.User + "/" + k.Fingerprint()
}

// TestOperatorsAndAppsKeysAreSetsOfTheirOwn: each is replaced as a whole, leaves the other as it is, and reaches the
// node by its intent.
func TestOperatorsAndAppsKeysAreSetsOfTheirOwn(t *testing.T) {
	w, a := newSSHWorld(t)
	operator, next, app := sshKeyOf(t, "ubuntu"), sshKeyOf(t, "ubuntu"), sshKeyOf(t, "svc")
	before := w.intentRev()
	set, err := w.putSSHKeys(a, capacity.SSHKeysOfOperator, operator)
	require.NoError(t, err)
	require.EqualValues(t, 1, set.ResourceVersion)
	require.Equal(t, before+1, w.intentRev())
	_, err = w.putSSHKeys(a, capacity.SSHKeysOfApp, app)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{named("operator", operator), named("app", app)}, w.desiredSSHKeys())

	set, err = w.putSSHKeys(a, capacity.SSHKeysOfOperator, next)
	require.NoError(t, err)
	require.EqualValues(t, 2, set.ResourceVersion)
	require.ElementsMatch(t, []string{named("operator", next), named("app", app)}, w.desiredSSHKeys())
	_, err = w.putSSHKeys(a, capacity.SSHKeysOfOperator)
	require.NoError(t, err)
	require.Equal(t, []string{named("app", app)}, w.desiredSSHKeys())
	require.Equal(t, 4, w.Count(`SELECT count(*) FROM audit_rows WHERE resource_type = 'ssh_keys'`))
	require.Zero(t, w.Count(`SELECT count(*) FROM events WHERE data::TEXT LIKE $1`,
		"%"+strings.Fields(app.PublicKey)[1]+"%"))

	before = w.intentRev()
	require.NoError(t, second(w.Commands().ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, a.ID)))
	require.Empty(t, w.desiredSSHKeys(), "keys end with the allocation")
	require.Equal(t, before+1, w.intentRev())
	_, err = w.putSSHKeys(a, capacity.SSHKeysOfApp, app)
	require.True(t, fault.Is(err, fault.Conflict), err)
}

// Law 10: nobody of the former tenant logs in while what ran in the allocation is still being removed.
func TestLaw10SSHKeysEndWhenTheReleaseBegins(t *testing.T) {
	w, a := newSSHWorld(t)
	i := w.Instance()
	require.NoError(t, second(w.putSSHKeys(a, capacity.SSHKeysOfOperator, sshKeyOf(t, "ubuntu"))))
	require.NoError(t, second(w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)))
	before := w.intentRev()
	after, err := w.Commands().ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, a.ID)
	require.NoError(t, err)
	require.Equal(t, capacity.Releasing, after.Status)
	require.Empty(t, w.desiredSSHKeys())
	require.Equal(t, before+1, w.intentRev(), "the node is told")
}

// Law 13: a node refuses a state with more keys than one may have, and with it the workloads of all tenants. The keys
// of all sets of all allocations count, and one org never takes them all.
func TestLaw13TheSSHKeysOfANodeFitInItsState(t *testing.T) {
	w, a := newSSHWorld(t)
	b, one := w.Allocation(), sshKeyOf(t, "app")
	accounts := func(of string) (keys []capacity.SSHKey) {
		for n := range protocol.MaxSSHKeys / 2 {
			keys = append(keys, capacity.SSHKey{User: fmt.Sprint(of, n), PublicKey: one.PublicKey})
		}
		return keys
	}
	put := func(of, managedBy string, keys ...capacity.SSHKey) error {
		return db.WriteTx(t.Context(), w.DB, func(tx db.Tx) error {
			set := capacity.SSHKeySet{OrgSlug: of, ManagedBy: managedBy, Keys: keys}
			_, _, err := capacity.PutSSHKeys(t.Context(), tx, b, set, w.Now)
			return err
		})
	}
	full := accounts("user")
	for range 2 { // what a set replaces does not count
		require.NoError(t, second(w.putSSHKeys(a, capacity.SSHKeysOfOperator, full...)))
	}
	before := w.Contents()
	_, err := w.putSSHKeys(a, capacity.SSHKeysOfApp, one)
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
	require.Equal(t, before, w.Contents())
	require.NoError(t, put("other", capacity.SSHKeysOfOperator, accounts("other")...))
	requireCode(t, capacity.CodeInsufficient, put("third", capacity.SSHKeysOfApp, one))
	require.NoError(t, second(w.putSSHKeys(a, capacity.SSHKeysOfOperator, full[1:]...)))
	require.NoError(t, second(w.putSSHKeys(a, capacity.SSHKeysOfApp, one)))
	require.Len(t, w.desiredSSHKeys(), protocol.MaxSSHKeys)
}

func TestSSHKeysThatCannotBeServedAreRefused(t *testing.T) {
	w, a := newSSHWorld(t)
	good := sshKeyOf(t, "ubuntu")
	commented := good
	commented.PublicKey += " me@laptop"
	refused := func(code fault.Code, field string, keys ...capacity.SSHKey) {
		t.Helper()
		before := w.Contents()
		_, err := w.putSSHKeys(a, capacity.SSHKeysOfOperator, keys...)
		f := fault.As(err)
		require.Equal(t, code, f.Code, err)
		if field != "" {
			require.Equal(t, field, f.Fields[0].Pointer)
		}
		require.Equal(t, before, w.Contents())
	}
	options := good
	options.PublicKey = `from="10.0.0.1" ` + good.PublicKey
	refused("ssh_key_invalid", "/keys/1/public_key", sshKeyOf(t, "ubuntu"), options)
	refused("ssh_key_invalid", "/keys/1/public_key", good, commented)
	var many []capacity.SSHKey
	for n := range protocol.MaxSSHKeys + 1 {
		k := good
		k.User = fmt.Sprint("user", n)
		many = append(many, k)
	}
	refused(capacity.CodeInsufficient, "", many...)

	// An account of the node belongs to one project.
	_, err := w.putSSHKeys(a, capacity.SSHKeysOfApp, good)
	require.NoError(t, err)
	mine, me := w.Project, w.User
	w.Project, w.User = w.NewTenant("other")
	theirs := w.Allocation()
	before := w.Contents()
	_, err = w.putSSHKeys(theirs, capacity.SSHKeysOfOperator, sshKeyOf(t, "free"), sshKeyOf(t, "ubuntu"))
	require.EqualValues(t, "ssh_account_taken", fault.As(err).Code)
	require.Equal(t, "/keys/1/user", fault.As(err).Fields[0].Pointer)
	require.Equal(t, before, w.Contents())
	// Another org's allocation answers as one that does not exist.
	_, foreign := w.putSSHKeys(a, capacity.SSHKeysOfOperator, good)
	_, absent := w.putSSHKeys(capacity.Allocation{ID: db.NewID()}, capacity.SSHKeysOfOperator, good)
	require.True(t, fault.Is(foreign, fault.NotFound), foreign)
	require.Equal(t, absent.Error(), foreign.Error())
	w.Project, w.User = mine, me

	// An older agent: no key is set that nobody would serve, and those that are set can be taken away.
	w.SetFeatures(manifest.SchemaV1)
	refused("ssh_keys_unsupported", "", good)
	_, err = w.putSSHKeys(a, capacity.SSHKeysOfApp)
	require.NoError(t, err)
	require.Empty(t, w.desiredSSHKeys())
}

func TestEachSetOfSSHKeysHasAPermissionOfItsOwn(t *testing.T) {
	w, a := newSSHWorld(t)
	for role, may := range map[iam.Role][2]bool{
		iam.Viewer: {false, false}, iam.AppOperator: {false, true}, iam.ProjectAdmin: {true, true},
	} {
		m := w.Meta("")
		m.Principal.Bindings = []iam.Binding{{Role: role, ProjectID: w.Project.ID}}
		for n, managedBy := range []string{capacity.SSHKeysOfOperator, capacity.SSHKeysOfApp} {
			_, err := w.Commands().PutSSHKeys(t.Context(), m, w.Project.ID, a.ID, capacity.SSHKeySet{ManagedBy: managedBy})
			require.Equal(t, may[n], err == nil, "%s %s: %v", role, managedBy, err)
			require.True(t, may[n] || fault.Is(err, fault.Forbidden), err)
		}
	}
}

func law08ReplacingSSHKeysIsOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{{"put SSH keys", "ssh_key_sets", func(w *world) func(commandtest.Around) error {
		w.SetFeatures(append(manifest.KnownFeatures(), manifest.FeatureSSHKeys)...)
		a, m, key := w.Allocation(), w.Meta(""), sshKeyOf(w.T, "ubuntu")
		key.ExpiresAt = w.Now.Add(time.Hour)
		return w.command(func(ctx context.Context, s *command.Service) error {
			return second(s.PutSSHKeys(ctx, m, w.Project.ID, a.ID, capacity.SSHKeySet{
				ManagedBy: capacity.SSHKeysOfOperator, Keys: []capacity.SSHKey{key},
			}))
		})
	}}})
}

// The holder of a key of one project would be logged in to what the other does in the account.
func TestAnAccountOfANodeBelongsToOneProjectOfAnOrg(t *testing.T) {
	w, a := newSSHWorld(t)
	_, err := w.putSSHKeys(a, capacity.SSHKeysOfOperator, sshKeyOf(t, "ubuntu"))
	require.NoError(t, err)
	w.Project = w.secondProject()
	second := w.Allocation()
	_, err = w.putSSHKeys(second, capacity.SSHKeysOfOperator, sshKeyOf(t, "ubuntu"))
	require.EqualValues(t, "ssh_account_taken", fault.As(err).Code)
	_, err = w.putSSHKeys(second, capacity.SSHKeysOfOperator, sshKeyOf(t, "debian"))
	require.NoError(t, err)
}
