package imagesign_test

import (
	"crypto/ed25519"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/imagesign"
)

const (
	digest     = "sha256:1111111111111111111111111111111111111111111111111111111111111111"
	repository = "org/acme/demo/runtime"
)

func TestSignatureCountsForItsKeyDigestAndRepositoryOnly(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	other, _, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	payload, err := imagesign.Payload(repository, digest)
	require.NoError(t, err)
	sig := ed25519.Sign(key, payload)

	require.NoError(t, imagesign.Check(pub, payload, sig, repository, digest))
	require.ErrorIs(t, imagesign.Check(other, payload, sig, repository, digest), imagesign.ErrSignature)
	require.ErrorIs(t, imagesign.Check(nil, payload, sig, repository, digest), imagesign.ErrSignature)
	require.ErrorIs(t, imagesign.Check(pub, payload, sig[1:], repository, digest), imagesign.ErrSignature)
	require.ErrorIs(t, imagesign.Check(pub, payload, sig, "org/evil/demo/runtime", digest), imagesign.ErrPayload)
	require.ErrorIs(t, imagesign.Check(pub, payload, sig, repository, strings.Replace(digest, "1", "2", 1)),
		imagesign.ErrPayload)

	for name, text := range map[string]string{
		"another type": strings.Replace(string(payload), "cosign container", "cosign", 1),
		"not JSON":     "x",
		"too large":    string(payload) + strings.Repeat(" ", imagesign.MaxPayloadBytes),
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, imagesign.Check(pub, []byte(text), ed25519.Sign(key, []byte(text)), repository, digest),
				imagesign.ErrPayload)
		})
	}
}

func TestCosignsOwnReferenceWithAHostCounts(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	for _, host := range []string{"hub.example.com/", "localhost:8443/", "localhost/"} {
		payload, err := imagesign.Payload(host+repository, digest)
		require.NoError(t, err)
		require.NoError(t, imagesign.Check(pub, payload, ed25519.Sign(key, payload), repository, digest))
	}
	require.Equal(t, "sha256-"+strings.Repeat("1", 64)+".sig", imagesign.Tag(digest))
}

// Law 1: the repositories of an org end like those of the platform where its slug is apps; a signature for the one does
// not count for the other.
func TestLaw01ASignatureForAnOrgIsNoneForThePlatform(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	for _, host := range []string{"", "hub.example.com/"} {
		payload, err := imagesign.Payload(host+"org/apps/demo/runtime", digest)
		require.NoError(t, err)
		require.ErrorIs(t, imagesign.Check(pub, payload, ed25519.Sign(key, payload), "apps/demo/runtime", digest),
			imagesign.ErrPayload)
	}
}
