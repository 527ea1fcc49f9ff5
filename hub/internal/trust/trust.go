// Package trust owns the hub's keys, certificates and trust bundles: making them, opening them, rotating and revoking
// them. It does not own the nodes that the certificates are for, and it never holds the root key longer than one
// signature.
//
// Layout of the data directory (private files are 0600 and lie in a directory of mode 0700):
//
//	trust/hub-id                 this hub's id
//	trust/root-fingerprint       the pin of the first bundle; each later one succeeds the one before it
//	trust/bundle-000001.json     the signed trust bundles, DSSE JSON
//	trust/state-<key id>.key     online keys: state, lease, token (Ed25519, PKCS #8)
//	trust/node-ca-<key id>.key   the two certificate authorities (ECDSA P-256, PKCS #8)
//	trust/hub-ca-<key id>.key
//	ca.pem                       the hub-ca certificate, for clients of the REST API
//
// Root and catalog keys lie elsewhere, encrypted with a passphrase, in a directory that must not be inside the data
// directory.
package trust

import (
	"crypto"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// roleToken signs access tokens of the REST API and the registry. Nodes never see them, so it is not in the trust
// bundle.
const roleToken = "token"

const (
	trustDirName        = "trust"
	hubIDFile           = "hub-id"
	rootFingerprintFile = "root-fingerprint"
	// CAFile is the name of the hub-ca certificate in the data directory.
	CAFile = "ca.pem"
)

// Keys is what a running hub holds: the newest trust bundle and the online keys that it names.
type Keys struct {
	dir         string
	hubID       string
	fingerprint string

	mu  sync.RWMutex
	set keySet
}

// keySet is replaced as a whole, so that a reader never mixes a new bundle with an old key.
type keySet struct {
	bundle protocol.Bundle
	// chain has all bundles, the newest first.
	chain  []protocol.Bundle
	state  ed25519.PrivateKey
	lease  ed25519.PrivateKey
	token  ed25519.PrivateKey
	nodeCA authority
	hubCA  authority
}

type authority struct {
	key         crypto.Signer
	certificate *x509.Certificate
}

// Open reads the keys of a data directory. It refuses a directory that holds the root key: a stolen hub would be a
// stolen root.
func Open(dataDir string) (*Keys, error) {
	if path, err := findOffline(dataDir); err != nil {
		return nil, fault.New(fault.Internal, codeDataDirUnreadable, "The data directory "+dataDir+
			" cannot be searched: run the hub as its owner.", err).Permanent()
	} else if path != "" {
		return nil, fault.New(fault.Internal, codeRootKeyInDataDir,
			"The root or catalog key lies inside the data directory ("+path+"). Move it to another machine or at least to "+
				"another directory, then start again.", nil).Permanent()
	}
	dir := filepath.Join(dataDir, trustDirName)
	k := &Keys{dir: dir}
	var err error
	if k.hubID, err = readLine(filepath.Join(dir, hubIDFile)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fault.New(fault.Internal, codeNotInitialised, "There are no keys in "+dir+
				": run `gpuaas-hub init` first.", err).Permanent()
		}
		return nil, unreadable(dir, err)
	}
	if k.fingerprint, err = readLine(filepath.Join(dir, rootFingerprintFile)); err != nil {
		return nil, unreadable(dir, err)
	}
	if _, err := k.Reload(); err != nil {
		return nil, err
	}
	return k, nil
}

func unreadable(dir string, err error) error {
	return fault.New(fault.Internal, codeKeysUnreadable, "The keys in "+dir+" cannot be read: check owner and "+
		"permissions, or restore them from a backup.", err).Permanent()
}

