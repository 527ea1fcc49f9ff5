package nodelink_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// between runs something between the commit of a hello and the registration of its connection.
type between struct {
	*nodes.Service
	do func()
}

func (b between) OpenSession(ctx context.Context, peer nodelink.Peer, hello *protocol.Hello,
) (nodelink.Session, error) {
	defer b.do()
	return b.Service.OpenSession(ctx, peer, hello)
}

func TestANodeBannedWhileItsHelloIsAnsweredIsCutOff(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	certificate := &trust.Server{Keys: h.Keys, TTL: 24 * time.Hour, Now: time.Now}
	server := nodelink.NewServer(nodelink.Options{
		Bundle: h.Keys.Bundle, Certificate: certificate.Certificate, Now: time.Now, Log: slog.New(slog.DiscardHandler),
	})
	var err error
	h.Listener, err = link.Listen("127.0.0.1:0", server.TLS(), nil)
	require.NoError(t, err)
	h.DB.OnCommit("node_banned", func(nodeID string) { server.Disconnect(nodeID, "node_banned") })
	ban := sync.OnceFunc(func() {
		if err := (&command.Service{DB: h.DB}).BanNode(t.Context(), h.Admin("ban"), n.ID, "stolen"); err != nil {
			panic(err)
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(ctx, h.Listener, between{h.Nodes, ban}) })
	t.Cleanup(func() { cancel(); serving.Wait() })

	conn, err := n.Dial()
	require.NoError(t, err)
	control, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	require.NoError(t, err)
	require.NoError(t, control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{
		Hello: hubtest.Hello("i1"),
	}}))
	select {
	case <-conn.Done():
	case <-time.After(20 * time.Second):
		require.Fail(t, "the node stays connected")
	}
	require.Empty(t, server.Nodes())
}
