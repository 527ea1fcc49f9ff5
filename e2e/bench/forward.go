package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// forwardBytes are read in one sample, forwardSamples times after one for warming up.
	forwardBytes   = 256 << 20
	forwardSamples = 10
	// forwardTarget is in Mbit/s.
	forwardTarget = 1000
)

// measureForward reads from an app through the hub and the node's connection, and from a TCP socket on loopback.
func measureForward(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	version := s.version
	defer func() { s.version = version }()
	fast := bytes.Replace(appManifest, []byte("default: 100,"), []byte("default: 1000,"), 1)
	if err := s.release(ctx, fastVersion, fast); err != nil {
		return nil, err
	}
	i, _, err := s.Launch(ctx, "forward")
	if err != nil {
		return nil, err
	}
	defer func() {
		if _, gone := s.Decommission(ctx, i.ID); err == nil {
			err = gone
		}
	}()
	plain, err := serveZeroes(ctx, e)
	if err != nil {
		return nil, err
	}
	port := client.AppInstancePortForward{Port: i.Endpoints[0].Name}
	var forwarded, published, baseline Samples
	var used [3]time.Duration
	for n := range 1 + e.Samples(forwardSamples) {
		through, cpu, err := s.forwardOnce(ctx, func(ctx context.Context) (io.ReadWriteCloser, error) {
			return s.Operator.ForwardPort(ctx, s.Tenant.Project.ID, i.ID, port)
		})
		if err != nil {
			return nil, err
		}
		onNode, err := rateOf(ctx, dialler(i.Endpoints[0].URL[len("http://"):]))
		if err != nil {
			return nil, err
		}
		tcp, err := rateOf(ctx, dialler(plain))
		if err != nil {
			return nil, err
		}
		if n > 0 {
			forwarded, published, baseline = append(forwarded, through), append(published, onNode), append(baseline, tcp)
			for k := range used {
				used[k] += cpu[k]
			}
		}
	}
	coreSeconds := func(name string, d time.Duration) Part {
		return Part{name + ", core-s for each GB", d.Seconds() / (float64(len(forwarded)) * forwardBytes / 1e9)}
	}
	r := forwarded.Into(Result{
		Name: "port-forward", What: "one stream from an app to a client, through hub and node", Unit: "Mbit/s",
		Target: fmt.Sprintf("p50 ≥ %d", forwardTarget),
		Parts: []Part{
			{"the app's published port on its node, without hub", published.P50()},
			coreSeconds("agent", used[0]), coreSeconds("hub", used[1]), coreSeconds("client", used[2]),
		},
		Note: fmt.Sprintf("%d MiB a sample; the app has a core at most; client, hub, node and app share the machine",
			forwardBytes>>20),
	}).against(baseline.P50())
	r.Reached = r.P50 >= forwardTarget
	return []Result{r}, nil
}

// forwardOnce is rateOf with the processor time of agent, hub and client.
func (s *Testbed) forwardOnce(ctx context.Context, dial func(context.Context) (io.ReadWriteCloser, error)) (
	rate float64, cpu [3]time.Duration, err error,
) {
	before, err := s.pathCPU()
	if err != nil {
		return 0, cpu, err
	}
	if rate, err = rateOf(ctx, dial); err != nil {
		return 0, cpu, err
	}
	after, err := s.pathCPU()
	for k := range cpu {
		cpu[k] = after[k] - before[k]
	}
	return rate, cpu, err
}

// pathCPU is the processor time of agent, hub and client so far.
func (s *Testbed) pathCPU() ([3]time.Duration, error) {
	agent, err1 := cpuTime(s.Agent.PID)
	hub, err2 := cpuTime(s.Hub.PID)
	client, err3 := usedCPU()
	return [3]time.Duration{agent, hub, client}, errors.Join(err1, err2, err3)
}

func dialler(addr string) func(context.Context) (io.ReadWriteCloser, error) {
	return func(ctx context.Context) (io.ReadWriteCloser, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
}

// rateOf asks for zeroes by HTTP and returns how fast they come, in Mbit/s.
func rateOf(ctx context.Context, dial func(context.Context) (io.ReadWriteCloser, error)) (float64, error) {
	conn, err := dial(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	began := time.Now()
	if _, err := fmt.Fprintf(conn, "GET /send?bytes=%d HTTP/1.0\r\n\r\n", forwardBytes); err != nil {
		return 0, err
	}
	got, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{conn}, make([]byte, 64<<10))
	if err == nil && got < forwardBytes {
		err = io.ErrUnexpectedEOF
	}
	return float64(got) * 8 / 1e6 / time.Since(began).Seconds(), err
}

// serveZeroes serves what the app serves, without a container.
func serveZeroes(ctx context.Context, e *Env) (addr string, err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, _ *http.Request) {
			for left, piece := forwardBytes, make([]byte, 64<<10); left > 0; left -= len(piece) {
				if _, err := w.Write(piece); err != nil {
					return
				}
			}
		})}
	e.Defer(server.Close)
	go func() { _ = server.Serve(l) }()
	return l.Addr().String(), nil
}
