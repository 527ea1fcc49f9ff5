package trust

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// DefaultBundleTTL is how long a trust bundle is current: a year until it is signed again, and a month to spare.
	DefaultBundleTTL = 400 * 24 * time.Hour
	// MinBundleTTL is the shortest lifetime: a shorter one ends before the hub warns.
	MinBundleTTL = 24 * time.Hour
	// bundleWarning is how long before its end the hub warns of it.
	bundleWarning = 60 * 24 * time.Hour
	// maxSlugBytes and maxVersionBytes are the limits of manifests.
	maxSlugBytes, maxVersionBytes = 63, 64
	// maxRootKeys leaves room for the signatures of the old and the new root role in one envelope
	// (protocol.MaxSignatures).
	maxRootKeys = protocol.MaxSignatures / 2
)

// appSlugForm and appVersionForm are the forms that manifests have (pkg/manifest).
var (
	appSlugForm    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
	appVersionForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._+-]*[A-Za-z0-9])?$`)
)

// RootKeys are the encrypted root keys that sign the next bundle: as many as the threshold of the root role.
type RootKeys struct {
	Files []string
	// Passphrases holds one for all files, or one for each.
	Passphrases []string
}

// RootKey is the only key of a 1-of-1 root.
func RootKey(file, passphrase string) RootKeys {
	return RootKeys{Files: []string{file}, Passphrases: []string{passphrase}}
}

func (r RootKeys) open() (keys []ed25519.PrivateKey, err error) {
	if len(r.Files) == 0 || (len(r.Passphrases) != 1 && len(r.Passphrases) != len(r.Files)) {
		return nil, fault.New(fault.Malformed, codePassphrasesMismatched, "Give one passphrase for all root keys, or one "+
			"for each.", nil)
	}
	for i, file := range r.Files {
		key, err := readOffline(file, protocol.RoleRoot, r.Passphrases[min(i, len(r.Passphrases)-1)])
		if err != nil {
			wipe(keys)
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func wipe(keys []ed25519.PrivateKey) {
	for _, k := range keys {
		clear(k)
	}
}

// CheckRoot returns an error where the passphrases do not open the root keys.
func CheckRoot(root RootKeys) error {
	keys, err := root.open()
	wipe(keys)
	return err
}

// CheckEpoch refuses root keys that cannot sign the next epoch of a backup, because the root was replaced in between.
// It reads no more of the trust directory than the bundles.
func CheckEpoch(o EpochOptions) error {
	bundle, err := Newest(o.TrustDir)
	if err != nil {
		return err
	}
	root, err := o.Root.open()
	if err != nil {
		return err
	}
	defer wipe(root)
	next, err := dated(bundle, o.Now, o.BundleTTL)
	if err != nil {
		return err
	}
	if _, err := sign(bundle, next, root); err != nil {
		return fault.New(fault.Malformed, codeRootKeyWrong, "Nothing was changed: the root keys that were given cannot sign "+
			"for the trust bundle of the backup, whose root is "+bundle.Pin()+". After a change of the root, take a backup "+
			"that was made since, or give the root key from the time of the backup.", err)
	}
	return nil
}

// dated returns the successor of a bundle, with its number and its lifetime.
func dated(bundle protocol.Bundle, now time.Time, ttl time.Duration) (*protocol.TrustBundle, error) {
	expires, err := bundleEnd(now, ttl)
	if err != nil {
		return nil, err
	}
	next := bundle.Message()
	next.Version++
	next.IssuedAt, next.ExpiresAt = timestamppb.New(now), expires
	return next, nil
}

// bundleEnd returns when a bundle of this lifetime ends; 0 takes the default.
func bundleEnd(now time.Time, ttl time.Duration) (*timestamppb.Timestamp, error) {
	if ttl == 0 {
		ttl = DefaultBundleTTL
	}
	if ttl < MinBundleTTL {
		return nil, fault.New(fault.Malformed, codeBundleLifetimeInvalid,
			fmt.Sprintf("A trust bundle lasts for %s or longer.", MinBundleTTL), nil)
	}
	return timestamppb.New(now.Add(ttl)), nil
}

// sign signs the next bundle and verifies it: a bundle that nodes refuse must not reach the disk.
func sign(bundle protocol.Bundle, next *protocol.TrustBundle, keys []ed25519.PrivateKey) (protocol.Bundle, error) {
	signers := make([]protocol.Signer, 0, len(keys))
	for _, k := range keys {
		signers = append(signers, protocol.NewEd25519Signer(k))
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, next, signers...)
	if err != nil {
		return protocol.Bundle{}, err
	}
	succeeded, err := bundle.Succeed(env)
	if err != nil {
		return protocol.Bundle{}, fault.New(fault.Malformed, codeRootKeyWrong, fmt.Sprintf(
			"The root keys that were given may not sign for this hub's trust bundle: it takes %d of those that `gpuaas-hub "+
				"trust show` lists.", bundle.RootThreshold()), err)
	}
	return succeeded, nil
}

