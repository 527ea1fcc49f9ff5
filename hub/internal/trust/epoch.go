package trust

import (
	"path/filepath"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// EpochOptions are the options of NewEpoch.
type EpochOptions struct {
	// TrustDir holds keys and bundles: trust/ of the data directory, or the directory that a restore renames to it.
	TrustDir string
	Root     RootKeys
	Now      time.Time
	// BundleTTL is how long the next bundle is current; 0 takes DefaultBundleTTL.
	BundleTTL time.Duration
}

// NewEpoch signs a bundle with the next epoch (docs/design/trust.md) and new keys for states and leases. Nodes then
// refuse documents of the old epoch that arrive late, and a hub that continues it. Accepted documents stay valid.
func NewEpoch(o EpochOptions) (protocol.Bundle, error) {
	dir := o.TrustDir
	bundle, err := Newest(dir)
	if err != nil {
		return protocol.Bundle{}, err
	}
	root, err := o.Root.open()
	if err != nil {
		return protocol.Bundle{}, err
	}
	defer wipe(root)
	expires, err := bundleEnd(o.Now, o.BundleTTL)
	if err != nil {
		return protocol.Bundle{}, err
	}
	fresh := map[string][]*protocol.PublicKey{}
	for _, name := range plan.EpochRoles() {
		role, err := newOnlineRole(dir, name, bundle.TrustDomain(), hostNames{}, o.Now)
		if err != nil {
			return protocol.Bundle{}, err
		}
		fresh[name] = role.GetKeys()
	}
	next := plan.NextEpoch(bundle, fresh, o.Now)
	next.IssuedAt, next.ExpiresAt = timestamppb.New(o.Now), expires
	succeeded, err := sign(bundle, next, root)
	if err != nil {
		return protocol.Bundle{}, err
	}
	return succeeded, keep(dir, "", succeeded)
}

// Newest returns the newest bundle of a trust directory.
func Newest(trustDir string) (protocol.Bundle, error) {
	fingerprint, err := readLine(filepath.Join(trustDir, rootFingerprintFile))
	if err != nil {
		return protocol.Bundle{}, unreadable(trustDir, err)
	}
	chain, err := bundleChain(trustDir, fingerprint)
	if err != nil {
		return protocol.Bundle{}, unreadable(trustDir, err)
	}
	return chain[len(chain)-1], nil
}