// Reload reads the bundle and the keys again and reports whether they changed. Another process (`gpuaas-hub trust
// revoke`) may have written them.
func (k *Keys) Reload() (changed bool, err error) {
	chain, err := bundleChain(k.dir, k.fingerprint)
	if err != nil {
		return false, unreadable(k.dir, err)
	}
	slices.Reverse(chain)
	bundle := chain[0]
	next := keySet{bundle: bundle, chain: chain}
	var errs [5]error
	next.token, errs[0] = readEd25519(filepath.Join(k.dir, roleToken+".key"))
	next.state, errs[1] = onlineKey(k.dir, bundle, protocol.RoleState)
	next.lease, errs[2] = onlineKey(k.dir, bundle, protocol.RoleLease)
	next.nodeCA, errs[3] = onlineAuthority(k.dir, bundle, protocol.RoleNodeCA)
	next.hubCA, errs[4] = onlineAuthority(k.dir, bundle, protocol.RoleHubCA)
	if err := errors.Join(errs[:]...); err != nil {
		return false, unreadable(k.dir, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.set.bundle.Valid() && k.set.bundle.Version() >= bundle.Version() {
		return false, nil
	}
	k.set = next
	return true, nil
}

func (k *Keys) current() keySet {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.set
}

// HubID is this hub's id, in its SPIFFE id.
func (k *Keys) HubID() string { return k.hubID }

// RootFingerprint pins the present root: what a node that joins now is given to trust this hub.
func (k *Keys) RootFingerprint() string { return k.Bundle().Pin() }

// Bundle is the newest trust bundle.
func (k *Keys) Bundle() protocol.Bundle { return k.current().bundle }

// Chain returns all bundles of this hub, the newest first: a restored hub verifies its own signatures with them,
// whatever was revoked since.
func (k *Keys) Chain() []protocol.Bundle { return slices.Clone(k.current().chain) }

// TrustDomain is the SPIFFE trust domain.
func (k *Keys) TrustDomain() string { return k.current().bundle.TrustDomain() }

// State signs desired states.
func (k *Keys) State() protocol.Signer { return protocol.NewEd25519Signer(k.current().state) }

// Lease signs leases.
func (k *Keys) Lease() protocol.Signer { return protocol.NewEd25519Signer(k.current().lease) }

// ResetKey is the key with which this hub resets the connections of a killed predecessor. It is derived from the token
// key, so that it survives restarts; after that key is replaced, nodes wait for the idle timeout once.
func (k *Keys) ResetKey() (key [32]byte, err error) {
	derived, err := hkdf.Key(sha256.New, k.Token().Seed(), nil, "gpuaas stateless reset "+k.hubID, len(key))
	copy(key[:], derived)
	return key, err
}

// RequestKey keys the digests of requests that the hub remembers: a request may hold a secret that a plain digest would
// let a reader of the database guess. After the token key is replaced, a repeated request counts as another one.
func (k *Keys) RequestKey() ([]byte, error) {
	return hkdf.Key(sha256.New, k.Token().Seed(), nil, "gpuaas request digest", sha256.Size)
}

// Token signs access tokens.
func (k *Keys) Token() ed25519.PrivateKey { return k.current().token }

// bundleChain reads all bundles, from the first to the newest.
func bundleChain(dir, fingerprint string) ([]protocol.Bundle, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "bundle-*.json"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("no trust bundle in %s", dir)
	}
	// The names are zero-padded, and Glob sorts them. The whole chain is verified: every node would refuse a bundle that
	// its predecessor's root did not sign.
	var chain []protocol.Bundle
	for i, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		env, err := protocol.EnvelopeFromJSON(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		var bundle protocol.Bundle
		if i == 0 {
			bundle, err = protocol.VerifyBundle(env, fingerprint)
		} else {
			bundle, err = chain[i-1].Succeed(env)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		chain = append(chain, bundle)
	}
	return chain, nil
}

func writeBundle(dir string, env *protocol.Envelope, version uint64) error {
	data, err := protocol.EnvelopeToJSON(env)
	if err != nil {
		return err
	}
	return durable.CreateOwned(filepath.Join(dir, fmt.Sprintf("bundle-%06d.json", version)), data, 0o644)
}

func onlineKey(dir string, bundle protocol.Bundle, role string) (ed25519.PrivateKey, error) {
	signer, _, err := onlineSigner(dir, bundle, role)
	key, ok := signer.(ed25519.PrivateKey)
	if err == nil && !ok {
		err = fmt.Errorf("the key of role %q in %s is not an Ed25519 key", role, dir)
	}
	return key, err
}

func onlineAuthority(dir string, bundle protocol.Bundle, role string) (authority, error) {
	key, cert, err := onlineSigner(dir, bundle, role)
	return authority{key: key, certificate: cert}, err
}

// onlineSigner reads the first key of a role that the bundle names and the directory has; an authority's with its
// certificate.
func onlineSigner(dir string, bundle protocol.Bundle, role string) (crypto.Signer, *x509.Certificate, error) {
	for _, named := range bundle.Keys(role) {
		key, err := readSigner(keyPath(dir, role, named.GetKeyId()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		var cert *x509.Certificate
		public := crypto.PublicKey(ed25519.PublicKey(named.GetEd25519()))
		if len(named.GetCertificate()) > 0 {
			if cert, err = x509.ParseCertificate(named.GetCertificate()); err != nil {
				return nil, nil, err
			}
			public = cert.PublicKey
		}
		if own, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); ok && own.Equal(public) {
			return key, cert, nil
		}
	}
	return nil, nil, fmt.Errorf("no key of role %q that the trust bundle names is in %s", role, dir)
}

func readLine(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(data)), nil
}

// keyPath shortens the key id: 16 hex digits tell the few keys of one role apart.
func keyPath(dir, role, keyID string) string {
	if len(keyID) > 16 {
		keyID = keyID[:16]
	}
	return filepath.Join(dir, role+"-"+keyID+".key")
}

// AuthorityExpiry returns when the certificate of an authority ends; ok is false for a role that is none.
func (k *Keys) AuthorityExpiry(role string) (end time.Time, ok bool) {
	set := k.current()
	switch role {
	case protocol.RoleNodeCA:
		return set.nodeCA.certificate.NotAfter, true
	case protocol.RoleHubCA:
		return set.hubCA.certificate.NotAfter, true
	}
	return time.Time{}, false
}
