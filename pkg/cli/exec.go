package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/execstream"
)

// Terminal is the raw terminal of a command in a container.
type Terminal struct {
	// Size is that of now; Changed wakes when it is another.
	Size    func() execstream.Size
	Changed <-chan struct{}
	// Restore makes the terminal what it was.
	Restore func()
}

// commandExit is the exit code of a command in a container, which is the command line's own.
type commandExit int

func (c commandExit) Error() string { return fmt.Sprintf("the command exited with code %d", int(c)) }

// execCommand runs a command in a container of an app.
func (a *app) execCommand() *cobra.Command {
	var (
		body  client.AppInstanceExec
		stdin bool
	)
	c := a.projectAction("exec INSTANCE -- COMMAND [ARG...]", "Run a command in a container of an app",
		cobra.MinimumNArgs(2), func(ctx context.Context, s *session, project string, args []string) error {
			id, err := s.instanceID(ctx, project, args[0])
			if err != nil {
				return err
			}
			body.Command = args[1:]
			s.progress.stop()
			return s.exec(ctx, project, id, body, stdin)
		})
	c.Flags().BoolVarP(&stdin, "stdin", "i", false, "pass the input on")
	c.Flags().BoolVarP(&body.Terminal, "tty", "t", false, "give the command a terminal")
	c.Flags().StringVar(&body.Service, "service", "", "service of the app (default: the first)")
	c.Flags().StringVar(&body.MemberID, "member", "", "member of the app instance (default: the first)")
	return c
}

// exec runs the command and ends with its exit code.
func (s *session) exec(ctx context.Context, project, id string, body client.AppInstanceExec, stdin bool) error {
	terminal := Terminal{Restore: func() {}}
	if body.Terminal && stdin && s.env.Terminal != nil {
		var err error
		if terminal, err = s.env.Terminal(); err != nil {
			return err
		}
		defer terminal.Restore()
		size := terminal.Size()
		body.Rows, body.Columns = int32(size.Rows), int32(size.Columns)
	}
	stream, err := s.hub.Exec(ctx, project, id, body, s.editors()...)
	if err != nil {
		return err
	}
	defer stream.Abort()
	to := execstream.NewWriter(stream)
	go s.sendInput(to, stdin)
	if terminal.Size != nil {
		go func() {
			for range terminal.Changed {
				if to.Send(execstream.Resize, terminal.Size().Encode()) != nil {
					return
				}
			}
		}()
	}
	code, err := receiveOutput(stream, s.env.Stdout, s.env.Stderr)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	_ = stream.CloseWrite()
	_, _ = io.Copy(io.Discard, stream) // the node has ended it
	_ = stream.Close()
	if code != 0 {
		return commandExit(code)
	}
	return nil
}

// sendInput sends the input, or at once its end.
func (s *session) sendInput(to *execstream.Writer, stdin bool) {
	if stdin {
		if _, err := io.Copy(to.Stream(execstream.Stdin), struct{ io.Reader }{s.env.Stdin}); err != nil {
			return
		}
	}
	_ = to.Send(execstream.StdinEnd, nil)
}

// receiveOutput writes the command's output until its end.
func receiveOutput(stream io.Reader, stdout, stderr io.Writer) (code int, err error) {
	for {
		kind, payload, err := execstream.Receive(stream)
		if err != nil {
			return 0, fmt.Errorf("the stream to the command has ended before the command: %w", err)
		}
		switch kind { //nolint:exhaustive // the others are sent by callers
		case execstream.Stdout:
			_, err = stdout.Write(payload)
		case execstream.Stderr:
			_, err = stderr.Write(payload)
		case execstream.Exit:
			code, ok := execstream.DecodeExit(payload)
			if !ok {
				return 0, errors.New("the node sends no exit code")
			}
			return code, nil
		case execstream.Failed:
			return 0, errors.New(printable(string(payload)))
		}
		if err != nil {
			return 0, err
		}
	}
}
