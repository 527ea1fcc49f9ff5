// Package gro reads a UDP socket with generic receive offload (udp(7), UDP_GRO): one system call returns up to 64 KiB
// of datagrams that came one after the other from one sender. It knows no QUIC.
package gro

import (
	"encoding/binary"
	"net"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

const (
	// batchSize is how many runs of datagrams one system call returns, runBytes the length of the longest run, and
	// oobBytes the space of its control messages.
	batchSize = 8
	runBytes  = 64 << 10
	oobBytes  = 192
)

// Conn is a UDP socket whose ReadBatch returns single datagrams, whatever the kernel coalesces. quic-go calls
// ReadBatch, one call at a time; the other ways to read would return runs.
type Conn struct {
	*net.UDPConn
	batch *ipv4.PacketConn
	// runs are of the last system call; those before next have been returned, and the first at bytes of next.
	runs []ipv4.Message
	next int
	at   int
	// read is how many of runs the last system call filled.
	read int
}

// New turns receive offload on where the kernel has it (5.0); elsewhere each run is one datagram. The caller closes the
// socket.
func New(socket *net.UDPConn) *Conn {
	if raw, err := socket.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1)
		})
	}
	c := &Conn{UDPConn: socket, batch: ipv4.NewPacketConn(socket), runs: make([]ipv4.Message, batchSize)}
	data := make([]byte, batchSize*runBytes) // a page takes memory once a run has filled it
	for i := range c.runs {
		c.runs[i].Buffers = [][]byte{data[i*runBytes : (i+1)*runBytes]}
		c.runs[i].OOB = make([]byte, oobBytes)
	}
	return c
}

// ReadBatch fills messages with datagrams, each with the control messages of its run. A datagram longer than its buffer
// is cut, as by the kernel.
func (c *Conn) ReadBatch(messages []ipv4.Message, flags int) (int, error) {
	if c.next == c.read {
		n, err := c.batch.ReadBatch(c.runs, flags)
		if err != nil {
			return 0, err
		}
		c.next, c.at, c.read = 0, 0, n
	}
	n := 0
	for ; n < len(messages) && c.next < c.read; n++ {
		c.take(&messages[n])
	}
	return n, nil
}

// take copies the next datagram.
func (c *Conn) take(m *ipv4.Message) {
	run := &c.runs[c.next]
	data, oob := run.Buffers[0][c.at:run.N], run.OOB[:run.NN]
	if size := segmentBytes(oob); size > 0 && size < len(data) {
		data = data[:size]
	}
	m.N, m.NN, m.Addr, m.Flags = copy(m.Buffers[0], data), copy(m.OOB, oob), run.Addr, run.Flags
	if c.at += len(data); c.at == run.N {
		c.next, c.at = c.next+1, 0
	}
}

// segmentBytes is the length of each datagram of a run but the last, or 0 for a run of one.
func segmentBytes(oob []byte) int {
	for len(oob) > 0 {
		header, body, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return 0
		}
		if header.Level == unix.IPPROTO_UDP && header.Type == unix.UDP_GRO && len(body) >= 4 {
			return int(binary.NativeEndian.Uint32(body))
		}
		oob = rest
	}
	return 0
}
