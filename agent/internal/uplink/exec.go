package uplink

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// byeTime is how long the caller may take to end the stream after the last frame.
const byeTime = 10 * time.Second

// serveExec runs a command in a container.
func (s *session) serveExec(ctx context.Context, stream *link.Stream, r *protocol.ExecRequest) {
	s.serveCommand(ctx, stream, r, s.u.cfg.Exec, execstream.Command{
		Argv: r.GetCommand(), Terminal: r.GetTerminal(),
		Size: execstream.Size{Rows: uint16(r.GetRows()), Columns: uint16(r.GetColumns())},
	})
}

// serveCopy copies files into or out of a container.
func (s *session) serveCopy(ctx context.Context, stream *link.Stream, r *protocol.CopyRequest) {
	var run runner
	if s.u.cfg.Copy != nil {
		run = func(ctx context.Context, runID string, c execstream.Command) (int, error) {
			return s.u.cfg.Copy(ctx, runID, r.GetPath(), r.GetInto(), c)
		}
	}
	s.serveCommand(ctx, stream, r, run, execstream.Command{})
}

// runner runs a command or a copy in the container of a run.
type runner func(ctx context.Context, runID string, c execstream.Command) (exitCode int, err error)

// serveCommand runs a command whose input and output are the frames of the stream. The command is killed when the
// stream ends before it.
func (s *session) serveCommand(ctx context.Context, stream *link.Stream, of interface {
	GetMemberId() string
	GetService() string
}, start runner, command execstream.Command,
) {
	if start == nil {
		refuseTunnel(stream, protocol.Nack_FEATURE_MISSING)
		return
	}
	run, err := s.u.store.NewestRun(of.GetMemberId(), of.GetService())
	if err != nil {
		refuseTunnel(stream, tunnelRefusal(err))
		return
	}
	if err := acceptTunnel(stream); err != nil {
		return
	}
	// Not the tunnel's own context, whose end aborts the stream: the last frame has to arrive.
	alive, end := context.WithCancel(ctx)
	input, feed := io.Pipe()
	resize := make(chan execstream.Size, 1)
	var serving sync.WaitGroup
	serving.Go(func() {
		defer end()
		receiveInput(stream, feed, resize)
	})
	serving.Go(func() {
		// The caller may go while the command takes no input, or while nobody takes its output.
		select {
		case <-stream.Done():
			end()
		case <-alive.Done():
		}
		_ = stream.SetDeadline(time.Now().Add(byeTime))
	})
	out := execstream.NewWriter(stream)
	command.Resize, command.Stdin = resize, input
	command.Stdout, command.Stderr = out.Stream(execstream.Stdout), out.Stream(execstream.Stderr)
	code, err := start(alive, run.ID, command)
	_ = input.Close() // what still comes is dropped
	_ = stream.SetDeadline(time.Now().Add(byeTime))
	switch {
	case alive.Err() != nil:
		stream.Abort()
	case err != nil:
		_ = out.Send(execstream.Failed, []byte(fault.As(err).Public))
	default:
		_ = out.Send(execstream.Exit, execstream.EncodeExit(code))
	}
	_ = stream.CloseWrite()
	serving.Wait()
	_ = stream.Close()
}

// receiveInput passes the caller's frames on until the stream ends.
func receiveInput(stream io.Reader, feed *io.PipeWriter, resize chan execstream.Size) {
	defer func() { _ = feed.CloseWithError(io.ErrUnexpectedEOF) }()
	for {
		kind, payload, err := execstream.Receive(stream)
		if err != nil {
			return
		}
		switch kind { //nolint:exhaustive // the others are the node's own; of a newer caller they mean nothing here
		case execstream.Stdin:
			_, _ = feed.Write(payload) // an ended command takes none
		case execstream.StdinEnd:
			_ = feed.Close()
		case execstream.Resize:
			if size, ok := execstream.DecodeSize(payload); ok {
				select {
				case <-resize: // the newest counts
				default:
				}
				resize <- size
			}
		}
	}
}
