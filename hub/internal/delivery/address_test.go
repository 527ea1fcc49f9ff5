package delivery

import (
	"crypto/x509"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

func TestOnlyPublicAddressesAreDialled(t *testing.T) {
	for _, text := range []string{
		"127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
		"255.255.255.255", "198.18.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254",
		"ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1",
		"2002:7f00:1::", "2001::1", "2001:db8::1", "fec0::1",
	} {
		require.False(t, Addresses{}.MayDial(netip.MustParseAddr(text)), text)
	}
	for _, text := range []string{"8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111"} {
		require.True(t, Addresses{}.MayDial(netip.MustParseAddr(text)), text)
	}
	own := Addresses{Allowed: prefixes("10.1.0.0/16", "fd00::/8")}
	for _, text := range []string{"10.1.0.1", "::ffff:10.1.0.1", "fd00::1"} {
		require.True(t, own.MayDial(netip.MustParseAddr(text)), text)
	}
	require.False(t, own.MayDial(netip.MustParseAddr("10.2.0.1")))
}

// What a name means is checked when it is dialled, and an endpoint cannot send the hub elsewhere.
func TestAnEndpointCannotReachIntoTheHubsNetwork(t *testing.T) {
	inside := listen(t, nil)
	elsewhere := listen(t, func(w http.ResponseWriter, _ request) {
		w.Header().Set("Location", inside.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	cutOff := make(chan bool, 1)
	endless := listen(t, func(w http.ResponseWriter, _ request) {
		for range 32 { // more than the sockets hold
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				cutOff <- true
				return
			}
		}
		cutOff <- false
	})
	roots := x509.NewCertPool()
	for _, e := range []*endpoint{inside, elsewhere, endless} {
		roots.AddCert(e.Certificate())
	}
	h := newHouse(t)
	sealed, err := h.sealer.Seal([]byte(webhook.NewSecret()), webhook.SecretAAD("id"))
	require.NoError(t, err)
	send := func(a Addresses, url string) outcome {
		d := &Deliverer{Sealer: h.sealer, Now: h.now, Client: NewClient(a, roots)}
		return d.send(t.Context(), webhook.Webhook{ID: "id", URL: url, SealedSecret: sealed}, event.Numbered{
			JSON: []byte(`{}`),
		})
	}
	local := Addresses{Allowed: prefixes("127.0.0.0/8", "::1/128")}
	require.Equal(t, "the address is not public", send(Addresses{}, inside.URL).failure)
	byName := strings.Replace(inside.URL, "127.0.0.1", "localhost", 1)
	require.Equal(t, "the address is not public", send(Addresses{}, byName).failure)
	require.Equal(t, "status 307", send(local, elsewhere.URL).failure)
	require.Empty(t, inside.got)
	require.Empty(t, send(local, endless.URL).failure)
	require.True(t, <-cutOff, "all of an answer was read")
	untrusted := &Deliverer{Sealer: h.sealer, Now: h.now, Client: NewClient(local, x509.NewCertPool())}
	to := webhook.Webhook{ID: "id", URL: inside.URL, SealedSecret: sealed}
	failed := untrusted.send(t.Context(), to, event.Numbered{})
	require.Equal(t, "the certificate is not valid", failed.failure)
}