// keep writes a signed bundle, and the certificate file of REST clients where dataDir is given.
func keep(dir, dataDir string, bundle protocol.Bundle) error {
	if err := writeBundle(dir, bundle.Envelope(), bundle.Version()); err != nil {
		return fault.New(fault.Internal, codeBundleNotWritten, "The new trust bundle could not be written to "+dir+".", err)
	}
	if dataDir == "" {
		return nil
	}
	if err := writeCA(dataDir, bundle.Message()); err != nil {
		return fault.New(fault.Internal, codeCANotWritten, "The file "+CAFile+" could not be replaced in "+dataDir+".", err)
	}
	return nil
}

// NewRootKey says where a root key that is made goes, and which passphrase guards it.
type NewRootKey struct{ File, Passphrase string }

// NextBundle says what the next trust bundle changes; without any change it has only a new end.
type NextBundle struct {
	DataDir string
	// Root are as many of the present root keys as the threshold asks for.
	Root RootKeys
	Now  time.Time
	// BundleTTL is how long the bundle is current; 0 takes DefaultBundleTTL.
	BundleTTL time.Duration
	// Add are the keys that are made. Their files must not exist yet, nor lie inside DataDir.
	Add []NewRootKey
	// Retire is the id of the key that leaves the role and is revoked; empty for none.
	Retire string
	// Threshold of the new role; 0 keeps the present one.
	Threshold        int
	ScryptWorkFactor int
	// MinVersion replaces the lowest version of an app, empty for any; nil changes none. Nodes start nothing older,
	// whatever the hub's online keys sign; what runs goes on.
	MinVersion *protocol.MinVersion
}

// SignNext signs the next trust bundle. The present root and the new one sign it, so that nodes that trust the present
// root accept the new one. A running hub reads it by itself.
func SignNext(o NextBundle) (protocol.Bundle, error) {
	dir := filepath.Join(o.DataDir, trustDirName)
	bundle, err := Newest(dir)
	if err != nil {
		return protocol.Bundle{}, err
	}
	for _, k := range o.Add {
		if err := o.checkNew(k); err != nil {
			return protocol.Bundle{}, err
		}
	}
	keys, err := o.Root.open()
	if err != nil {
		return protocol.Bundle{}, err
	}
	defer func() { wipe(keys) }()
	present := len(keys)
	for range o.Add {
		keys = append(keys, newKey())
	}
	next, err := dated(bundle, o.Now, o.BundleTTL)
	if err != nil {
		return protocol.Bundle{}, err
	}
	if err := o.change(next, keys[present:]); err != nil {
		return protocol.Bundle{}, err
	}
	succeeded, err := sign(bundle, next, keys)
	if err != nil {
		return protocol.Bundle{}, err
	}
	// The keys come before the bundle that needs them: the other way round, a full disk would leave a root without a key.
	for i, k := range o.Add {
		if err := writeOffline(k.File, protocol.RoleRoot, keys[present+i], k.Passphrase, o.ScryptWorkFactor); err != nil {
			return protocol.Bundle{}, fault.New(fault.Internal, codeRootKeyNotWritten, "The new root key could not be "+
				"written to "+k.File+".", err)
		}
	}
	return succeeded, keep(dir, o.DataDir, succeeded)
}

