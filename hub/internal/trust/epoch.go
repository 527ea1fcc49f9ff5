package trust

import (
	"path/filepath"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// bundleLeap is added to the version at a new epoch. Nodes may hold newer bundles than the restored backup and accept
// only higher versions; nobody signs as many bundles between two backups.
const bundleLeap = 1000

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
	next, err := dated(bundle, o.Now, o.BundleTTL)
	if err != nil {
		return protocol.Bundle{}, err
	}
	next.Version = bundle.Version() + bundleLeap
	next.Epoch++
	for i, role := range next.GetRoles() {
		if role.GetName() != protocol.RoleState && role.GetName() != protocol.RoleLease {
			continue
		}
		for _, k := range bundle.Keys(role.GetName()) {
			next.RevokedKeyIds = append(next.RevokedKeyIds, k.GetKeyId())
		}
		fresh, err := newOnlineRole(dir, role.GetName(), next.GetTrustDomain(), hostNames{}, o.Now)
		if err != nil {
			return protocol.Bundle{}, err
		}
		next.Roles[i].Keys = append(next.Roles[i].Keys, fresh.GetKeys()...)
	}
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
