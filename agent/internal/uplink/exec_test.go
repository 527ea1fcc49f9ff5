package uplink_test

import (
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

func TestACommandHasItsCallerAtItsEndsAndDiesWithTheStream(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	reading, killed := make(chan struct{}), make(chan struct{})
	n.run(uplink.Config{Exec: func(ctx context.Context, runID string, c execstream.Command) (int, error) {
		if c.Argv[0] == "hang" {
			_, _ = c.Stdin.Read(make([]byte, 1))
			close(reading)
			<-ctx.Done() // it reads no more of its input
			close(killed)
			return 0, ctx.Err()
		}
		input, err := io.ReadAll(c.Stdin)
		fmt.Fprintf(c.Stdout, "%s %v %s", runID, c.Size, input)
		fmt.Fprint(c.Stderr, <-c.Resize)
		return 7, err
	}})
	require.NoError(t, n.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", Service: "main", OpenedAt: n.clock.Now()}))
	s := h.next()
	run := func(member string, argv ...string) (*link.Stream, *execstream.Writer, protocol.Nack_Reason) {
		stream, err := s.conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
		require.NoError(t, err)
		require.NoError(t, stream.Send(&protocol.TunnelRequest{Request: &protocol.TunnelRequest_Exec{
			Exec: &protocol.ExecRequest{MemberId: member, Command: argv, Rows: 2, Columns: 3},
		}}))
		answer := &protocol.TunnelResponse{}
		require.NoError(t, stream.Receive(answer, protocol.MaxHeaderBytes))
		return stream, execstream.NewWriter(stream), answer.GetErrorReason()
	}
	_, _, refused := run("m2", "x")
	require.Equal(t, protocol.Nack_NOT_ASSIGNED, refused)

	stream, to, refused := run("m1", "x")
	require.Empty(t, refused)
	require.NoError(t, to.Send(execstream.Stdin, []byte("in")))
	require.NoError(t, to.Send(execstream.Resize, execstream.Size{Rows: 4, Columns: 5}.Encode()))
	require.NoError(t, to.Send(execstream.StdinEnd, nil))
	for _, want := range []struct {
		kind execstream.Kind
		text string
	}{
		{execstream.Stdout, "m1.1 {2 3} in"},
		{execstream.Stderr, "{4 5}"},
		{execstream.Exit, string(execstream.EncodeExit(7))},
	} {
		kind, payload, err := execstream.Receive(stream)
		require.NoError(t, err)
		require.Equal(t, want.kind, kind)
		require.Equal(t, want.text, string(payload))
	}
	_, _, err := execstream.Receive(stream)
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, stream.CloseWrite())

	stream, to, refused = run("m1", "hang")
	require.Empty(t, refused)
	require.NoError(t, to.Send(execstream.Stdin, []byte("nobody reads this")))
	<-reading
	stream.Abort()
	<-killed
}

// The shim of a container may not answer for a minute; its tenant's command must not keep the node from its hub.
func TestACommandThatEndsLateDelaysNoNewSession(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	begun, answers := make(chan struct{}), make(chan struct{})
	n.run(uplink.Config{Exec: func(ctx context.Context, _ string, _ execstream.Command) (int, error) {
		close(begun)
		<-answers
		return 0, ctx.Err()
	}})
	t.Cleanup(func() { close(answers) })
	require.NoError(t, n.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", Service: "main", OpenedAt: n.clock.Now()}))
	s := h.next()
	stream, err := s.conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
	require.NoError(t, err)
	require.NoError(t, stream.Send(&protocol.TunnelRequest{Request: &protocol.TunnelRequest_Exec{
		Exec: &protocol.ExecRequest{MemberId: "m1", Command: []string{"x"}},
	}}))
	<-begun
	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_GoAway{GoAway: &protocol.GoAway{Reason: "restart"}}})
	h.next()
}

func TestACopyIsOfTheNewestRunOfTheMember(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	n.run(uplink.Config{Copy: func(_ context.Context, runID, path string, into bool, c execstream.Command) (int, error) {
		input, err := io.ReadAll(c.Stdin)
		fmt.Fprint(c.Stdout, runID, path, into, string(input))
		return 1, err
	}})
	require.NoError(t, n.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", Service: "main", OpenedAt: n.clock.Now()}))
	s := h.next()
	for _, member := range []string{"m2", "m1"} {
		stream, err := s.conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
		require.NoError(t, err)
		require.NoError(t, stream.Send(&protocol.TunnelRequest{Request: &protocol.TunnelRequest_Copy{
			Copy: &protocol.CopyRequest{MemberId: member, Path: "/data", Into: true},
		}}))
		answer := &protocol.TunnelResponse{}
		require.NoError(t, stream.Receive(answer, protocol.MaxHeaderBytes))
		if member == "m2" {
			require.Equal(t, protocol.Nack_NOT_ASSIGNED, answer.GetErrorReason())
			continue
		}
		to := execstream.NewWriter(stream)
		require.NoError(t, to.Send(execstream.Stdin, []byte("tar")))
		require.NoError(t, to.Send(execstream.StdinEnd, nil))
		_, payload, err := execstream.Receive(stream)
		require.NoError(t, err)
		require.Equal(t, "m1.1/datatruetar", string(payload))
		kind, payload, err := execstream.Receive(stream)
		require.NoError(t, err)
		require.Equal(t, execstream.Exit, kind)
		require.Equal(t, execstream.EncodeExit(1), payload)
	}
}
