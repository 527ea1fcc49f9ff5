package iam_test

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func private(t *testing.T, key iam.Key) ed25519.PrivateKey {
	t.Helper()
	block, _ := pem.Decode([]byte(key.PrivateKeyPEM))
	require.NotNil(t, block)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(t, err)
	return parsed.(ed25519.PrivateKey)
}

func TestAssertionIsUsedOnceAndOnlyAsIntended(t *testing.T) {
	w := newWorld(t)
	good := func() jwt.RegisteredClaims {
		return jwt.RegisteredClaims{
			Issuer: w.sa.ID, Subject: w.sa.ID, Audience: jwt.ClaimStrings{iam.Audience}, ID: db.NewID(),
			IssuedAt: jwt.NewNumericDate(start()), ExpiresAt: jwt.NewNumericDate(start().Add(2 * time.Minute)),
		}
	}
	sign := func(claims jwt.Claims, key ed25519.PrivateKey, kid, typ string) iam.Proof {
		tok := jwt.NewWithClaims(jwt.SigningMethodEdDSA, claims)
		tok.Header["kid"], tok.Header["typ"] = kid, typ
		text, err := tok.SignedString(key)
		require.NoError(t, err)
		return iam.Proof{ServiceAccountID: w.sa.ID, Assertion: text}
	}
	own := private(t, w.key)

	alone := sign(good(), own, w.key.ID, "JWT")
	alone.ServiceAccountID = ""
	tok, err := w.mint(t, alone, start())
	require.NoError(t, err)
	require.Equal(t, w.sa.ID, tok.Account.ID, "the assertion names the account")

	once := sign(good(), own, w.key.ID, "JWT")
	tok, err = w.mint(t, once, start())
	require.NoError(t, err)
	_, err = w.authenticate(t, tok.Text, start())
	require.NoError(t, err)
	_, err = w.mint(t, once, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "used twice: %v", err)
	_, err = w.authenticate(t, once.Assertion, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "an assertion is no access token: %v", err)

	stranger, err := iam.NewKey(db.NewID(), start())
	require.NoError(t, err)
	for name, change := range map[string]func(c *jwt.RegisteredClaims){
		"expired":        func(c *jwt.RegisteredClaims) { c.ExpiresAt = jwt.NewNumericDate(start().Add(-time.Minute)) },
		"lives too long": func(c *jwt.RegisteredClaims) { c.ExpiresAt = jwt.NewNumericDate(start().Add(time.Hour)) },
		"no expiry":      func(c *jwt.RegisteredClaims) { c.ExpiresAt = nil },
		"from later":     func(c *jwt.RegisteredClaims) { c.IssuedAt = jwt.NewNumericDate(start().Add(time.Minute)) },
		"other audience": func(c *jwt.RegisteredClaims) { c.Audience = jwt.ClaimStrings{"elsewhere"} },
		"other issuer":   func(c *jwt.RegisteredClaims) { c.Issuer = db.NewID() },
		"other subject":  func(c *jwt.RegisteredClaims) { c.Subject = db.NewID() },
		"no issue time":  func(c *jwt.RegisteredClaims) { c.IssuedAt = nil },
		"issued long ago": func(c *jwt.RegisteredClaims) {
			c.IssuedAt = jwt.NewNumericDate(start().Add(-time.Hour))
		},
		"no jti":   func(c *jwt.RegisteredClaims) { c.ID = "" },
		"huge jti": func(c *jwt.RegisteredClaims) { c.ID = strings.Repeat("x", 129) },
		"zero jti": func(c *jwt.RegisteredClaims) { c.ID = "a\x00b" }, // a text that the database cannot hold
	} {
		c := good()
		change(&c)
		_, err := w.mint(t, sign(c, own, w.key.ID, "JWT"), start())
		require.True(t, fault.Is(err, fault.Unauthenticated), "%s: %v", name, err)
	}
	_, err = w.mint(t, sign(good(), private(t, stranger), w.key.ID, "JWT"), start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "signed by another: %v", err)
	_, err = w.mint(t, sign(good(), own, w.key.ID, "at+jwt"), start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "typed as an access token: %v", err)
	// The account's own key does not make access tokens.
	forged := sign(good(), own, w.key.ID, "at+jwt")
	_, err = w.authenticate(t, forged.Assertion, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "self-made access token: %v", err)
	none := jwt.NewWithClaims(jwt.SigningMethodNone, good())
	none.Header["kid"] = w.key.ID
	text, err := none.SignedString(jwt.UnsafeAllowNoneSignatureType)
	require.NoError(t, err)
	_, err = w.mint(t, iam.Proof{ServiceAccountID: w.sa.ID, Assertion: text}, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "unsigned: %v", err)
}

