package reconcile

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
)

// Times of readiness probes.
const (
	// Until a service is ready, the pause between two probes is 1/probeShare of its age, from firstProbe up to the probe's
	// period: readiness is noticed late by at most that share. A slow probe is followed by twice its own duration.
	firstProbe         = 5 * time.Millisecond
	probeShare         = 16
	defaultProbePeriod = time.Second
	// Once it is ready, a successful probe is followed by the probe's period, by healthyPeriod at least, and by
	// healthyShare times its own duration up to maxHealthyPeriod: probes of many containers must not cost a core.
	healthyPeriod       = time.Second
	healthyShare        = 20
	maxHealthyPeriod    = 5 * time.Second
	defaultProbeTimeout = 2 * time.Second
	failingAfter        = 3
	// maxProbeBytes bounds an answer: it comes from the workload.
	maxProbeBytes = 64 << 10
)

// prober probes one run of one container.
type prober struct {
	cancel  context.CancelFunc
	failing atomic.Bool
}

func (r *Reconciler) failing(runID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.probers[runID]
	return p != nil && p.failing.Load()
}

// probe starts a prober for each running container of its desired revision, and ends all others.
func (r *Reconciler) probe(ctx context.Context, snap snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	live := make(map[string]bool)
	for _, signed := range snap.desired.Workloads {
		w := signed.Effective(snap.observed.Members[signed.MemberID])
		for _, c := range snap.observed.Containers {
			service, probed := w.Probed(c)
			if !probed {
				continue
			}
			live[c.ID] = true
			if r.probers[c.ID] != nil {
				continue
			}
			probing, cancel := context.WithCancel(ctx)
			p := &prober{cancel: cancel}
			r.probers[c.ID] = p
			ports := snap.members[c.MemberID].Ports
			r.running.Go(func() { r.probeLoop(probing, p, c, service.Spec, ports) })
		}
	}
	for id, p := range r.probers {
		if !live[id] {
			p.cancel()
			delete(r.probers, id)
		}
	}
}

// probeLoop probes until the run ends. The first success makes the run ready, durably; later probes only tell healthy
// from failing.
func (r *Reconciler) probeLoop(ctx context.Context, p *prober, c agent.Container, s *protocol.Service,
	ports []state.HostPort,
) {
	check := r.checkOf(c, s, ports)
	period := cmp.Or(time.Duration(s.GetReadiness().GetPeriodMillis())*time.Millisecond, defaultProbePeriod)
	timeout := cmp.Or(time.Duration(s.GetReadiness().GetTimeoutMillis())*time.Millisecond, defaultProbeTimeout)
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
				r.log.WarnContext(ctx, "readiness probe fails", slog.String("member_id", c.MemberID),
					slog.String("run_id", c.ID), slog.Any("error", err))
				r.setFailing(p, true)
			}
		}
		pause := period
		switch {
		case !ready:
			pause = untilNextProbe(time.Since(began), took, period)
		case err == nil:
			pause = untilSlot(time.Now(), untilHealthyProbe(took, period))
		}
		if !loop.Pause(ctx, pause) {
			return
		}
	}
}

// untilNextProbe is the pause before the next probe of a service that is not ready; since is the service's age, took
// the duration of the last probe.
func untilNextProbe(since, took, period time.Duration) time.Duration {
	return min(max(since/probeShare, 2*took, firstProbe), period)
}

// untilHealthyProbe is the pause before the next probe of a service that is ready and healthy.
func untilHealthyProbe(took, period time.Duration) time.Duration {
	return max(period, healthyPeriod, min(healthyShare*took, maxHealthyPeriod))
}

// slot is the grid on which an idle node wakes up: once for many probes, because the wake-up costs most.
const slot = 250 * time.Millisecond

// untilSlot moves the end of a pause to the nearest slot.
func untilSlot(now time.Time, pause time.Duration) time.Duration {
	return now.Add(pause + slot/2).Truncate(slot).Sub(now)
}

func (r *Reconciler) becameReady(ctx context.Context, c agent.Container) bool {
	failpoint.Hit("agent/ready/observed")
	err := r.withClock(func(now time.Time) error {
		return r.store.UpdateRun(c.ID, func(run *state.Run) { run.ReadyAt = now })
	})
	if err != nil {
		r.log.ErrorContext(ctx, "cannot store readiness", slog.String("member_id", c.MemberID), slog.Any("error", err))
		return false
	}
	failpoint.Hit("agent/ready/saved")
	r.Wake()
	return true
}

func (r *Reconciler) setFailing(p *prober, failing bool) {
	if p.failing.Swap(failing) != failing {
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
	end, _ := ctx.Deadline() // probeLoop sets one
	code, err := r.machine.Exec.Exec(ctx, containerID, argv, time.Until(end))
	if err == nil && code != 0 {
		err = fmt.Errorf("the probe's command exited with code %d", code)
	}
	return err
}

// probeDialer sets no keep-alive: a probe's connection ends with its answer.
func probeDialer() *net.Dialer { return &net.Dialer{KeepAlive: -1} }

func probeTCP(ctx context.Context, addr string) error {
	conn, err := probeDialer().DialContext(ctx, "tcp4", addr)
	if err != nil {
		return err
	}
	return conn.Close()
}

// probeHTTP succeeds on a status below 400. It follows no redirection: the answer itself shows that the app is up.
func probeHTTP(ctx context.Context, addr, path string) error {
	if path == "" || path[0] != '/' {
		path = "/" + path
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return err
	}
	// A new connection each time: an old one would not show that new clients can connect. Written by hand, because a node
	// probes all the time and an http.Transport costs a multiple.
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