func (o NextBundle) checkNew(k NewRootKey) error {
	if err := CheckPassphrase(k.Passphrase); err != nil {
		return err
	}
	if in, err := inside(k.File, o.DataDir); err != nil || in {
		return fault.New(fault.Malformed, codeOfflineDirInside, "A root key must not be inside the data directory.", err)
	}
	if _, err := os.Lstat(k.File); !errors.Is(err, os.ErrNotExist) {
		return fault.New(fault.Conflict, codeKeyFileExists, k.File+" exists already: name a new file for the new root key.",
			err)
	}
	return nil
}

// change edits the root role and the lowest versions of the next bundle.
func (o NextBundle) change(next *protocol.TrustBundle, added []ed25519.PrivateKey) error {
	at := slices.IndexFunc(next.GetRoles(), func(r *protocol.Role) bool { return r.GetName() == protocol.RoleRoot })
	role := next.GetRoles()[at]
	if o.Retire != "" {
		is := func(k *protocol.PublicKey) bool { return k.GetKeyId() == o.Retire }
		if !slices.ContainsFunc(role.GetKeys(), is) {
			return fault.New(fault.Malformed, codeKeyIDInvalid, "The key to retire is no root key; `gpuaas-hub trust show` "+
				"lists them.", nil)
		}
		role.Keys = slices.DeleteFunc(role.GetKeys(), is)
		next.RevokedKeyIds = append(next.RevokedKeyIds, o.Retire)
	}
	for _, key := range added {
		role.Keys = append(role.Keys, edRole(protocol.RoleRoot, key).GetKeys()...)
	}
	if o.Threshold != 0 {
		role.Threshold = uint32(min(max(o.Threshold, 0), maxRootKeys+1))
	}
	if len(role.GetKeys()) > maxRootKeys || int(role.GetThreshold()) > len(role.GetKeys()) {
		return fault.New(fault.Malformed, codeRootRoleInvalid, fmt.Sprintf(
			"A root of %d keys of which %d must sign is not possible: there are at most %d keys, and no more must sign than "+
				"there are.",
			len(role.GetKeys()), role.GetThreshold(), maxRootKeys), nil)
	}
	return o.changeMinVersion(next)
}

func (o NextBundle) changeMinVersion(next *protocol.TrustBundle) error {
	floor := o.MinVersion
	if floor == nil {
		return nil
	}
	// Nodes order versions part by part: with one that no manifest has, every version of the app could be too low.
	if len(floor.GetAppSlug()) > maxSlugBytes || !appSlugForm.MatchString(floor.GetAppSlug()) ||
		len(floor.GetVersion()) > maxVersionBytes ||
		floor.GetVersion() != "" && !appVersionForm.MatchString(floor.GetVersion()) {
		return fault.New(fault.Malformed, codeMinVersionInvalid, fmt.Sprintf("Name an app by its slug, like hello, and a "+
			"version as its manifest writes it, like 1.2.0: not %q and %q.", floor.GetAppSlug(), floor.GetVersion()), nil)
	}
	next.MinVersions = slices.DeleteFunc(next.GetMinVersions(), func(m *protocol.MinVersion) bool {
		return m.GetAppSlug() == floor.GetAppSlug()
	})
	if floor.GetVersion() != "" {
		next.MinVersions = append(next.MinVersions, floor)
	}
	return nil
}

// BundleEnd returns when the newest bundle ends; soon is true when it is over or ends within 60 days. ok is false for a
// bundle without an end.
func (k *Keys) BundleEnd(now time.Time) (end time.Time, soon, ok bool) {
	end, ok = k.Bundle().ExpiresAt()
	return end, ok && now.Add(bundleWarning).After(end), ok
}

// BundleAfter returns the newest bundle that may succeed the one with the version: the newest of all, unless the root
// changed in between. A node follows such a change bundle by bundle.
func (k *Keys) BundleAfter(version uint64) protocol.Bundle {
	set := k.current()
	at := slices.IndexFunc(set.chain, func(b protocol.Bundle) bool { return b.Version() == version })
	for _, next := range set.chain[:max(at, 0)] {
		if _, err := set.chain[at].Succeed(next.Envelope()); err == nil {
			return next
		}
	}
	return set.bundle
}
