package iam

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/subtle"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// DefaultTokenTTL is the lifetime of a service account's token where the hub is not configured otherwise.
	DefaultTokenTTL = 15 * time.Minute
	// MinTokenTTL is the shortest that may be configured.
	MinTokenTTL = time.Minute
	// MaxTokenTTL is the longest that may be configured.
	MaxTokenTTL = time.Hour
	// Audience is that of access tokens and of assertions.
	Audience = "gpuaas"
	// maxAssertionLife bounds an assertion's lifetime, and with it how long its jti is remembered.
	maxAssertionLife = 5 * time.Minute
	// clockSkew is how far the clock of an assertion's signer may differ.
	clockSkew = 30 * time.Second
	maxJTI    = 128
	// accessType is RFC 9068's: an assertion can never pass as an access token, nor the other way round.
	accessType = "at+jwt"
)

// Sealer keeps the hub's own signing key; package secret has one.
type Sealer interface {
	Seal(plaintext, aad []byte) ([]byte, error)
	Open(sealed, aad []byte) ([]byte, error)
}

// Proof is what a service account shows to get a token: the private key itself, or an assertion signed with it.
type Proof struct {
	// ServiceAccountID may be empty beside an assertion, which names the account itself.
	ServiceAccountID, KeyID string
	PrivateKeyPEM           string
	Assertion               string
}

// AccessToken is a minted token.
type AccessToken struct {
	Text      string
	ExpiresAt time.Time
	// Account and KeyID say for whom and by which proof, for the audit trail.
	Account ServiceAccount
	KeyID   string
}

type accessClaims struct {
	jwt.RegisteredClaims
	// KeyID is the service account's key that proved it: when that key is revoked, the token ends with it.
	KeyID string `json:"sak"`
}

// keyedAccount is an active account with a key that proves something about it.
type keyedAccount struct {
	ServiceAccount
	PublicKey []byte
	// KeyExpiresAt is nil for a key that ends by rotation only.
	KeyExpiresAt *time.Time
}

// Mint exchanges a proof for an access token. A wrong proof is Unauthenticated without saying what was wrong: an
// account that does not exist and a key that does not fit answer alike. tokenID is a fresh id; the token counts for
// ttl, but no longer than the key.
func Mint(ctx context.Context, tx db.Tx, proof Proof, sealer Sealer, tokenID string, ttl time.Duration,
	now time.Time,
) (AccessToken, error) {
	sa, keyID, err := prove(ctx, tx, proof, now)
	if err != nil {
		return AccessToken{}, err
	}
	kid, private, err := signingKey(ctx, tx, sealer)
	if err != nil {
		return AccessToken{}, err
	}
	expires := now.Add(ttl)
	if end := sa.KeyExpiresAt; end != nil && end.Before(expires) {
		expires = *end
	}
	out := AccessToken{ExpiresAt: expires.Truncate(time.Second), Account: sa.ServiceAccount, KeyID: keyID}
	token := jwt.NewWithClaims(jwt.SigningMethodEdDSA, accessClaims{
		RegisteredClaims: jwt.RegisteredClaims{
			Subject: sa.ID, Audience: jwt.ClaimStrings{Audience}, ID: tokenID,
			IssuedAt: jwt.NewNumericDate(now), ExpiresAt: jwt.NewNumericDate(out.ExpiresAt),
		},
		KeyID: keyID,
	})
	token.Header["kid"], token.Header["typ"] = kid, accessType
	if out.Text, err = token.SignedString(private); err != nil {
		return AccessToken{}, fmt.Errorf("sign access token: %w", err)
	}
	return out, nil
}

// prove returns the account that a proof is right for, and the id of the key that proves it.
func prove(ctx context.Context, tx db.Tx, proof Proof, now time.Time) (sa keyedAccount, keyID string, err error) {
	if err := proof.check(); err != nil {
		return sa, "", err
	}
	if proof.Assertion != "" {
		issuer := ""
		if proof.KeyID, issuer, err = namedBy(proof.Assertion); err != nil {
			return sa, "", wrongProof(err)
		}
		proof.ServiceAccountID = cmp.Or(proof.ServiceAccountID, issuer)
	}
	if !db.IsID(proof.KeyID) || !db.IsID(proof.ServiceAccountID) {
		return sa, "", wrongProof(errors.New("key id or account is no id"))
	}
	sa, err = db.SelectOne(ctx, tx, pgx.RowToStructByPos[keyedAccount], `
		SELECT `+serviceAccountColumns+`, k.public_key, k.expires_at
		FROM service_accounts s JOIN service_account_keys k ON k.service_account_id = s.id
		WHERE s.id = $1 AND k.id = $2 AND s.status = 'active' AND s.deleted_at IS NULL AND `+liveKey+`$3)`,
		proof.ServiceAccountID, proof.KeyID, now)
	switch {
	case db.IsNoRows(err):
		return sa, "", wrongProof(err)
	case err != nil:
		return sa, "", err
	case proof.Assertion != "":
		err = checkAssertion(ctx, tx, proof, sa.PublicKey, now)
	default:
		err = checkPrivateKey(proof.PrivateKeyPEM, sa.PublicKey)
	}
	return sa, proof.KeyID, err
}

