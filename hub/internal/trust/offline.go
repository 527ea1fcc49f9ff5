package trust

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// DelegateOptions are the options of Delegate.
type DelegateOptions struct {
	CatalogKeyFile string
	Passphrase     string
	// PublisherPEM is the publisher's Ed25519 public key (PKIX in PEM).
	PublisherPEM []byte
	// OrgSlug is empty for platform apps.
	OrgSlug  string
	Prefixes []string
	Now      time.Time
	// TTL of the delegation; 0 for one that does not expire.
	TTL time.Duration
}

// Delegate signs a delegation with the catalog key.
func Delegate(o DelegateOptions) (*protocol.Envelope, error) {
	block, _ := pem.Decode(o.PublisherPEM)
	if block == nil {
		return nil, fault.New(fault.Malformed, codePublisherKeyInvalid, "The publisher's public key is not in PEM.", nil)
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	pub, ok := parsed.(ed25519.PublicKey)
	if err != nil || !ok {
		return nil, fault.New(fault.Malformed, codePublisherKeyInvalid, "The publisher's public key is not an Ed25519 key.",
			err)
	}
	if err := checkPrefixes(o.OrgSlug, o.Prefixes); err != nil {
		return nil, err
	}
	catalog, err := readOffline(o.CatalogKeyFile, protocol.RoleCatalog, o.Passphrase)
	if err != nil {
		return nil, err
	}
	defer clear(catalog)
	d := &protocol.Delegation{
		Publisher:          &protocol.PublicKey{KeyId: protocol.KeyID(pub), Ed25519: pub},
		OrgSlug:            o.OrgSlug,
		RepositoryPrefixes: o.Prefixes,
		IssuedAt:           timestamppb.New(o.Now),
	}
	if o.TTL > 0 {
		d.ExpiresAt = timestamppb.New(o.Now.Add(o.TTL))
	}
	return protocol.SignMessage(protocol.PayloadDelegation, d, protocol.NewEd25519Signer(catalog))
}

// checkPrefixes refuses repository prefixes outside the org.
func checkPrefixes(orgSlug string, prefixes []string) error {
	root := "apps/"
	if orgSlug != "" {
		root = "org/" + orgSlug + "/"
	}
	if len(prefixes) == 0 {
		return fault.New(fault.Malformed, codePrefixMissing, "Name at least one repository prefix, like "+root+".", nil)
	}
	for _, p := range prefixes {
		if !strings.HasPrefix(p, root) || !strings.HasSuffix(p, "/") {
			return fault.New(fault.Malformed, codePrefixInvalid, fmt.Sprintf("The repository prefix %q must start with %s and "+
				"end in a slash.", p, root), nil)
		}
	}
	return nil
}

// RevokeOptions are the options of Revoke.
type RevokeOptions struct {
	DataDir string
	Root    RootKeys
	KeyID   string
	Now     time.Time
	// BundleTTL is how long the next bundle is current; 0 takes DefaultBundleTTL.
	BundleTTL time.Duration
	// CatalogKeyFile is the file of a new catalog key, where the catalog key is revoked. The first root passphrase
	// encrypts it.
	CatalogKeyFile   string
	ScryptWorkFactor int
	// ServerNames and Hostname constrain a new hub CA (InitOptions). Without ServerNames it may certify what the old one
	// may.
	ServerNames []string
	Hostname    string
}

var keyIDForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Revoke signs the next trust bundle, which revokes the key; a key of one of the hub's roles is replaced by a new one.
// A running hub reads the bundle by itself.
func Revoke(o RevokeOptions) (protocol.Bundle, error) {
	dir := filepath.Join(o.DataDir, trustDirName)
	bundle, err := Newest(dir)
	if err != nil {
		return protocol.Bundle{}, err
	}
	// The bundle lists what it does not name, like a publisher's key: an id in another form would revoke nothing.
	if !keyIDForm.MatchString(o.KeyID) {
		return protocol.Bundle{}, fault.New(fault.Malformed, codeKeyIDInvalid, "A key id is 64 hex digits in lower case; "+
			"`gpuaas-hub trust show` lists those of the hub, `gpuaas publishers list` those of publishers.", nil)
	}
	if bundle.Revoked(o.KeyID) {
		return protocol.Bundle{}, fault.New(fault.Conflict, codeKeyRevokedAlready, "This key was revoked already.", nil)
	}
	root, err := o.Root.open()
	if err != nil {
		return protocol.Bundle{}, err
	}
	defer wipe(root)
	catalog := newKey()
	defer clear(catalog)
	next, retired, err := o.successor(dir, bundle, catalog)
	if err != nil {
		return protocol.Bundle{}, err
	}
	succeeded, err := sign(bundle, next, root)
	if err != nil {
		return protocol.Bundle{}, err
	}
	if HasCatalogKey(succeeded, o.KeyID) {
		if err := writeOffline(o.CatalogKeyFile, protocol.RoleCatalog, catalog, o.Root.Passphrases[0],
			o.ScryptWorkFactor); err != nil {
			return protocol.Bundle{}, fault.New(fault.Internal, codeCatalogKeyNotWritten, "The new catalog key could not be "+
				"written to "+o.CatalogKeyFile+": the file must not exist yet.", err)
		}
	}
	if err := keep(dir, o.DataDir, succeeded); err != nil {
		return protocol.Bundle{}, err
	}
	if retired != "" {
		if err := os.Remove(retired); err != nil && !errors.Is(err, os.ErrNotExist) {
			return succeeded, fault.New(fault.Internal, codeRevokedKeyKept, "The key is revoked, but its file "+retired+
				" could not be removed.", err)
		}
	}
	return succeeded, nil
}

// Replaced says whether a command that was cut off has left file, a key that it made, as the present one of the role:
// it had signed the bundle, and not yet moved the file. A file that is there and cannot be told is an error, because
// someone would remove it: it may be the only copy of the root.
func Replaced(dataDir, role, file string, passphrases []string) (bool, error) {
	if _, err := os.Lstat(file); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	bundle, err := Newest(filepath.Join(dataDir, trustDirName))
	if err != nil {
		return false, err
	}
	var key ed25519.PrivateKey
	for _, passphrase := range passphrases {
		if key, err = readOffline(file, role, passphrase); err == nil {
			break
		}
	}
	if key == nil {
		return false, fault.New(fault.Conflict, codeKeyFileExists, "A command that was cut off has left "+file+", and its "+
			"passphrase is another one. Keep the file: it may be the present "+role+" key. `gpuaas-hub trust show` lists "+
			"that key; where it is a new one, give "+file+" the name of the old one.", err)
	}
	defer clear(key)
	id := protocol.NewEd25519Signer(key).KeyID()
	if !slices.ContainsFunc(bundle.Keys(role), func(k *protocol.PublicKey) bool { return k.GetKeyId() == id }) {
		return false, fault.New(fault.Conflict, codeKeyFileExists, "A command that was cut off has left "+file+", and the "+
			"key in it is no "+role+" key of this hub: remove the file, then try again.", nil)
	}
	return true, nil
}

// HasCatalogKey reports whether a catalog key of the bundle, revoked or not, has the id.
func HasCatalogKey(bundle protocol.Bundle, id string) bool {
	return slices.ContainsFunc(bundle.Message().GetRoles(), func(r *protocol.Role) bool {
		return r.GetName() == protocol.RoleCatalog &&
			slices.ContainsFunc(r.GetKeys(), func(k *protocol.PublicKey) bool { return k.GetKeyId() == id })
	})
}

// successor builds the next bundle, where a revoked catalog key is replaced by the given one, and returns the file of
// the revoked key.
func (o RevokeOptions) successor(dir string,
	bundle protocol.Bundle, catalog ed25519.PrivateKey,
) (next *protocol.TrustBundle, retired string, err error) {
	if next, err = dated(bundle, o.Now, o.BundleTTL); err != nil {
		return nil, "", err
	}
	next.RevokedKeyIds = append(next.RevokedKeyIds, o.KeyID)
	for i, role := range next.GetRoles() {
		if !slices.ContainsFunc(role.GetKeys(), func(k *protocol.PublicKey) bool { return k.GetKeyId() == o.KeyID }) {
			continue
		}
		var fresh *protocol.Role
		switch role.GetName() {
		case protocol.RoleRoot:
			return nil, "", fault.New(fault.Unprocessable, codeRootKeyIrrevocable, "A root key is replaced with `gpuaas-hub "+
				"trust rotate-root`.", nil)
		case protocol.RoleCatalog:
			fresh, err = edRole(protocol.RoleCatalog, catalog), o.checkCatalogKeyFile()
		default:
			var hosts hostNames
			if hosts, err = o.hosts(role, next.GetTrustDomain()); err != nil {
				return nil, "", err
			}
			fresh, err = newOnlineRole(dir, role.GetName(), next.GetTrustDomain(), hosts, o.Now)
			retired = keyPath(dir, role.GetName(), o.KeyID)
		}
		if err != nil {
			return nil, "", err
		}
		// The revoked key stays listed beside the new one, so that a node can tell "revoked" from "unknown".
		next.Roles[i].Keys = append(next.Roles[i].Keys, fresh.GetKeys()...)
	}
	return next, retired, nil
}

// hosts returns what the authority that replaces the role's revoked one may certify.
func (o RevokeOptions) hosts(role *protocol.Role, trustDomain string) (hostNames, error) {
	if role.GetName() != protocol.RoleHubCA {
		return hostNames{}, nil
	}
	if len(o.ServerNames) > 0 {
		return permittedHosts(o.ServerNames, o.Hostname, trustDomain)
	}
	for _, k := range role.GetKeys() {
		if k.GetKeyId() == o.KeyID {
			old, err := x509.ParseCertificate(k.GetCertificate())
			if err != nil {
				return hostNames{}, err
			}
			return hostsOf(old), nil
		}
	}
	return hostNames{}, nil
}

func (o RevokeOptions) checkCatalogKeyFile() error {
	if o.CatalogKeyFile == "" {
		return fault.New(fault.Malformed, codeCatalogKeyFileMissing, "Say with --catalog-key-file where the new "+
			"catalog key goes.", nil)
	}
	if in, err := inside(o.CatalogKeyFile, o.DataDir); err != nil || in {
		return fault.New(fault.Malformed, codeOfflineDirInside, "The catalog key must not be inside the data directory.",
			err)
	}
	return nil
}
