// Command standin stands in for vLLM where no GPU is: it takes the flags of `vllm serve`, serves the documented
// endpoints of its OpenAI-compatible server and the names of its metrics, and repeats the prompt instead of computing.
// It says what it is in its log, its version and each completion. The flags and endpoints are those of
// https://docs.vllm.ai (OpenAI-compatible server, serve arguments, production metrics), version 0.11.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// drainTime is how long requests in flight may take after the signal to stop.
const drainTime = 5 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stdout, nil)))
	err := run(ctx, os.Args[1:])
	if usage, is := errors.AsType[usageError](err); is {
		fmt.Fprintln(os.Stderr, "vllm serve: error:", usage)
		os.Exit(2)
	}
	if err != nil {
		slog.Error("the engine ended", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	f, err := parseFlags(args, os.Getenv)
	if err != nil {
		return err
	}
	have, err := visibleGPUs("/dev")
	if err != nil {
		return err
	}
	if want := f.tensorParallel * f.pipelineParallel; want > max(have, 1) {
		return fmt.Errorf("tensor and pipeline parallelism need %d GPUs, %d are visible", want, have)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(f.host, strconv.Itoa(f.port)))
	if err != nil {
		return err
	}
	server := &http.Server{Handler: newServer(f, time.Now()).handler(), ReadHeaderTimeout: 10 * time.Second}
	slog.Info("a stand-in for vLLM: it computes nothing", "model", f.model, "gpus", have,
		"addr", listener.Addr().String())
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	return server.Shutdown(drain)
}
