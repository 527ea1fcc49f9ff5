package protocol

import (
	"crypto/ed25519"
	"crypto/x509"
	"maps"
	"time"

	"google.golang.org/protobuf/proto"
)

// Role names of a trust bundle (docs/design/trust.md).
const (
	RoleRoot    = "root"
	RoleState   = "state"
	RoleLease   = "lease"
	RoleCatalog = "catalog"
	RoleRelease = "release"
	RoleNodeCA  = "node-ca"
	RoleHubCA   = "hub-ca"
)

// Bundle is a verified trust bundle. Its zero value trusts no signature.
type Bundle struct {
	message  *TrustBundle
	envelope *Envelope
	roles    map[string]*Role
	revoked  map[string]bool
	// minVersions are the lowest acceptable versions by app slug.
	minVersions map[string]string
}

// Succeed accepts the next bundle: a higher version, of the same trust domain and no older epoch, signed by the old and
// by the new root role.
func (b Bundle) Succeed(env *Envelope) (Bundle, error) {
	if b.message == nil {
		return Bundle{}, Refuse(Nack_SIGNATURE_INVALID, "there is no trust bundle to succeed")
	}
	next, err := parseBundle(env)
	if err != nil {
		return Bundle{}, err
	}
	switch {
	case next.Version() <= b.Version():
		return Bundle{}, Refuse(Nack_GENERATION_OLDER, "trust bundle %d is not newer than %d", next.Version(), b.Version())
	case next.TrustDomain() != b.TrustDomain():
		return Bundle{}, Refuse(Nack_MALFORMED, "the trust domain never changes")
	case next.Epoch() < b.Epoch():
		return Bundle{}, Refuse(Nack_EPOCH_UNKNOWN, "epoch %d is older than %d", next.Epoch(), b.Epoch())
	}
	if err := b.signed(env, RoleRoot); err != nil {
		return Bundle{}, err
	}
	return next, nil
}

func parseBundle(env *Envelope) (Bundle, error) {
	if err := checkShape(env, PayloadBundle, MaxBundleBytes); err != nil {
		return Bundle{}, err
	}
	m := &TrustBundle{}
	if err := Unmarshal(env.GetPayload(), m); err != nil {
		return Bundle{}, &RefusalError{Reason: Nack_MALFORMED, Detail: "the trust bundle cannot be read", Err: err}
	}
	b := Bundle{
		message: m, envelope: env, roles: map[string]*Role{}, revoked: map[string]bool{},
		minVersions: map[string]string{},
	}
	if len(m.GetMinVersions()) > MaxMinVersions {
		return Bundle{}, Refuse(Nack_TOO_LARGE, "the trust bundle names over %d lowest versions", MaxMinVersions)
	}
	for _, floor := range m.GetMinVersions() {
		b.minVersions[floor.GetAppSlug()] = floor.GetVersion()
	}
	for _, id := range m.GetRevokedKeyIds() {
		b.revoked[id] = true
	}
	for _, r := range m.GetRoles() {
		if err := checkRole(r); err != nil {
			return Bundle{}, err
		}
		if b.roles[r.GetName()] != nil {
			return Bundle{}, Refuse(Nack_MALFORMED, "role %q stands twice in the trust bundle", r.GetName())
		}
		b.roles[r.GetName()] = r
	}
	if m.GetTrustDomain() == "" || m.GetVersion() == 0 {
		return Bundle{}, Refuse(Nack_MALFORMED, "the trust bundle has no trust domain or no version")
	}
	// Signed by its own root too: a bundle that only the old root signed could lock everyone out.
	if err := b.signed(env, RoleRoot); err != nil {
		return Bundle{}, err
	}
	return b, nil
}

func checkRole(r *Role) error {
	isCA := r.GetName() == RoleNodeCA || r.GetName() == RoleHubCA
	if !isCA && (r.GetThreshold() == 0 || int(r.GetThreshold()) > len(r.GetKeys())) {
		return Refuse(Nack_MALFORMED, "role %q has a threshold of %d for %d keys", r.GetName(), r.GetThreshold(),
			len(r.GetKeys()))
	}
	seen := map[string]bool{}
	for _, k := range r.GetKeys() {
		if seen[k.GetKeyId()] {
			return Refuse(Nack_MALFORMED, "role %q names a key twice", r.GetName())
		}
		seen[k.GetKeyId()] = true
		if isCA {
			if _, err := x509.ParseCertificate(k.GetCertificate()); err != nil {
				return &RefusalError{Reason: Nack_MALFORMED, Detail: "role " + r.GetName() + " holds a certificate that cannot " +
					"be read", Err: err}
			}
			continue
		}
		// The id is derived, never chosen: otherwise a key could use the id of another.
		if len(k.GetEd25519()) != ed25519.PublicKeySize || KeyID(k.GetEd25519()) != k.GetKeyId() {
			return Refuse(Nack_MALFORMED, "role %q holds a key that is not its id", r.GetName())
		}
	}
	return nil
}

