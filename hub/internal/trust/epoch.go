package trust

import (
	"path/filepath"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// bundleLeap is more bundles than anyone signs between two backups: nodes may hold newer ones than the backup has, and
// accept only higher versions.
const bundleLeap = 1000

// EpochOptions says whose epoch ends.
type EpochOptions struct {
	// TrustDir holds keys and bundles: trust/ of the data directory, or what is to become that.
	TrustDir string
	Root     RootKeys
	Now      time.Time
	// BundleTTL is how long the next bundle is current; 0 takes DefaultBundleTTL.
	BundleTTL time.Duration
}

// NewEpoch signs the bundle that begins a new order of states and leases (docs/design/trust.md), and makes new keys for
// both. Nodes refuse what was signed before and reaches them later, and a hub that goes on from before. Accepted
// documents stay valid.
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

// Newest is the newest bundle of a trust directory.
func Newest(trustDir string) (protocol.Bundle, error) {
	fingerprint, err := readLine(filepath.Join(trustDir, rootFingerprintFile))
	if err != nil {
		return protocol.Bundle{}, unreadable(trustDir, err)
	}
	line, err := bundleLine(trustDir, fingerprint)
	if err != nil {
		return protocol.Bundle{}, unreadable(trustDir, err)
	}
	return line[len(line)-1], nil
}
