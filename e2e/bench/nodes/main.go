// Command nodes is a process full of simulated nodes: real identities, certificates, sessions and signed usage, no
// containers. The benchmark starts it and tells it what to do (e2e/bench/swarm).
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
)

// gcPercent lets garbage of the nodes lie longer than a program's of its own would: they stand for machines of their
// own, and what is measured shares the processors with them.
const gcPercent = 400

func main() {
	debug.SetGCPercent(gcPercent)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := swarm.Serve(ctx, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "nodes:", err)
		os.Exit(1) //nolint:gocritic // the process ends; nothing is left to undo
	}
}
