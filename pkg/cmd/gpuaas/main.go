// Command gpuaas is the command line of a GPUaaS mesh.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/gpuaas/gpuaas/pkg/cli"
	"github.com/gpuaas/gpuaas/pkg/execstream"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	env := cli.Env{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv,
		StderrIsTerminal: term.IsTerminal(int(os.Stderr.Fd())), Version: version,
	}
	if term.IsTerminal(int(os.Stdin.Fd())) {
		env.ReadSecret, env.Terminal = readSecret, rawTerminal
	}
	code := cli.Main(ctx, env, os.Args[1:])
	stop()
	os.Exit(code)
}

// rawTerminal passes each key on as it is pressed, until it is restored.
func rawTerminal() (cli.Terminal, error) {
	in := int(os.Stdin.Fd())
	before, err := term.MakeRaw(in)
	if err != nil {
		return cli.Terminal{}, fmt.Errorf("use the terminal: %w", err)
	}
	signals, changed := make(chan os.Signal, 1), make(chan struct{}, 1)
	signal.Notify(signals, syscall.SIGWINCH)
	go func() {
		defer close(changed)
		for range signals {
			changed <- struct{}{}
		}
	}()
	return cli.Terminal{
		Size: func() execstream.Size {
			columns, rows, err := term.GetSize(in)
			if err != nil || columns < 1 || rows < 1 {
				return execstream.Size{Rows: 24, Columns: 80}
			}
			return execstream.Size{Rows: uint16(rows), Columns: uint16(columns)}
		},
		Changed: changed,
		Restore: func() {
			signal.Stop(signals)
			_ = term.Restore(in, before)
		},
	}, nil
}

func readSecret(prompt string) (string, error) {
	fmt.Fprint(os.Stderr, prompt)
	text, err := term.ReadPassword(int(os.Stdin.Fd()))
	fmt.Fprintln(os.Stderr)
	if err != nil {
		return "", errors.New("nothing was entered")
	}
	return string(text), nil
}

// version is set by the linker.
var version = "dev"
