package iam

import (
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// maxProofs bounds the tokens that are remembered, about 1 KB each. When full, all are forgotten and verified again.
const maxProofs = 1024

// Proofs remembers what access tokens say and under which key their signature was right, which never changes. Whether
// key and account still count, and the token's time, is not remembered. Its zero value is ready; a nil one remembers
// nothing.
type Proofs struct {
	mu sync.Mutex
	of map[[sha256.Size]byte]accessToken
}

// accessToken is what a token says.
type accessToken struct {
	kid    string
	claims accessClaims
	// signedBy is the key that its signature was verified with; nil before.
	signedBy ed25519.PublicKey
}

// read parses a token. Until verify has checked the signature, its claims only select the rows to check it with.
func (p *Proofs) read(token string) (accessToken, error) {
	if t, known := p.recall(token); known {
		return t, nil
	}
	var t accessToken
	unverified, _, err := jwt.NewParser().ParseUnverified(token, &t.claims)
	if err != nil {
		return t, err
	}
	t.kid, _ = unverified.Header["kid"].(string)
	if !db.IsID(t.kid) || !db.IsID(t.claims.Subject) || !db.IsID(t.claims.KeyID) {
		return t, errors.New("access token without signing key, subject or key")
	}
	if unverified.Header["typ"] != accessType {
		return t, errors.New("not an access token")
	}
	return t, nil
}

// verify checks the signature of a token that was read, its audience and its time.
func (p *Proofs) verify(token string, t accessToken, public ed25519.PublicKey, now time.Time) error {
	options := []jwt.ParserOption{
		jwt.WithValidMethods([]string{"EdDSA"}), jwt.WithAudience(Audience), jwt.WithExpirationRequired(),
		jwt.WithTimeFunc(func() time.Time { return now }),
	}
	if t.signedBy != nil && t.signedBy.Equal(public) {
		return jwt.NewValidator(options...).Validate(t.claims)
	}
	if _, err := jwt.ParseWithClaims(token, &accessClaims{}, func(*jwt.Token) (any, error) { return public, nil },
		options...); err != nil {
		return err
	}
	t.signedBy = public
	p.keep(token, t)
	return nil
}

func (p *Proofs) recall(token string) (accessToken, bool) {
	if p == nil {
		return accessToken{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t, known := p.of[sha256.Sum256([]byte(token))]
	return t, known
}

func (p *Proofs) keep(token string, t accessToken) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil || len(p.of) >= maxProofs {
		p.of = map[[sha256.Size]byte]accessToken{}
	}
	p.of[sha256.Sum256([]byte(token))] = t
}
