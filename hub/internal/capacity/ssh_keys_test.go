package capacity_test

import (
	"crypto/dsa" //nolint:staticcheck // a key of a kind that is refused
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"math/big"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
)

func authorizedKey(t *testing.T, public any) string {
	t.Helper()
	key, err := ssh.NewPublicKey(public)
	require.NoError(t, err)
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
}

func ed25519Key(t *testing.T) string {
	t.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	return authorizedKey(t, public)
}

func TestAnSSHKeyIsOneLineOfAKindThatIsSafe(t *testing.T) {
	rsaKey := func(bits int) string {
		k, err := rsa.GenerateKey(rand.Reader, bits)
		require.NoError(t, err)
		return authorizedKey(t, &k.PublicKey)
	}
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	old := authorizedKey(t, &dsa.PublicKey{
		Parameters: dsa.Parameters{
			P: new(big.Int).Lsh(big.NewInt(1), 1023), Q: new(big.Int).Lsh(big.NewInt(1), 159), G: big.NewInt(2),
		}, Y: big.NewInt(3),
	})
	good := ed25519Key(t)
	for name, c := range map[string]struct {
		text, reason string
	}{
		"Ed25519":           {good, ""},
		"with a comment":    {good + " me@laptop", ""},
		"ECDSA":             {authorizedKey(t, &curve.PublicKey), ""},
		"RSA":               {rsaKey(2048), ""},
		"short RSA":         {rsaKey(1024), "must have at least 2048 bits"},
		"DSA":               {old, "must be an Ed25519, ECDSA or RSA key"},
		"options":           {`command="/bin/sh" ` + good, "must have no options"},
		"two lines":         {good + "\n" + ed25519Key(t), "must be one line"},
		"a carriage return": {good + "\r", "must be one line"},
		"no key":            {"ssh-ed25519 AAAA", "is no line of authorized_keys"},
		"empty":             {"", "is no line of authorized_keys"},
		"a private key":     {"-----BEGIN OPENSSH PRIVATE KEY-----", "is no line of authorized_keys"},
		"RSA beyond the limits": {
			authorizedKey(t, &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 8*2048), E: 65537}),
			"is no line of authorized_keys",
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.reason, capacity.RefusesSSHKey(c.text))
		})
	}
}
