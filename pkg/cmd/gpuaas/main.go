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
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	env := cli.Env{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv,
		StderrIsTerminal: term.IsTerminal(int(os.Stderr.Fd())), Version: version,
	}
	if term.IsTerminal(int(os.Stdin.Fd())) {
		env.ReadSecret = readSecret
	}
	code := cli.Main(ctx, env, os.Args[1:])
	stop()
	os.Exit(code)
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
