package agent_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

func sshKey(t *testing.T) ssh.PublicKey {
	t.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	key, err := ssh.NewPublicKey(public)
	require.NoError(t, err)
	return key
}

// TestLaw15OnlyAccountsThatTheOwnerAllowsHaveKeys also shows that a key ends by itself, and that an account that two
// projects have keys of lets nobody in.
func TestLaw15OnlyAccountsThatTheOwnerAllowsHaveKeys(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	mine := sshKey(t)
	line := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(mine)))
	good := func() *protocol.SSHKey {
		return &protocol.SSHKey{
			AllocationId: "a1", ProjectId: "p1", OrgSlug: "acme", ManagedBy: "operator", User: "ubuntu",
			PublicKey: mine.Marshal(),
		}
	}
	const allows = "ssh_users: [ubuntu]\n"
	for name, c := range map[string]struct {
		policy string
		change func(k *protocol.SSHKey)
		others []*protocol.SSHKey
		want   []string
	}{
		"allowed":                   {policy: allows, want: []string{line}},
		"no account is listed":      {want: []string{}},
		"another account is listed": {policy: "ssh_users: [root]\n", want: []string{}},
		"the machine is closed":     {policy: allows + "closed: true\n", want: []string{}},
		"the org is not welcome":    {policy: allows + "orgs: {never: [acme]}\n", want: []string{}},
		"another org is":            {policy: allows + "orgs: {only: [globex]}\n", want: []string{}},
		"a key of another account": {
			policy: allows, change: func(k *protocol.SSHKey) { k.User = "root" },
			want: []string{},
		},
		"bytes that are no key": {
			policy: allows, change: func(k *protocol.SSHKey) { k.PublicKey = []byte("x") },
			want: []string{},
		},
		"a key that ends later": {policy: allows, change: expires(now.Add(time.Second)), want: []string{line}},
		"a key that has ended":  {policy: allows, change: expires(now), want: []string{}},
		"the app's key of the project": {
			policy: allows, change: func(k *protocol.SSHKey) { k.ManagedBy = "app" },
			want: []string{line},
		},
		"a key of another project": {policy: allows, others: []*protocol.SSHKey{{
			AllocationId: "a2", ProjectId: "p2", OrgSlug: "acme", ManagedBy: "app", User: "ubuntu",
			PublicKey: sshKey(t).Marshal(),
		}}, want: []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			rules, err := policy.Parse([]byte(c.policy))
			require.NoError(t, err)
			k := good()
			if c.change != nil {
				c.change(k)
			}
			state := signedState(t, append([]*protocol.SSHKey{k}, c.others...))
			require.Equal(t, c.want, agent.AuthorizedKeys(state, rules, "ubuntu", now))
		})
	}
	require.Empty(t, agent.AuthorizedKeys(protocol.Verified[*protocol.DesiredState]{}, policy.Policy{}, "ubuntu", now))
}

func expires(at time.Time) func(*protocol.SSHKey) {
	return func(k *protocol.SSHKey) { k.ExpiresAt = timestamppb.New(at) }
}

// signedState is a state that a node has verified.
func signedState(t *testing.T, keys []*protocol.SSHKey) protocol.Verified[*protocol.DesiredState] {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	signer := protocol.NewEd25519Signer(private)
	role := func(name string) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId: protocol.KeyID(public), Ed25519: public,
		}}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "mesh.example", Version: 1, Epoch: 1, IssuedAt: timestamppb.Now(),
		Roles: []*protocol.Role{role("root"), role("state")},
	}, signer)
	require.NoError(t, err)
	bundle, err := protocol.VerifyBundle(env, protocol.Fingerprint(public))
	require.NoError(t, err)
	me := protocol.NewNodeIdentity("node-1", public)
	env, err = protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
		NodeId: me.ID, NodeKeySha256: me.KeySHA256[:], Epoch: 1, Generation: 1, SshKeys: keys,
	}, signer)
	require.NoError(t, err)
	state, err := protocol.VerifyState(env, bundle, me)
	require.NoError(t, err)
	return state
}
