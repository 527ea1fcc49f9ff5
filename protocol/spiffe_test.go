package protocol_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestLaw02OnlyANodeOrAHubHasAnIdentity(t *testing.T) {
	for _, id := range []string{"a", "z", "A", "Z", "0", "9", ".a", "a-b_c.d", strings.Repeat("x", 128)} {
		u, err := url.Parse("spiffe://example.org/node/" + id)
		require.NoError(t, err)
		domain, kind, got, err := protocol.ParseSPIFFE(u)
		require.NoError(t, err, id)
		require.Equal(t, []string{"example.org", protocol.KindNode, id}, []string{domain, kind, got})
	}
	for _, text := range []string{
		"https://example.org/node/a", "spiffe:///node/a", "spiffe://user@example.org/node/a", "spiffe://example.org/node/a?q",
		"spiffe://example.org/node/a?q=1", "spiffe://example.org/node/a#f", "spiffe://example.org/node",
		"spiffe://example.org/node/a/b", "spiffe://example.org/user/a", "spiffe://example.org/node/",
		"spiffe://example.org/node/.", "spiffe://example.org/node/..",
		"spiffe://example.org/node/" + strings.Repeat("x", 129),
		"spiffe://example.org/node/a:b", "spiffe://example.org/node/a@b", "spiffe://example.org/node/a[b",
		"spiffe://example.org/node/a%60b", "spiffe://example.org/node/a%7Bb", "spiffe://example.org/node/%C3%A4",
	} {
		u, err := url.Parse(text)
		require.NoError(t, err, text)
		_, _, _, err = protocol.ParseSPIFFE(u)
		require.Error(t, err, text)
	}
}