// Authenticate finds out who presents the token of an Authorization header (without "Bearer "), with one statement, or
// from the cache. Every bad token is Unauthenticated alike. proofs and cache may be nil.
func Authenticate(ctx context.Context, tx db.Tx, proofs *Proofs, cache *PrincipalCache, token string,
	now time.Time,
) (Principal, error) {
	return cache.principal(token, now, func() (Principal, time.Time, error) {
		if strings.HasPrefix(token, userTokenPrefix) {
			return selectUserByToken(ctx, tx, hashToken(token), now)
		}
		return authenticateAccount(ctx, tx, proofs, token, now)
	})
}

// authenticateAccount finds out which service account presents an access token, and until when the token counts.
func authenticateAccount(ctx context.Context, tx db.Tx, proofs *Proofs, token string,
	now time.Time,
) (p Principal, until time.Time, err error) {
	t, err := proofs.read(token)
	if err != nil {
		return p, until, unauthenticated(err)
	}
	// What proves the token: the hub's key that it names, and the live account key that it was given for.
	sa, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[keyedAccount], selectAccountByToken, t.kid, t.claims.Subject,
		t.claims.KeyID, now)
	if db.IsNoRows(err) {
		return p, until, unauthenticated(err)
	}
	if err != nil {
		return p, until, err
	}
	if err := proofs.verify(token, t, sa.PublicKey, now); err != nil {
		return p, until, unauthenticated(err)
	}
	until = t.claims.ExpiresAt.Time
	if end := sa.KeyExpiresAt; end != nil && end.Before(until) {
		until = *end
	}
	return sa.principal(), until, nil
}

const selectAccountByToken = `
	SELECT ` + serviceAccountColumns + `, g.public_key, k.expires_at
	FROM service_accounts s JOIN service_account_keys k ON k.service_account_id = s.id CROSS JOIN iam_signing_keys g
	WHERE g.id = $1 AND s.id = $2 AND k.id = $3 AND s.status = 'active' AND s.deleted_at IS NULL
	AND ` + liveKey + `$4)`

func (sa ServiceAccount) principal() Principal {
	return Principal{
		Type:      principal.ServiceAccount,
		ID:        sa.ID,
		Name:      sa.Name,
		OrgID:     sa.OrgID,
		ProjectID: sa.ProjectID,
		Disabled:  sa.Status == StatusDisabled,
		// Of an app instance it has no role, and knows its project.
		AppInstanceID: sa.AppInstanceID,
		Bindings: []Binding{{
			Role: sa.Role, ProjectID: sa.ProjectID,
			// A role may be given a permission after an account has the role.
			Permissions: slices.DeleteFunc(slices.Clone(sa.CustomPermissions), forPeople),
		}},
	}
}

// EnsureSigningKey makes the hub's key for access tokens if there is none, and proves that it can be opened.
func EnsureSigningKey(ctx context.Context, tx db.Tx, sealer Sealer, id string, now time.Time) error {
	_, _, err := signingKey(ctx, tx, sealer)
	if !fault.Is(err, fault.NotFound) {
		return err
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return fmt.Errorf("make token key: %w", err)
	}
	sealed, err := sealer.Seal(private.Seed(), signingAAD(id))
	if err != nil {
		return fmt.Errorf("seal token key: %w", err)
	}
	_, err = tx.Exec(ctx,
		`INSERT INTO iam_signing_keys (id, public_key, sealed_private_key, created_at) VALUES ($1, $2, $3, $4)`, id,
		[]byte(public), sealed, now)
	return err
}

func signingKey(ctx context.Context, tx db.Tx, sealer Sealer) (kid string, _ ed25519.PrivateKey, _ error) {
	var sealed []byte
	if err := tx.QueryRow(ctx,
		`SELECT id, sealed_private_key FROM iam_signing_keys ORDER BY created_at DESC, id DESC LIMIT 1`).Scan(&kid,
		&sealed); err != nil {
		return "", nil, absent(err)
	}
	seed, err := sealer.Open(sealed, signingAAD(kid))
	if err != nil || len(seed) != ed25519.SeedSize {
		return "", nil, fault.New(fault.Internal, codeTokenKeySealed, "The key for access tokens cannot be opened: restore "+
			"the hub's key file that belongs to this database.", err)
	}
	return kid, ed25519.NewKeyFromSeed(seed), nil
}

func signingAAD(kid string) []byte { return []byte("iam_signing_key\x00" + kid) }

