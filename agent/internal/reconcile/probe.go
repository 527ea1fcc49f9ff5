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
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
)

// Times of probes.
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
	// defaultLivenessPeriod lies between two liveness probes.
	defaultLivenessPeriod = 5 * time.Second
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
	live, now := make(map[string]bool), r.clock.Now()
	for _, signed := range snap.desired.Workloads {
		m := snap.observed.Members[signed.MemberID]
		w := signed.Effective(m)
		for _, c := range snap.observed.Containers {
			service, probed := w.Probed(c, m, now)
			// Before the network is recorded, as after the loss of the store, its address is not known.
			if !probed || !m.Services[service.Attachment()].NetworkReady {
				continue
			}
			live[c.ID] = true
			if r.probers[c.ID] != nil {
				continue
			}
			probing, cancel := context.WithCancel(r.workContext(ctx, c.MemberID))
			p := &prober{cancel: cancel}
			r.probers[c.ID] = p
			at := addressesOf(snap.members[c.MemberID], service)
			r.running.Go(func() { r.probeLoop(probing, p, c, service.Spec, at) })
			if service.Spec.GetLiveness().GetKind() != "" {
				r.running.Go(func() { r.livenessLoop(probing, c, service.Spec.GetLiveness(), at) })
			}
			if len(c.AcceleratorIDs) > 0 {
				r.running.Go(func() { r.deviceLoop(probing, c) })
			}
		}
	}
	for id, p := range r.probers {
		if !live[id] {
			p.cancel()
			delete(r.probers, id)
		}
	}
}

// addresses are where a service is probed: its published ports, and its own address.
type addresses struct {
	ports []state.HostPort
	ip    string
	// direct: its ports are probed at its own address, as they may be published for another copy of it.
	direct bool
}

func addressesOf(m state.Member, s agent.Service) addresses {
	at := addresses{ip: m.Services[s.Attachment()].IP, direct: s.Copy != ""}
	if at.direct {
		for _, p := range s.Spec.GetPorts() {
			at.ports = append(at.ports, state.HostPort{Name: p.GetName(), Container: uint16(p.GetContainerPort())})
		}
		return at
	}
	at.ports = slices.DeleteFunc(slices.Clone(m.Ports), func(p state.HostPort) bool { return p.Service != s.Name })
	return at
}

// of is the address of a port: the published endpoint, or the container's own for a port that is given as a number.
func (a addresses) of(port string) (addr string, known bool) {
	i := slices.IndexFunc(a.ports, func(p state.HostPort) bool { return p.Name == port })
	switch {
	case i >= 0 && a.direct:
		port = strconv.Itoa(int(a.ports[i].Container))
	case i >= 0:
		return net.JoinHostPort(loopback, strconv.Itoa(int(a.ports[i].Host))), true
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || a.ip == "" {
		return "", false
	}
	return net.JoinHostPort(a.ip, strconv.FormatUint(number, 10)), true
}

// livenessLoop probes until the run ends, or until so many probes in a row have failed that the container is ended,
// which counts as a failure of its service.
func (r *Reconciler) livenessLoop(ctx context.Context, c agent.Container, probe *protocol.Probe, at addresses) {
	check := r.checkOf(c, probe, at)
	period := max(cmp.Or(time.Duration(probe.GetPeriodMillis())*time.Millisecond, defaultLivenessPeriod), slot)
	timeout := cmp.Or(time.Duration(probe.GetTimeoutMillis())*time.Millisecond, defaultProbeTimeout)
	threshold := cmp.Or(int(probe.GetFailureThreshold()), failingAfter)
	counts := time.Now().Add(time.Duration(probe.GetStartPeriodMillis())*time.Millisecond - r.clock.Now().Sub(c.StartedAt))
	for failures := 0; ; {
		if !loop.Pause(ctx, untilSlot(time.Now(), period)) {
			return
		}
		err := check(ctx, timeout)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			failures = 0
		case time.Now().After(counts):
			failures++
		}
		if failures >= threshold && r.endUnalive(ctx, c, fmt.Errorf("the liveness probe failed: %w", err)) {
			return
		}
	}
}

const (
	// lostDevicesAfter is how often in a row a container cannot open its devices until it is ended.
	lostDevicesAfter           = 2
	defaultDeviceCheckInterval = 30 * time.Second
	deviceCheckTimeout         = 30 * time.Second
)

