package admission

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/ipv4"
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

// quic-go asks for a Retry packet where a token is not its own. A sender with forged ones would else hold all slots,
// each for a second, with one packet each.
func TestADialWithAForgedTokenKeepsNoSlot(t *testing.T) {
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, socket.Close()) })
	s := New(socket)
	for i := range 3 * slotsBeforeStart {
		from := &net.UDPAddr{IP: net.IPv4(198, 51, byte(i), 1), Port: 1}
		m := ipv4.Message{Buffers: [][]byte{[]byte("dial")}, N: 4, Addr: from}
		require.True(t, s.mustWait(&m, initial{destID: []byte("id"), hasToken: true}))
		given := []ipv4.Message{{Buffers: [][]byte{make([]byte, 4)}}}
		require.Equal(t, 1, s.deliver(given), "dial %d finds no slot", i)
		require.Equal(t, from, given[0].Addr)
		require.True(t, s.verifySourceAddress(from))
	}
	require.Empty(t, s.taken)
}
