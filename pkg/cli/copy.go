package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/filecopy"
)

// copyCommand copies files between this machine and a container of an app.
func (a *app) copyCommand() *cobra.Command {
	var body client.AppInstanceCopy
	c := a.projectAction("cp SOURCE DESTINATION", "Copy files into or out of a container of an app; one of both is "+
		"INSTANCE:/PATH", cobra.ExactArgs(2), func(ctx context.Context, s *session, project string, args []string) error {
		instance, remote, out := inContainer(args[0])
		local := args[1]
		if !out {
			var in bool
			if instance, remote, in = inContainer(args[1]); !in {
				return usage(errors.New("one of source and destination is INSTANCE:/PATH"))
			}
			local = args[0]
		} else if _, _, both := inContainer(args[1]); both {
			return usage(errors.New("one of source and destination is on this machine"))
		}
		id, err := s.instanceID(ctx, project, instance)
		if err != nil {
			return err
		}
		body.Path, body.Into = remote, !out
		transfer := s.unpack
		if body.Into {
			transfer = s.pack
		}
		return s.copyFiles(ctx, project, id, body, func(stream *client.Stream, notes io.Writer) (int, error) {
			return transfer(stream, local, remote, notes)
		})
	})
	c.Flags().StringVar(&body.Service, "service", "", "service of the app (default: the first)")
	c.Flags().StringVar(&body.MemberID, "member", "", "member of the app instance (default: the first)")
	return c
}

// inContainer splits INSTANCE:/PATH; ok is false for a path of this machine.
func inContainer(text string) (instance, file string, ok bool) {
	instance, file, found := strings.Cut(text, ":")
	if !found || instance == "" || strings.Contains(instance, "/") || !path.IsAbs(file) || path.Clean(file) == "/" {
		return "", "", false
	}
	return instance, path.Clean(file), true
}

// copyFiles runs one copy and reports what the node left out or why it failed.
func (s *session) copyFiles(ctx context.Context, project, id string, body client.AppInstanceCopy,
	transfer func(stream *client.Stream, notes io.Writer) (int, error),
) error {
	stream, err := s.hub.Copy(ctx, project, id, body, s.editors()...)
	if err != nil {
		return err
	}
	defer stream.Abort()
	notes := &bytes.Buffer{}
	code, err := transfer(stream, notes)
	note := printable(strings.TrimSpace(notes.String()))
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	case code != 0:
		return fmt.Errorf("not all was copied: %s", note)
	}
	_ = stream.CloseWrite()
	_, _ = io.Copy(io.Discard, stream) // the node has ended it
	s.progress.stop()
	if note != "" {
		fmt.Fprintln(s.env.Stderr, note)
	}
	return stream.Close()
}

// pack sends a file or directory of this machine.
func (s *session) pack(stream *client.Stream, local, _ string, notes io.Writer) (code int, err error) {
	local, err = filepath.EvalSymlinks(local)
	if err == nil {
		local, err = filepath.Abs(local)
	}
	if err != nil {
		return 0, err
	}
	dir, err := os.OpenRoot(filepath.Dir(local))
	if err != nil {
		return 0, err
	}
	defer func() { _ = dir.Close() }()
	var (
		packing sync.WaitGroup
		left    filecopy.Report
		failed  error
	)
	packing.Go(func() {
		to := execstream.NewWriter(stream)
		if left, failed = filecopy.Pack(dir, filepath.Base(local), to.Stream(execstream.Stdin)); failed == nil {
			failed = to.Send(execstream.StdinEnd, nil)
		} else {
			stream.Abort()
		}
	})
	code, err = receiveOutput(stream, io.Discard, notes)
	if err == nil && code != 0 {
		stream.Abort() // what is still packed has nowhere to go, and fails
		packing.Wait()
		return code, nil
	}
	if packing.Wait(); failed != nil {
		return 0, failed
	}
	fmt.Fprintln(notes, left)
	return code, err
}

// unpack receives a file or directory: under its own name where local is a directory, else as local.
func (s *session) unpack(stream *client.Stream, local, remote string, notes io.Writer) (code int, err error) {
	name := path.Base(remote)
	if info, err := os.Stat(local); err != nil || !info.IsDir() {
		local, name = filepath.Dir(filepath.Clean(local)), filepath.Base(local)
	}
	dir, err := os.OpenRoot(local)
	if err != nil {
		return 0, err
	}
	defer func() { _ = dir.Close() }()
	from, to := io.Pipe()
	var (
		unpacking sync.WaitGroup
		left      filecopy.Report
		failed    error
	)
	unpacking.Go(func() {
		if left, failed = filecopy.Unpack(dir, name, from); failed == nil {
			_, failed = io.Copy(io.Discard, from) // the padding of the stream
		}
		_ = from.CloseWithError(failed)
	})
	code, err = receiveOutput(stream, to, notes)
	if err != nil {
		_ = to.CloseWithError(err)
		unpacking.Wait()
		return 0, err
	}
	_ = to.Close()
	if unpacking.Wait(); failed != nil && code == 0 {
		return 0, failed
	}
	fmt.Fprintln(notes, left)
	return code, nil
}
