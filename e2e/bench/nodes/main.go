// Command nodes is a process full of simulated nodes: real identities, certificates, sessions and signed usage, no containers.
// The benchmark starts it and tells it what to do (e2e/bench/swarm).
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := swarm.Serve(ctx, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "nodes:", err)
		os.Exit(1) //nolint:gocritic // the process ends; nothing is left to undo
	}
}
