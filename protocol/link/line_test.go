package link

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func always(netip.Prefix) bool { return true }

func TestSourcesTakeTurnsHoweverManyCallersEachHas(t *testing.T) {
	l, now := newLine(), time.Unix(0, 0)
	for i := range 100 {
		l.arrive(netip.MustParseAddrPort(fmt.Sprintf("192.0.2.7:%d", 1000+i)), []byte("dial"), packet{}, now)
	}
	l.arrive(netip.MustParseAddrPort("198.51.100.1:1"), []byte("dial"), packet{}, now)
	l.arrive(netip.MustParseAddrPort("[2001:db8::1]:1"), []byte("dial"), packet{}, now)
	var first []string
	for range 3 {
		first = append(first, sourceOf(l.next(now, always).addr.Addr()).String())
	}
	require.Equal(t, []string{"192.0.2.0/24", "198.51.100.0/24", "2001:db8::/64"}, first)
}

func TestSourceWithAllItsPlacesIsPassedOver(t *testing.T) {
	l, now := newLine(), time.Unix(0, 0)
	l.arrive(netip.MustParseAddrPort("192.0.2.7:1"), []byte("dial"), packet{}, now)
	l.arrive(netip.MustParseAddrPort("198.51.100.1:1"), []byte("dial"), packet{}, now)
	full := netip.MustParsePrefix("192.0.2.0/24")
	require.Equal(t, "198.51.100.1:1", l.next(now, func(p netip.Prefix) bool { return p != full }).addr.String())
	require.Nil(t, l.next(now, func(p netip.Prefix) bool { return p != full }))
	require.Equal(t, "192.0.2.7:1", l.next(now, always).addr.String())
	require.True(t, l.isEmpty())
}

func TestLineIsBoundedAndForgetsStaleCallers(t *testing.T) {
	l, now := newLine(), time.Unix(100, 0)
	for i := range 2 * lineCallers {
		l.arrive(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1}), 1), []byte("dial"),
			packet{data: []byte{1}}, now)
	}
	require.Len(t, l.callers, lineCallers)
	for i := range 2 * sourceCallers {
		l.arrive(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(i+1)), []byte("dial"), packet{data: []byte{1}},
			now.Add(time.Second))
	}
	require.Len(t, l.callers, sourceCallers,
		"the stale ones gave their room to others, and one source has its share of it")
	require.Nil(t, l.next(now.Add(time.Minute), always))
	require.Empty(t, l.sources)
	require.Empty(t, l.callers)
}