func (p Proof) check() error {
	bad := fault.New(fault.Unprocessable, fault.CodeInvalid, "Send key_id with private_key_pem, or an assertion.",
		nil).Permanent()
	switch {
	case p.Assertion == "" && p.PrivateKeyPEM == "":
		return bad.WithField("/private_key_pem", "is required where there is no assertion")
	case p.Assertion != "" && p.PrivateKeyPEM != "":
		return bad.WithField("/assertion", "is one proof too many beside private_key_pem")
	case p.PrivateKeyPEM != "" && p.KeyID == "":
		return bad.WithField("/key_id", "is required beside private_key_pem")
	case p.ServiceAccountID == "" && p.Assertion == "":
		return bad.WithField("/service_account_id", "is required where there is no assertion")
	case p.ServiceAccountID != "" && !db.IsID(p.ServiceAccountID):
		return bad.WithField("/service_account_id", "is no id")
	}
	return nil
}

// checkPrivateKey compares public halves: the private one is neither kept nor logged.
func checkPrivateKey(text string, public ed25519.PublicKey) error {
	unreadable := fault.New(fault.Unprocessable, codePrivateKeyUnreadable, "The private key cannot be read.", nil).
		WithHint("/private_key_pem", "is no Ed25519 key in PKCS #8 PEM",
			`build the body with: jq -n --arg pem "$(cat key.pem)" '{private_key_pem: $pem}'`).Permanent()
	block, rest := pem.Decode([]byte(text))
	if block == nil || block.Type != "PRIVATE KEY" || strings.TrimSpace(string(rest)) != "" {
		return unreadable
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return unreadable
	}
	private, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return unreadable
	}
	own, ok := private.Public().(ed25519.PublicKey)
	if !ok || subtle.ConstantTimeCompare(own, public) != 1 {
		return wrongProof(errors.New("private key does not fit"))
	}
	return nil
}

// namedBy reads which key of which account a JWT claims to be signed with; nothing is verified yet.
func namedBy(text string) (keyID, issuer string, err error) {
	var claims jwt.RegisteredClaims
	token, _, err := jwt.NewParser().ParseUnverified(text, &claims)
	if err != nil {
		return "", "", err
	}
	keyID, _ = token.Header["kid"].(string)
	return keyID, claims.Issuer, nil
}

// checkAssertion follows RFC 7523 §3: signature, issuer and subject, audience, a short life, and a jti that is used
// once.
func checkAssertion(ctx context.Context, tx db.Tx, proof Proof, public ed25519.PublicKey, now time.Time) error {
	var claims jwt.RegisteredClaims
	token, err := jwt.ParseWithClaims(proof.Assertion, &claims, func(*jwt.Token) (any, error) { return public, nil },
		jwt.WithValidMethods([]string{"EdDSA"}), jwt.WithAudience(Audience), jwt.WithIssuer(proof.ServiceAccountID),
		jwt.WithSubject(proof.ServiceAccountID),
		jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithLeeway(clockSkew),
		jwt.WithTimeFunc(func() time.Time { return now }))
	switch {
	case err != nil:
		return wrongProof(err)
	case token.Header["typ"] == accessType:
		return wrongProof(errors.New("an access token is no assertion"))
	case claims.IssuedAt == nil:
		return wrongProof(errors.New("assertion without iat"))
	case claims.ExpiresAt.Sub(claims.IssuedAt.Time) > maxAssertionLife:
		return wrongProof(errors.New("assertion lives too long"))
	case claims.ID == "" || len(claims.ID) > maxJTI || strings.ContainsRune(claims.ID, 0):
		return wrongProof(errors.New("assertion without a jti of at most 128 bytes and no U+0000"))
	}
	if _, err := tx.Exec(ctx, `DELETE FROM service_account_assertions WHERE service_account_id = $1 AND expires_at < $2`,
		proof.ServiceAccountID, now); err != nil {
		return err
	}
	fresh, err := affects(tx.Exec(ctx, `
		INSERT INTO service_account_assertions (service_account_id, jti, expires_at) VALUES ($1, $2, $3)
		ON CONFLICT (service_account_id, jti) DO NOTHING`, proof.ServiceAccountID, claims.ID,
		claims.ExpiresAt.Add(clockSkew)))
	if err != nil {
		return err
	}
	if !fresh {
		return wrongProof(errors.New("assertion was used before"))
	}
	return nil
}

func wrongProof(cause error) *fault.Error {
	return fault.New(fault.Unauthenticated, codeCredentialsInvalid,
		"The service account, its key or the assertion is not valid: check the ids, that the account is active and the key "+
			"current, and for an assertion its claims and your clock.", cause).Permanent()
}

func unauthenticated(cause error) *fault.Error {
	e := ErrUnauthenticated()
	e.Cause = cause
	return e
}
