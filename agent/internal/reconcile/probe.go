package reconcile

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// Times of readiness probes.
const (
	// Until a service is first ready, the pause between two tries is a share of the time that it has had, from firstProbe
	// up to the probe's period: a quick app is seen at once, and a slow one late by no more than that share. A probe that
	// takes long itself, as a command in the container does, is followed by twice that.
	firstProbe         = 5 * time.Millisecond
	probeShare         = 16
	defaultProbePeriod = time.Second
	// Once the service is ready, a probe that succeeded is followed by the probe's period, but by wellPeriod at least, and
	// by wellShare times what it took, up to maxWellPeriod: a command in each of many containers would otherwise cost a
	// part of a core.
	wellPeriod          = time.Second
	wellShare           = 20
	maxWellPeriod       = 5 * time.Second
	defaultProbeTimeout = 2 * time.Second
	failingAfter        = 3
	// maxProbeBytes bounds what is read of an answer: who answers is the workload.
	maxProbeBytes = 64 << 10
)

// prober watches one run of one container.
type prober struct {
	cancel context.CancelFunc

	mu      sync.Mutex
	failing bool
}

func (r *Reconciler) failing(runID string) bool {
	r.mu.Lock()
	p := r.probers[runID]
	r.mu.Unlock()
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failing
}

// probe starts a prober for each running container of its wanted revision, and ends those of others.
func (r *Reconciler) probe(ctx context.Context, l look) {
	r.mu.Lock()
	defer r.mu.Unlock()
	live := make(map[string]bool)
	for _, wanted := range l.desired.Workloads {
		w := wanted.Effective(l.observed.Members[wanted.MemberID])
		for _, c := range l.observed.Containers {
			i := slices.IndexFunc(w.Services, func(s agent.Service) bool { return s.Name == c.Service })
			if c.MemberID != w.MemberID || c.Revision != w.Revision || c.Status != agent.Running || i < 0 {
				continue
			}
			live[c.RunID] = true
			if r.probers[c.RunID] != nil {
				continue
			}
			probing, cancel := context.WithCancel(ctx)
			p := &prober{cancel: cancel}
			r.probers[c.RunID] = p
			ports := l.members[c.MemberID].Ports
			r.running.Go(func() { r.watch(probing, p, c, w.Services[i].Spec, ports) })
		}
	}
	for id, p := range r.probers {
		if !live[id] {
			p.cancel()
			delete(r.probers, id)
		}
	}
}

