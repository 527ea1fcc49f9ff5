package trust

import (
	"path/filepath"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// bundleLeap is more bundles than anyone signs between two backups: nodes may hold newer ones than the backup has, and accept only
// higher versions.
const bundleLeap = 1000

// EpochOptions says whose epoch ends.
type EpochOptions struct {
	// TrustDir holds keys and bundles: trust/ of the data directory, or what is to become that.
	TrustDir    string
	RootKeyFile string
	Passphrase  string
	Now         time.Time
}

// NewEpoch signs the bundle with which a new order of states and leases begins (DESIGN §7.7), and makes new keys for both. What was
// signed before and reaches a node later is refused there; so is a hub that goes on from before. Accepted documents stay valid.
func NewEpoch(o EpochOptions) (protocol.Bundle, error) {
	dir := o.TrustDir
	bundle, err := Newest(dir)
	if err != nil {
		return protocol.Bundle{}, err
	}
	root, err := readOffline(o.RootKeyFile, protocol.RoleRoot, o.Passphrase)
	if err != nil {
		return protocol.Bundle{}, err
	}
	defer clear(root)
	next := bundle.Message()
	next.Version += bundleLeap
	next.Epoch++
	next.IssuedAt = timestamppb.New(o.Now)
	for i, role := range next.GetRoles() {
		if role.GetName() != protocol.RoleState && role.GetName() != protocol.RoleLease {
			continue
		}
		for _, k := range bundle.Keys(role.GetName()) {
			next.RevokedKeyIds = append(next.RevokedKeyIds, k.GetKeyId())
		}
		fresh, err := newOnlineRole(dir, role.GetName(), next.GetTrustDomain(), o.Now)
		if err != nil {
			return protocol.Bundle{}, err
		}
		next.Roles[i].Keys = append(next.Roles[i].Keys, fresh.GetKeys()...)
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, next, protocol.NewEd25519Signer(root))
	if err != nil {
		return protocol.Bundle{}, err
	}
	succeeded, err := bundle.Succeed(env)
	if err != nil {
		return protocol.Bundle{}, fault.New(fault.Malformed, "root_key_wrong", "The root key in "+o.RootKeyFile+" is not the one of this hub's trust bundle.", err)
	}
	if err := writeBundle(dir, env, next.GetVersion()); err != nil {
		return protocol.Bundle{}, fault.New(fault.Internal, "bundle_not_written", "The new trust bundle could not be written to "+dir+".", err)
	}
	return succeeded, nil
}

// Newest is the newest bundle of a trust directory.
func Newest(trustDir string) (protocol.Bundle, error) {
	fingerprint, err := readLine(filepath.Join(trustDir, rootFingerprintFile))
	if err != nil {
		return protocol.Bundle{}, unreadable(trustDir, err)
	}
	bundle, err := newestBundle(trustDir, fingerprint)
	if err != nil {
		return protocol.Bundle{}, unreadable(trustDir, err)
	}
	return bundle, nil
}

// CheckRoot finds out, before anything is changed, whether the passphrase opens the root key.
func CheckRoot(rootKeyFile, passphrase string) error {
	root, err := readOffline(rootKeyFile, protocol.RoleRoot, passphrase)
	clear(root)
	return err
}