// signed reports whether the role's threshold of keys signed the envelope.
func (b Bundle) signed(env *Envelope, role string) error {
	_, err := b.signers(env, role)
	return err
}

// signers returns the keys of the role that signed the envelope; fewer than the threshold are an error.
func (b Bundle) signers(env *Envelope, role string) ([]string, error) {
	r := b.roles[role]
	if r == nil {
		return nil, Refuse(Nack_SIGNATURE_INVALID, "the trust bundle has no role %q", role)
	}
	ids, sawRevoked := signedBy(env, r.GetKeys(), b.revoked)
	if len(ids) >= int(r.GetThreshold()) && len(ids) > 0 {
		return ids, nil
	}
	if sawRevoked {
		return nil, Refuse(Nack_KEY_REVOKED, "the document is signed by a key of role %q that was revoked", role)
	}
	return nil, Refuse(Nack_SIGNATURE_INVALID, "the document is not signed by role %q of trust bundle %d", role,
		b.Version())
}

// Valid reports whether this is a verified bundle and not the zero value.
func (b Bundle) Valid() bool { return b.message != nil }

// Envelope returns the signed bytes, for storing and passing on.
func (b Bundle) Envelope() *Envelope { return b.envelope }

// Version returns the bundle's number.
func (b Bundle) Version() uint64 { return b.message.GetVersion() }

// ExpiresAt returns when the bundle should have been replaced; ok is false when it has no such time.
func (b Bundle) ExpiresAt() (at time.Time, ok bool) {
	return b.message.GetExpiresAt().AsTime(), b.message.GetExpiresAt() != nil
}

// Expired reports whether the bundle should have been replaced. It still counts: expiry is a condition, never a
// refusal.
func (b Bundle) Expired(now time.Time) bool {
	at, ok := b.ExpiresAt()
	return ok && now.After(at)
}

// Pin returns what a node that joins now is given: the fingerprint of the only root key, or the digest of the root
// role.
func (b Bundle) Pin() string {
	root := b.roles[RoleRoot]
	if len(root.GetKeys()) == 1 {
		return FingerprintPrefix + root.GetKeys()[0].GetKeyId()
	}
	return RootRoleDigest(root)
}

// RootThreshold returns how many root keys have to sign the next bundle.
func (b Bundle) RootThreshold() int { return int(b.roles[RoleRoot].GetThreshold()) }

// Epoch returns the epoch whose documents count.
func (b Bundle) Epoch() uint64 { return b.message.GetEpoch() }

// IssuedAt returns when the bundle was made.
func (b Bundle) IssuedAt() time.Time { return b.message.GetIssuedAt().AsTime() }

// Under returns the bundle as it counts once a later one is there: its own keys, less those that the later one has
// revoked. The lowest versions are the later one's.
func (b Bundle) Under(later Bundle) Bundle {
	b.revoked = maps.Clone(b.revoked)
	maps.Copy(b.revoked, later.revoked)
	b.minVersions = later.minVersions
	return b
}

// TrustDomain returns the SPIFFE trust domain.
func (b Bundle) TrustDomain() string { return b.message.GetTrustDomain() }

// Revoked reports whether the key was revoked.
func (b Bundle) Revoked(keyID string) bool { return b.revoked[keyID] }

// MinVersion returns the lowest version of an app that may start; empty where any may.
func (b Bundle) MinVersion(appSlug string) string { return b.minVersions[appSlug] }

// Keys returns the keys of a role that are not revoked.
func (b Bundle) Keys(role string) []*PublicKey {
	var keys []*PublicKey
	for _, k := range b.roles[role].GetKeys() {
		if !b.revoked[k.GetKeyId()] {
			keys = append(keys, k)
		}
	}
	return keys
}

// Message returns a copy of the bundle's content.
func (b Bundle) Message() *TrustBundle {
	if b.message == nil {
		return nil
	}
	m, _ := proto.Clone(b.message).(*TrustBundle)
	return m
}

// NodeCAs returns the authorities that vouch for nodes.
func (b Bundle) NodeCAs() *x509.CertPool { return b.pool(RoleNodeCA) }

// HubCAs returns the authorities that vouch for hubs.
func (b Bundle) HubCAs() *x509.CertPool { return b.pool(RoleHubCA) }

func (b Bundle) pool(role string) *x509.CertPool {
	pool := x509.NewCertPool()
	for _, k := range b.Keys(role) {
		if cert, err := x509.ParseCertificate(k.GetCertificate()); err == nil {
			pool.AddCert(cert)
		}
	}
	return pool
}