// A key that is replaced with an overlap counts until its end, and its tokens no longer than it; there are never more
// than two keys.
func TestAReplacedKeyCountsUntilItsEnd(t *testing.T) {
	w := newWorld(t)
	rotate := func(overlap time.Duration, now time.Time) (iam.ServiceAccount, iam.Proof) {
		key, err := iam.NewKey(db.NewID(), now)
		require.NoError(t, err)
		sa := must(t, w.d, func(tx db.Tx) (iam.ServiceAccount, error) {
			return iam.RotateKey(t.Context(), tx, w.sa, key, overlap)
		})
		return sa, iam.Proof{ServiceAccountID: sa.ID, KeyID: key.ID, PrivateKeyPEM: key.PrivateKeyPEM}
	}
	refused := func(p iam.Proof, now time.Time) {
		t.Helper()
		_, err := w.mint(t, p, now)
		require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	}
	_, err := run(t, w.d, func(tx db.Tx) (iam.ServiceAccount, error) {
		return iam.RotateKey(t.Context(), tx, w.sa, w.key, iam.MaxKeyOverlap+1)
	})
	require.Equal(t, "/overlap_seconds", fault.As(err).Fields[0].Pointer)

	end := start().Add(10 * time.Minute)
	sa, second := rotate(10*time.Minute, start())
	require.Equal(t, []iam.PublicKey{
		{ID: w.key.ID, CreatedAt: start(), ExpiresAt: end}, {ID: second.KeyID, CreatedAt: start()},
	}, sa.Keys)
	old, err := w.mint(t, w.byKey(), start())
	require.NoError(t, err)
	require.Equal(t, end, old.ExpiresAt, "a token does not outlive its key")
	tok, err := w.mint(t, second, start())
	require.NoError(t, err)
	require.Equal(t, start().Add(iam.DefaultTokenTTL), tok.ExpiresAt)
	_, err = w.authenticate(t, old.Text, end.Add(-time.Second))
	require.NoError(t, err)

	refused(w.byKey(), end)
	_, err = w.authenticate(t, old.Text, end)
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	listed := must(t, w.d, func(tx db.Tx) ([]iam.ServiceAccount, error) {
		return iam.ListServiceAccounts(t.Context(), tx, w.project.ID, end, db.Page{})
	})
	require.Equal(t, []iam.PublicKey{{ID: second.KeyID, CreatedAt: start()}}, listed[0].Keys)

	_, third := rotate(time.Hour, end)
	sa, fourth := rotate(time.Hour, end)
	require.Len(t, sa.Keys, 2)
	refused(second, end)
	for _, p := range []iam.Proof{third, fourth} {
		_, err = w.mint(t, p, end)
		require.NoError(t, err)
	}
	sa, fifth := rotate(0, end)
	require.Equal(t, []iam.PublicKey{{ID: fifth.KeyID, CreatedAt: end}}, sa.Keys)
	refused(third, end)
	refused(fourth, end)
}

func TestRotatedDisabledAndDeletedEndTokensAtOnce(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, w world, tx db.Tx) error{
		"rotated": func(t *testing.T, w world, tx db.Tx) error {
			key, err := iam.NewKey(db.NewID(), start())
			require.NoError(t, err)
			_, err = iam.RotateKey(t.Context(), tx, w.sa, key, 0)
			return err
		},
		"disabled": func(t *testing.T, w world, tx db.Tx) error {
			_, err := iam.DisableServiceAccount(t.Context(), tx, w.sa, start())
			return err
		},
		"deleted": func(t *testing.T, w world, tx db.Tx) error {
			_, err := iam.DeleteServiceAccount(t.Context(), tx, w.sa, start())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			tok, err := w.mint(t, w.byKey(), start())
			require.NoError(t, err)
			_, err = w.authenticate(t, tok.Text, start())
			require.NoError(t, err)
			must(t, w.d, func(tx db.Tx) (int, error) { return 0, end(t, w, tx) })
			_, err = w.authenticate(t, tok.Text, start())
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
			_, err = w.mint(t, w.byKey(), start())
			require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
		})
	}
}
