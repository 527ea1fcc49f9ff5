package sim

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

func keyOf(name string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte(name))
	return ed25519.NewKeyFromSeed(seed[:])
}

func publicKey(name string) *protocol.PublicKey {
	public, _ := keyOf(name).Public().(ed25519.PublicKey)
	return &protocol.PublicKey{KeyId: protocol.KeyID(public), Ed25519: public}
}

func newBundle() protocol.Bundle {
	role := func(name string) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{publicKey(name)}}
	}
	root, _ := keyOf(protocol.RoleRoot).Public().(ed25519.PublicKey)
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "sim.test", Version: 1, Epoch: 1, IssuedAt: timestamppb.New(genesis()),
		Roles: []*protocol.Role{
			role(protocol.RoleRoot), role(protocol.RoleState), role(protocol.RoleLease), role(protocol.RoleCatalog),
		},
	}, protocol.NewEd25519Signer(keyOf(protocol.RoleRoot)))
	if err != nil {
		panic(err)
	}
	b, err := protocol.VerifyBundle(env, protocol.Fingerprint(root))
	if err != nil {
		panic(err)
	}
	return b
}

// beginEpoch replaces the keys that sign states and leases. What they have signed may still be under way.
func (h *hub) beginEpoch() {
	signers, fresh := map[string]protocol.Signer{}, map[string][]*protocol.PublicKey{}
	for _, role := range plan.EpochRoles() {
		name := fmt.Sprintf("%s after restore %d", role, h.restores)
		signers[role] = protocol.NewEd25519Signer(keyOf(name))
		fresh[role] = []*protocol.PublicKey{publicKey(name)}
	}
	next := plan.NextEpoch(h.rows.bundle, fresh, h.w.now.time())
	if h.w.breaks(BreakEpoch) {
		next.Epoch, next.RevokedKeyIds = h.rows.bundle.Epoch(), nil
	}
	root := protocol.NewEd25519Signer(keyOf(protocol.RoleRoot))
	env, err := protocol.SignMessage(protocol.PayloadBundle, next, root)
	if err == nil {
		h.rows.bundle, err = h.rows.bundle.Succeed(env)
	}
	if err != nil {
		h.w.fail(2, "the epoch after %d: %v", h.rows.bundle.Epoch(), err)
	}
	h.signer, h.leaseSigner = signers[protocol.RoleState], signers[protocol.RoleLease]
}

// pushedBundle accepts a trust bundle, which comes before what it vouches for: a stream keeps its order.
func (u *uplink) pushedBundle(attempt int, env *protocol.Envelope) {
	n := u.n
	if env == nil || n.store.AcceptBundle(env) != nil {
		return // it is older than the node's
	}
	n.w.trace("bundle", n.i, int64(n.store.Bundle.Version()), "")
	if version := n.store.Bundle.Version(); attempt == u.attempt {
		u.carry(true, "bundle accepted", func() { n.w.peer.acceptedBundle(n.i, attempt, version) })
	}
}

func (u *uplink) pushedLeases(env *protocol.Envelope) {
	n := u.n
	v, err := protocol.VerifyLeases(env, n.store.Bundle, n.self)
	if err == nil {
		err = n.store.AcceptLeases(v.Message())
	}
	if err == nil {
		n.doubt.end(&n.doubt.leases, n.w.now)
		n.wake()
	}
}
