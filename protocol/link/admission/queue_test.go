package admission

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func always(netip.Prefix) bool { return true }

func TestSourcesTakeTurnsHoweverManyDialsEachHas(t *testing.T) {
	q, now := newAcceptQueue(), time.Unix(0, 0)
	for i := range 100 {
		q.add(netip.MustParseAddrPort(fmt.Sprintf("192.0.2.7:%d", 1000+i)), []byte("dial"), packet{}, now)
	}
	q.add(netip.MustParseAddrPort("198.51.100.1:1"), []byte("dial"), packet{}, now)
	q.add(netip.MustParseAddrPort("[2001:db8::1]:1"), []byte("dial"), packet{}, now)
	var first []string
	for range 3 {
		first = append(first, sourceOf(q.next(now, always).addr.Addr()).String())
	}
	require.Equal(t, []string{"192.0.2.0/24", "198.51.100.0/24", "2001:db8::/64"}, first)
}

func TestSourceWithAllItsSlotsIsPassedOver(t *testing.T) {
	q, now := newAcceptQueue(), time.Unix(0, 0)
	q.add(netip.MustParseAddrPort("192.0.2.7:1"), []byte("dial"), packet{}, now)
	q.add(netip.MustParseAddrPort("198.51.100.1:1"), []byte("dial"), packet{}, now)
	full := netip.MustParsePrefix("192.0.2.0/24")
	require.Equal(t, "198.51.100.1:1", q.next(now, func(p netip.Prefix) bool { return p != full }).addr.String())
	require.Nil(t, q.next(now, func(p netip.Prefix) bool { return p != full }))
	require.Equal(t, "192.0.2.7:1", q.next(now, always).addr.String())
	require.True(t, q.isEmpty())
}

func TestAcceptQueueIsBoundedAndDropsStaleDials(t *testing.T) {
	q, now := newAcceptQueue(), time.Unix(100, 0)
	for i := range 2 * maxPendingDials {
		q.add(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1}), 1), []byte("dial"),
			packet{data: []byte{1}}, now)
	}
	require.Len(t, q.dials, maxPendingDials)
	for i := range 2 * maxSourceDials {
		q.add(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(i+1)), []byte("dial"), packet{data: []byte{1}},
			now.Add(time.Second))
	}
	require.Len(t, q.dials, maxSourceDials,
		"fresh dials replaced the stale ones, and one source has its share")
	require.Nil(t, q.next(now.Add(time.Minute), always))
	require.Empty(t, q.sources)
	require.Empty(t, q.dials)
}
