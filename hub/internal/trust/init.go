package trust

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/pem"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Names of the files in the offline directory.
const (
	RootKeyFile    = "root.age"
	CatalogKeyFile = "catalog.age"
)

// InitOptions are the options of Init.
type InitOptions struct {
	DataDir string
	// OfflineDir takes the root and the catalog key. It must not be inside DataDir.
	OfflineDir  string
	TrustDomain string
	Passphrase  string
	// ServerNames are the host names and addresses of the HTTPS server, Hostname that of this machine: the hub CA may
	// certify no others. Without ServerNames, it may certify names below the trust domain and private addresses.
	ServerNames []string
	Hostname    string
	Now         time.Time
	// BundleTTL is how long the first bundle is current; 0 takes DefaultBundleTTL.
	BundleTTL time.Duration
	// ScryptWorkFactor is log2 of the work for one guess of the passphrase; 0 takes age's default.
	ScryptWorkFactor int
}

// InitResult is what an operator must record.
type InitResult struct {
	HubID           string
	RootFingerprint string
	RootKeyFile     string
	CatalogKeyFile  string
	CatalogKeyID    string
	CAFile          string
}

// A trust domain is a DNS name in lower case (SPIFFE ID, section 2.1); the name constraints of the authorities need the
// dot.
var trustDomainForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+$`)

func (o InitOptions) check() error {
	if !trustDomainForm.MatchString(o.TrustDomain) || len(o.TrustDomain) > 253 {
		return fault.New(fault.Malformed, codeTrustDomainInvalid, "The trust domain must be a lower-case DNS name with a "+
			"dot, like gpuaas.internal.", nil)
	}
	if err := CheckPassphrase(o.Passphrase); err != nil {
		return err
	}
	if _, err := permittedHosts(o.ServerNames, o.Hostname, o.TrustDomain); err != nil {
		return err
	}
	if _, err := bundleEnd(o.Now, o.BundleTTL); err != nil {
		return err
	}
	in, err := inside(o.OfflineDir, o.DataDir)
	if err != nil {
		return fault.New(fault.Malformed, codeOfflineDirUnusable, "The directory "+o.OfflineDir+" cannot be used.", err)
	}
	if in {
		return fault.New(fault.Malformed, codeOfflineDirInside, "The directory for the root and catalog keys must not be "+
			"inside the data directory.", nil)
	}
	for _, path := range []string{
		filepath.Join(o.DataDir, trustDirName, hubIDFile), filepath.Join(o.OfflineDir, RootKeyFile), filepath.Join(
			o.OfflineDir, CatalogKeyFile),
	} {
		if _, err := os.Lstat(path); err == nil {
			return fault.New(fault.Conflict, codeAlreadyInitialised, path+" exists already: init never overwrites keys. Choose "+
				"other directories, or remove these by hand if nothing depends on them.", nil)
		}
	}
	return nil
}

// Init makes all keys and trust bundle 1. The root key exists in memory only until the bundle is signed and the key is
// written, encrypted.
func Init(o InitOptions) (InitResult, error) {
	if err := o.check(); err != nil {
		return InitResult{}, err
	}
	dir := filepath.Join(o.DataDir, trustDirName)
	// Other users may pass through the data directory, but not list it: the private PostgreSQL runs as a user of its own.
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{o.DataDir, 0o711}, {dir, 0o700}, {o.OfflineDir, 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return InitResult{}, fault.New(fault.Internal, codeDirectoryUnwritable, "The directory "+d.path+
				" cannot be made: create it, or run init as a user who may.", err)
		}
	}
	result, err := makeKeys(o, dir)
	if err != nil {
		return InitResult{}, fault.New(fault.Internal, codeKeysNotWritten, "The keys could not be written: check free "+
			"space and permissions of "+o.DataDir+" and "+o.OfflineDir+", remove what was written, and run init again.", err)
	}
	return result, nil
}

func makeKeys(o InitOptions, dir string) (InitResult, error) {
	root, catalog := newKey(), newKey()
	defer clear(root)
	defer clear(catalog)
	roles := []*protocol.Role{edRole(protocol.RoleRoot, root), edRole(protocol.RoleCatalog, catalog)}
	if err := makeFirstBundle(o, dir, root, roles); err != nil {
		return InitResult{}, err
	}
	out := InitResult{
		RootKeyFile:    filepath.Join(o.OfflineDir, RootKeyFile),
		CatalogKeyFile: filepath.Join(o.OfflineDir, CatalogKeyFile),
		CatalogKeyID:   roles[1].GetKeys()[0].GetKeyId(),
		CAFile:         filepath.Join(o.DataDir, CAFile),
	}
	if err := writeOffline(out.RootKeyFile, protocol.RoleRoot, root, o.Passphrase, o.ScryptWorkFactor); err != nil {
		return InitResult{}, err
	}
	if err := writeOffline(out.CatalogKeyFile, protocol.RoleCatalog, catalog, o.Passphrase,
		o.ScryptWorkFactor); err != nil {
		return InitResult{}, err
	}
	pub, _ := root.Public().(ed25519.PublicKey)
	out.RootFingerprint = protocol.Fingerprint(pub)
	pin := []byte(out.RootFingerprint + "\n")
	if err := durable.Create(filepath.Join(dir, rootFingerprintFile), pin, 0o644); err != nil {
		return InitResult{}, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return InitResult{}, err
	}
	out.HubID = id.String()
	// Written last: where the hub id exists, all other files do.
	return out, durable.Create(filepath.Join(dir, hubIDFile), []byte(out.HubID+"\n"), 0o644)
}

// makeFirstBundle makes the online keys and writes trust bundle 1 with them and the offline roles.
func makeFirstBundle(o InitOptions, dir string, root ed25519.PrivateKey, roles []*protocol.Role) error {
	hosts, err := permittedHosts(o.ServerNames, o.Hostname, o.TrustDomain)
	if err != nil {
		return err
	}
	for _, role := range []string{protocol.RoleState, protocol.RoleLease, protocol.RoleNodeCA, protocol.RoleHubCA} {
		r, err := newOnlineRole(dir, role, o.TrustDomain, hosts, o.Now)
		if err != nil {
			return err
		}
		roles = append(roles, r)
	}
	if err := writeKey(filepath.Join(dir, roleToken+".key"), newKey()); err != nil {
		return err
	}
	expires, err := bundleEnd(o.Now, o.BundleTTL)
	if err != nil {
		return err
	}
	bundle := &protocol.TrustBundle{
		TrustDomain: o.TrustDomain, Version: 1, Epoch: 1, Roles: roles, IssuedAt: timestamppb.New(o.Now), ExpiresAt: expires,
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, bundle, protocol.NewEd25519Signer(root))
	if err != nil {
		return err
	}
	if err := writeBundle(dir, env, 1); err != nil {
		return err
	}
	return writeCA(o.DataDir, bundle)
}

func edRole(name string, key ed25519.PrivateKey) *protocol.Role {
	pub, _ := key.Public().(ed25519.PublicKey)
	return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
		KeyId:   protocol.KeyID(pub),
		Ed25519: pub,
	}}}
}

// newOnlineRole makes a key or an authority and writes it to the trust directory.
func newOnlineRole(dir, role, trustDomain string, hosts hostNames, now time.Time) (*protocol.Role, error) {
	if role != protocol.RoleNodeCA && role != protocol.RoleHubCA {
		key := newKey()
		r := edRole(role, key)
		return r, writeKey(keyPath(dir, role, r.GetKeys()[0].GetKeyId()), key)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert, keyID, err := newAuthority(key, role, trustDomain, hosts, now)
	if err != nil {
		return nil, err
	}
	return &protocol.Role{Name: role, Threshold: 1, Keys: []*protocol.PublicKey{{KeyId: keyID, Certificate: cert}}},
		writeKey(keyPath(dir, role, keyID), key)
}

// writeCA replaces the file with which clients of the REST API verify the hub.
func writeCA(dataDir string, bundle *protocol.TrustBundle) error {
	var keys []*protocol.PublicKey
	for _, r := range bundle.GetRoles() {
		if r.GetName() != protocol.RoleHubCA {
			continue
		}
		for _, k := range r.GetKeys() {
			if !slices.Contains(bundle.GetRevokedKeyIds(), k.GetKeyId()) {
				keys = append(keys, k)
			}
		}
	}
	return durable.ReplaceOwned(filepath.Join(dataDir, CAFile), certificatesPEM(keys), 0o644)
}

// HubCAPEM returns the certificates with which clients of the REST API verify the hub.
func HubCAPEM(bundle protocol.Bundle) []byte { return certificatesPEM(bundle.Keys(protocol.RoleHubCA)) }

func certificatesPEM(keys []*protocol.PublicKey) (data []byte) {
	for _, k := range keys {
		data = append(data, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: k.GetCertificate()})...)
	}
	return data
}
