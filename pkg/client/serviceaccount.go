package client

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

const (
	assertionAudience = "gpuaas"
	assertionLife     = 2 * time.Minute
	// A token is replaced when less than this share of its life is left, so that it never ends under way.
	renewAtShare = 5
)

// CredentialError says that no token could be had; trying the same again is useless.
type CredentialError struct {
	Cause error
}

func (e *CredentialError) Error() string { return "no access token: " + e.Cause.Error() }

// Unwrap returns the cause.
func (e *CredentialError) Unwrap() error { return e.Cause }

// ServiceAccountCredential mints short-lived tokens with a service account's key and keeps them until shortly before
// their end. The private key never leaves the process: what is sent is an assertion signed with it.
type ServiceAccountCredential struct {
	hub       *Hub
	accountID string
	keyID     string
	key       ed25519.PrivateKey

	mu      sync.Mutex
	token   string
	renewAt time.Time
}

// errNotAnAccount does not quote the text, which may hold a key.
var errNotAnAccount = errors.New("not what gpuaas sa create --save writes")

// ParseServiceAccount reads the answer of a service account's creation, as `gpuaas sa create --save` writes it.
func ParseServiceAccount(text []byte) (ServiceAccount, error) {
	var account ServiceAccount
	if json.Unmarshal(text, &account) != nil || account.ID == "" || account.Key.PrivateKeyPem == "" {
		return ServiceAccount{}, errNotAnAccount
	}
	return account, nil
}

// NewServiceAccountCredential takes the three values that the account's creation gave. conf.Credential is not used.
func NewServiceAccountCredential(conf Config, serviceAccountID, keyID string,
	privateKeyPEM []byte,
) (*ServiceAccountCredential, error) {
	block, _ := pem.Decode(privateKeyPEM)
	if block == nil {
		return nil, errors.New("client: the service account's private key is not PEM")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("client: the service account's private key is not PKCS #8")
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, errors.New("client: the service account's private key is not Ed25519")
	}
	conf.Credential = nil
	hub, err := Open(conf)
	if err != nil {
		return nil, err
	}
	return &ServiceAccountCredential{hub: hub, accountID: serviceAccountID, keyID: keyID, key: key}, nil
}

// Bearer returns a token that is good for a while.
func (c *ServiceAccountCredential) Bearer(ctx context.Context) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.token != "" && now.Before(c.renewAt) {
		return c.token, nil
	}
	token, err := c.mint(ctx, now)
	if isUnauthenticated(err) {
		// An assertion counts once: where the answer to it was lost and the client asked again, only a fresh one helps.
		token, err = c.mint(ctx, now)
	}
	if err != nil {
		if _, refused := errors.AsType[*Problem](err); refused {
			return "", &CredentialError{Cause: err}
		}
		return "", err
	}
	life := time.Duration(token.ExpiresIn) * time.Second
	c.token, c.renewAt = token.AccessToken, now.Add(life-life/renewAtShare)
	return c.token, nil
}

// forget drops a token that the hub refused, unless it was replaced already.
func (c *ServiceAccountCredential) forget(token string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.token == token {
		c.token = ""
	}
}

func (c *ServiceAccountCredential) mint(ctx context.Context, now time.Time) (Token, error) {
	assertion := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.RegisteredClaims{
		Issuer: c.accountID, Subject: c.accountID, Audience: jwt.ClaimStrings{assertionAudience}, ID: newID(),
		IssuedAt: jwt.NewNumericDate(now), ExpiresAt: jwt.NewNumericDate(now.Add(assertionLife)),
	})
	assertion.Header["kid"] = c.keyID
	signed, err := assertion.SignedString(c.key)
	if err != nil {
		return Token{}, fmt.Errorf("sign the assertion: %w", err)
	}
	return Read[Token](c.hub.MintServiceAccountToken(ctx, ServiceAccountTokenRequest{
		ServiceAccountID: c.accountID,
		KeyID:            c.keyID, Assertion: signed,
	}))
}

func isUnauthenticated(err error) bool {
	p, ok := errors.AsType[*Problem](err)
	return ok && p.Status == http.StatusUnauthorized
}