// deviceLoop ends a container that cannot open the devices of its accelerators any more, though the driver finds no
// fault: its cgroup may have lost their rules. A new container gets them again.
func (r *Reconciler) deviceLoop(ctx context.Context, c agent.Container) {
	for failures := 0; loop.Pause(ctx, untilSlot(time.Now(), r.cfg.DeviceCheckInterval)); {
		bounded, cancel := context.WithTimeout(ctx, deviceCheckTimeout)
		lost, err := r.machine.Devices.LostDevices(bounded, c.ID)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.log.DebugContext(ctx, "cannot open a container's devices", slog.String("run_id", c.ID), slog.Any("error", err))
			continue
		case lost == "":
			failures = 0
			continue
		}
		failures++
		if failures >= lostDevicesAfter && r.endUnalive(ctx, c, fmt.Errorf("it cannot open its accelerator: %s", lost)) {
			return
		}
	}
}

// maxProbeDetail bounds what is stored of a failed probe.
const maxProbeDetail = 200

// endUnalive stores that the container is to be ended; the next pass stops it.
func (r *Reconciler) endUnalive(ctx context.Context, c agent.Container, why error) (stored bool) {
	r.log.WarnContext(ctx, "a container is not alive", slog.String("member_id", c.MemberID), slog.String("run_id", c.ID),
		slog.String("service", c.Service), slog.Any("error", why))
	detail := why.Error()
	detail = strings.ToValidUTF8(detail[:min(len(detail), maxProbeDetail)], "?") // else no report could be encoded
	err := r.store.UpdateRun(c.ID, func(run *state.Run) { run.NotAlive = detail })
	if err != nil {
		r.log.ErrorContext(ctx, "cannot store that a container is not alive", slog.String("run_id", c.ID),
			slog.Any("error", err))
		return false
	}
	r.Wake()
	return true
}

// probeLoop probes until the run ends. The first success makes the run ready, durably; later probes only tell healthy
// from failing.
func (r *Reconciler) probeLoop(ctx context.Context, p *prober, c agent.Container, s *protocol.Service, at addresses) {
	check := r.checkOf(c, readinessOf(s), at)
	threshold := cmp.Or(int(s.GetReadiness().GetFailureThreshold()), failingAfter)
	period := cmp.Or(time.Duration(s.GetReadiness().GetPeriodMillis())*time.Millisecond, defaultProbePeriod)
	timeout := cmp.Or(time.Duration(s.GetReadiness().GetTimeoutMillis())*time.Millisecond, defaultProbeTimeout)
	ready, bad, began := !c.ReadyAt.IsZero(), 0, time.Now()
	for {
		asked := time.Now()
		err := check(ctx, timeout)
		took := time.Since(asked)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && !ready:
			ready = r.becameReady(ctx, c)
		case err == nil:
			bad = 0
			r.setFailing(p, false)
		case ready:
			if bad++; bad == threshold {
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

// readinessOf is the readiness probe of a service. One without a probe is ready when its first port answers, and one
// without ports when it runs.
func readinessOf(s *protocol.Service) *protocol.Probe {
	if s.GetReadiness().GetKind() == "" && len(s.GetPorts()) > 0 {
		return &protocol.Probe{Kind: "tcp", Port: s.GetPorts()[0].GetName()}
	}
	return s.GetReadiness()
}

// check is one try of a probe.
type check func(ctx context.Context, timeout time.Duration) error

func (r *Reconciler) checkOf(c agent.Container, probe *protocol.Probe, at addresses) check {
	addr, known := at.of(probe.GetPort())
	switch {
	case probe.GetKind() == "":
		return func(context.Context, time.Duration) error { return nil }
	case probe.GetKind() == "exec":
		return func(ctx context.Context, timeout time.Duration) error {
			return r.probeExec(ctx, c.ID, probe.GetCommand(), timeout)
		}
	case !known:
		return func(context.Context, time.Duration) error {
			return fmt.Errorf("the probe names port %q, which is not published", probe.GetPort())
		}
	case probe.GetKind() == "http":
		return bounded(func(ctx context.Context) error { return probeHTTP(ctx, addr, probe.GetPath()) })
	default:
		return bounded(func(ctx context.Context) error { return probeTCP(ctx, addr) })
	}
}

func bounded(probe func(context.Context) error) check {
	return func(ctx context.Context, timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return probe(ctx)
	}
}

// probeExec counts the time from the start of the command: how long a busy node takes to start it says nothing of the
// container.
func (r *Reconciler) probeExec(ctx context.Context, containerID string, argv []string, timeout time.Duration) error {
	code, err := r.machine.Exec.Exec(ctx, containerID, argv, timeout)
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
	// The status counts. The rest is read for the app's sake, which may log an answer that was cut off.
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("the probe got HTTP status %d", resp.StatusCode)
	}
	return nil
}