// watch probes until the run ends. The first success makes the run ready, durably; later it only tells failing from
// well.
func (r *Reconciler) watch(ctx context.Context, p *prober, c agent.Container, s *protocol.Service,
	ports []state.HostPort,
) {
	check := r.checkOf(c, s, ports)
	period, timeout := defaultProbePeriod, defaultProbeTimeout
	if ms := s.GetReadiness().GetPeriodMillis(); ms > 0 {
		period = time.Duration(ms) * time.Millisecond
	}
	if ms := s.GetReadiness().GetTimeoutMillis(); ms > 0 {
		timeout = time.Duration(ms) * time.Millisecond
	}
	ready, bad, began := !c.ReadyAt.IsZero(), 0, time.Now()
	for {
		bounded, cancel := context.WithTimeout(ctx, timeout)
		asked := time.Now()
		err := check(bounded)
		took := time.Since(asked)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && !ready:
			ready = r.becameReady(ctx, c)
		case err == nil:
			bad = 0
			r.setFailing(p, false)
		case ready:
			if bad++; bad == failingAfter {
				r.log.WarnContext(ctx, "readiness probe fails", "member", c.MemberID, "run", c.RunID, "error", err)
				r.setFailing(p, true)
			}
		}
		pause := period
		switch {
		case !ready:
			pause = untilNextProbe(time.Since(began), took, period)
		case err == nil:
			pause = untilSlot(time.Now(), untilWellProbe(took, period))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// untilNextProbe is the pause before a service that is not ready is probed again: it was started so long ago, and the
// last probe took so long.
func untilNextProbe(since, took, period time.Duration) time.Duration {
	return min(max(since/probeShare, 2*took, firstProbe), period)
}

// untilWellProbe is the pause before a service that is ready and well is probed again.
func untilWellProbe(took, period time.Duration) time.Duration {
	return max(period, wellPeriod, min(wellShare*took, maxWellPeriod))
}

// slot is the grid on which an idle node wakes up: for many probes at once rather than for each, because the wake-up
// costs most.
const slot = 250 * time.Millisecond

// untilSlot moves the end of a pause to the nearest slot.
func untilSlot(now time.Time, pause time.Duration) time.Duration {
	return now.Add(pause + slot/2).Truncate(slot).Sub(now)
}

func (r *Reconciler) becameReady(ctx context.Context, c agent.Container) bool {
	failpoint.Hit("agent/ready/seen")
	err := r.timed(ctx, func(now time.Time) error {
		return r.store.UpdateRun(c.RunID, func(run *state.Run) { run.ReadyAt = now })
	})
	if err != nil {
		r.log.ErrorContext(ctx, "cannot keep readiness", "member", c.MemberID, "error", err)
		return false
	}
	failpoint.Hit("agent/ready/kept")
	r.Wake()
	return true
}

func (r *Reconciler) setFailing(p *prober, failing bool) {
	p.mu.Lock()
	changed := p.failing != failing
	p.failing = failing
	p.mu.Unlock()
	if changed {
		r.Wake()
	}
}

// checkOf is the probe of a service, through its published endpoint. A service without a probe is ready when its first
// port answers, and one without ports when it runs.
func (r *Reconciler) checkOf(c agent.Container, s *protocol.Service,
	ports []state.HostPort,
) func(context.Context) error {
	probe := s.GetReadiness()
	kind, port := probe.GetKind(), probe.GetPort()
	if kind == "" && len(s.GetPorts()) > 0 {
		kind, port = "tcp", s.GetPorts()[0].GetName()
	}
	i := slices.IndexFunc(ports, func(p state.HostPort) bool { return p.Name == port })
	var addr string
	if i >= 0 {
		addr = net.JoinHostPort(loopback, strconv.Itoa(int(ports[i].Host)))
	}
	switch {
	case kind == "":
		return func(context.Context) error { return nil }
	case kind == "exec":
		return func(ctx context.Context) error { return r.probeExec(ctx, c.ID, probe.GetCommand()) }
	case addr == "":
		return func(context.Context) error {
			return fmt.Errorf("the probe names port %q, which is not published", port)
		}
	case kind == "http":
		return func(ctx context.Context) error { return probeHTTP(ctx, addr, probe.GetPath()) }
	default:
		return func(ctx context.Context) error { return probeTCP(ctx, addr) }
	}
}

func (r *Reconciler) probeExec(ctx context.Context, containerID string, argv []string) error {
	timeout := defaultProbeTimeout
	if end, bounded := ctx.Deadline(); bounded {
		timeout = time.Until(end)
	}
	code, err := r.runtime.Exec(ctx, containerID, argv, timeout)
	if err == nil && code != 0 {
		err = fmt.Errorf("the probe's command exited with code %d", code)
	}
	return err
}

// probeDialer spares the system calls for keep-alive packets: a probe's connection ends with its answer.
func probeDialer() *net.Dialer { return &net.Dialer{KeepAlive: -1} }

func probeTCP(ctx context.Context, addr string) error {
	conn, err := probeDialer().DialContext(ctx, "tcp4", addr)
	if err != nil {
		return err
	}
	return conn.Close()
}

// probeHTTP wants a status below 400. It follows no redirection: the answer itself shows that the app is up.
func probeHTTP(ctx context.Context, addr, path string) error {
	if path == "" || path[0] != '/' {
		path = "/" + path
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return err
	}
	// A connection of its own each time: a kept one would not show that new callers get in. By hand, because a node does
	// this all the time for each of its workloads, and an http.Transport costs a multiple.
	req.Close = true
	conn, err := probeDialer().DialContext(ctx, "tcp4", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if err := req.Write(conn); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, maxProbeBytes)), req)
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	if err := resp.Body.Close(); err != nil {
		return err
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("the probe got HTTP status %d", resp.StatusCode)
	}
	return nil
}
