package link_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// answerDNS answers one query with the IPv4 addresses, over a stream (RFC 1035, section 4.2.2).
func answerDNS(c net.Conn, addresses [][4]byte) {
	defer func() { _ = c.Close() }()
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return
	}
	raw := make([]byte, binary.BigEndian.Uint16(size[:]))
	var m dnsmessage.Message
	if _, err := io.ReadFull(c, raw); err != nil || m.Unpack(raw) != nil {
		return
	}
	m.Response, m.Additionals = true, nil
	q := m.Questions[0]
	for _, a := range addresses {
		if q.Type == dnsmessage.TypeA {
			m.Answers = append(m.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
				Body:   &dnsmessage.AResource{A: a},
			})
		}
	}
	if raw, err := m.Pack(); err == nil {
		_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(raw))), raw...))
	}
}

func TestDialTriesAllAddressesOfAName(t *testing.T) {
	s := newSetup(t)
	_, port, err := net.SplitHostPort(s.addr())
	require.NoError(t, err)
	stranger := newAuthority(t).issue(t, protocol.HubSPIFFE(domain, "hub-1"))
	first, err := link.Listen("127.0.0.2:"+port, link.ServerTLS(stranger, s.nodeCA.vouchesFor(protocol.KindNode)), nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = first.Close() })
	go func() { _, _ = first.Accept(t.Context()) }()

	system := net.DefaultResolver
	t.Cleanup(func() { net.DefaultResolver = system })
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		near, far := net.Pipe()
		go answerDNS(far, [][4]byte{{127, 0, 0, 2}, {127, 0, 0, 1}})
		return near, nil
	}}
	ctx := deadline(t)
	go func() { _, _ = s.listener.Accept(ctx) }()
	node, err := link.Dial(ctx, net.JoinHostPort("hub.example", port), s.node, nil)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:"+port, node.RemoteAddr().String())
	require.NoError(t, node.Close(link.CodeOK, ""))
}
