package plan_test

import (
	"crypto/ed25519"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

func signerOf(name byte) (protocol.Signer, *protocol.PublicKey) {
	private := ed25519.NewKeyFromSeed(append(make([]byte, ed25519.SeedSize-1), name))
	public, _ := private.Public().(ed25519.PublicKey)
	return protocol.NewEd25519Signer(private), &protocol.PublicKey{KeyId: protocol.KeyID(public), Ed25519: public}
}

// A node that has the bundle of the next epoch refuses by key and by epoch what the lost hub signed.
func TestLaw02ANewEpochVouchesOnlyForTheRestoredHub(t *testing.T) {
	root, rootKey := signerOf('r')
	lost, lostKey := signerOf('l')
	restored, restoredKey := signerOf('n')
	_, catalogKey := signerOf('c')
	role := func(name string, key *protocol.PublicKey) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{key}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "plan.test", Version: 7, Epoch: 3,
		Roles: []*protocol.Role{
			role(protocol.RoleRoot, rootKey), role(protocol.RoleState, lostKey), role(protocol.RoleLease, lostKey),
			role(protocol.RoleCatalog, catalogKey),
		},
	}, root)
	require.NoError(t, err)
	before, err := protocol.VerifyBundle(env, protocol.Fingerprint(rootKey.GetEd25519()))
	require.NoError(t, err)

	fresh := map[string][]*protocol.PublicKey{}
	for _, name := range plan.EpochRoles() {
		fresh[name] = []*protocol.PublicKey{restoredKey}
	}
	env, err = protocol.SignMessage(protocol.PayloadBundle, plan.NextEpoch(before, fresh, time.Unix(2, 0)), root)
	require.NoError(t, err)
	after, err := before.Succeed(env)
	require.NoError(t, err)
	require.Equal(t, uint64(4), after.Epoch())
	require.Greater(t, after.Version(), before.Version()+100, "nodes may have newer bundles than the backup")
	require.True(t, after.Revoked(lostKey.GetKeyId()))
	require.False(t, after.Revoked(catalogKey.GetKeyId()), "what publishers sign has no order")

	me := protocol.NewNodeIdentity("n1", rootKey.GetEd25519())
	for _, c := range []struct {
		name   string
		signer protocol.Signer
		epoch  uint64
		bundle protocol.Bundle
		taken  bool
	}{
		{"of the lost hub, before", lost, 3, before, true},
		{"of the lost hub", lost, 3, after, false},
		{"of a lost hub that knows the epoch", lost, 4, after, false},
		{"of the old epoch", restored, 3, after, false},
		{"of the restored hub", restored, 4, after, true},
	} {
		state, err := protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
			NodeId: me.ID, NodeKeySha256: me.KeySHA256[:], Epoch: c.epoch, Generation: 9,
		}, c.signer)
		require.NoError(t, err)
		_, err = protocol.VerifyState(state, c.bundle, me)
		require.Equal(t, c.taken, err == nil, "%s: %v", c.name, err)
		leases, err := protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{
			NodeId: me.ID, Epoch: c.epoch,
		}, c.signer)
		require.NoError(t, err)
		_, err = protocol.VerifyLeases(leases, c.bundle, me)
		require.Equal(t, c.taken, err == nil, "leases %s: %v", c.name, err)
	}
}

// Nodes that met a hub restored from a backup follow one that is restored from the same backup later.
func TestASecondRestoreOfABackupBeginsALaterEpoch(t *testing.T) {
	root, rootKey := signerOf('r')
	_, lost := signerOf('l')
	_, key := signerOf('n')
	roles := []*protocol.Role{{Name: protocol.RoleRoot, Threshold: 1, Keys: []*protocol.PublicKey{rootKey}}}
	fresh := map[string][]*protocol.PublicKey{}
	for _, name := range plan.EpochRoles() {
		roles = append(roles, &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{lost}})
		fresh[name] = []*protocol.PublicKey{key}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "plan.test", Version: 7, Epoch: 3, Roles: roles,
	}, root)
	require.NoError(t, err)
	backup, err := protocol.VerifyBundle(env, protocol.Fingerprint(rootKey.GetEd25519()))
	require.NoError(t, err)
	restore := func(at time.Time) *protocol.Envelope {
		env, err := protocol.SignMessage(protocol.PayloadBundle, plan.NextEpoch(backup, fresh, at), root)
		require.NoError(t, err)
		return env
	}
	at := time.Date(2026, 11, 28, 0, 0, 0, 0, time.UTC)
	first, err := backup.Succeed(restore(at))
	require.NoError(t, err)
	second, err := first.Succeed(restore(at.Add(time.Minute)))
	require.NoError(t, err)
	require.Equal(t, uint64(at.Unix()), first.Epoch())
	require.Greater(t, second.Epoch(), first.Epoch())
}
