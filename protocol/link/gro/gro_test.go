package gro

import (
	"bytes"
	"encoding/binary"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// datagramBytes is what messages hold of each datagram, as in quic-go.
const datagramBytes = 1452

func newConn(t *testing.T) *Conn {
	t.Helper()
	socket, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, socket.Close()) })
	require.NoError(t, socket.SetReadDeadline(time.Now().Add(10*time.Second)))
	raw, err := socket.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		require.NoError(t, unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVTOS, 1))
	}))
	return New(socket)
}

func newSender(t *testing.T) *net.UDPConn {
	t.Helper()
	sender, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sender.Close()) })
	return sender
}

// sendRun sends data as datagrams of size bytes by one system call.
func sendRun(t *testing.T, from *net.UDPConn, to *Conn, data []byte, size uint16) {
	t.Helper()
	oob := make([]byte, unix.CmsgSpace(2))
	binary.NativeEndian.PutUint64(oob, uint64(unix.CmsgLen(2)))
	binary.NativeEndian.PutUint32(oob[8:], unix.IPPROTO_UDP)
	binary.NativeEndian.PutUint32(oob[12:], unix.UDP_SEGMENT)
	binary.NativeEndian.PutUint16(oob[unix.CmsgLen(0):], size)
	_, _, err := from.WriteMsgUDP(data, oob, to.LocalAddr().(*net.UDPAddr))
	require.NoError(t, err)
}

func newMessages(n int) []ipv4.Message {
	m := make([]ipv4.Message, n)
	for i := range m {
		m[i].Buffers, m[i].OOB = [][]byte{make([]byte, datagramBytes)}, make([]byte, 128)
	}
	return m
}

func TestARunIsReturnedDatagramByDatagram(t *testing.T) {
	c, sender, other := newConn(t), newSender(t), newSender(t)
	const size, count, last = 1000, 11, 300
	data := make([]byte, (count-1)*size+last)
	for i := range data {
		data[i] = byte(i / size)
	}
	sendRun(t, sender, c, data, size)
	_, err := other.WriteTo([]byte("single"), c.LocalAddr())
	require.NoError(t, err)
	_, err = other.WriteTo(nil, c.LocalAddr())
	require.NoError(t, err)

	messages := newMessages(8)
	var got [][]byte
	for len(got) < count+2 {
		n, err := c.ReadBatch(messages, 0)
		require.NoError(t, err)
		require.Positive(t, n)
		for _, m := range messages[:n] {
			from := sender
			if len(got) >= count {
				from = other
			}
			require.Equal(t, from.LocalAddr().String(), m.Addr.String())
			control, err := unix.ParseSocketControlMessage(m.OOB[:m.NN])
			require.NoError(t, err)
			require.True(t, slices.ContainsFunc(control, func(m unix.SocketControlMessage) bool {
				return m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_TOS
			}), "each datagram has its run's control messages")
			got = append(got, bytes.Clone(m.Buffers[0][:m.N]))
		}
		if len(got) <= count {
			require.Less(t, c.read, count, "the kernel coalesces what one call has sent")
		}
	}
	for i := range count {
		require.Equal(t, data[i*size:min((i+1)*size, len(data))], got[i], "datagram %d", i)
	}
	require.Equal(t, "single", string(got[count]))
	require.Empty(t, got[count+1])
}

func TestALongDatagramIsCut(t *testing.T) {
	c, sender := newConn(t), newSender(t)
	_, err := sender.WriteTo(bytes.Repeat([]byte("x"), 2*datagramBytes), c.LocalAddr())
	require.NoError(t, err)
	_, err = sender.WriteTo([]byte("next"), c.LocalAddr())
	require.NoError(t, err)
	messages := newMessages(1)
	for _, want := range []int{datagramBytes, len("next")} {
		n, err := c.ReadBatch(messages, 0)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Equal(t, want, messages[0].N)
	}
}

// The end of reading loses nothing that has been read.
func TestADeadlineEndsReadingAfterTheRun(t *testing.T) {
	c, sender := newConn(t), newSender(t)
	sendRun(t, sender, c, make([]byte, 3*100), 100)
	messages := newMessages(2)
	n, err := c.ReadBatch(messages, 0)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.NoError(t, c.SetReadDeadline(time.Now()))
	n, err = c.ReadBatch(messages, 0)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	_, err = c.ReadBatch(messages, 0)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}
