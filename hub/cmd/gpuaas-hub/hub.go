package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/delivery"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/httpapi"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/metrics"
	"github.com/gpuaas/gpuaas/protocol/link"
)

type logger = *slog.Logger

const closeTimeout = 10 * time.Second

// base is what the hub opens before its parts are wired. Closing it releases everything.
type base struct {
	conf config
	log  logger
	*closers

	keys     *trust.Keys
	process  db.Process
	exporter *metrics.Metrics
	denied   *fleet.DenyList
	ports
	db     *db.DB
	lease  *db.Lease
	sealer *secret.Sealer
}

// hub is the wired program.
type hub struct {
	base

	registry       *artifact.Registry
	dispatcher     *dispatch.Dispatcher
	nodes          *nodes.Service
	handler        http.Handler
	reloadDenyList *loop.Loop
	tail           *event.Tail
	deliverer      *delivery.Deliverer
}

// open checks the machine, opens everything and wires it. What it opened before a failure it closes.
func open(ctx context.Context, c config, log logger, stdout io.Writer) (_ *hub, err error) {
	opened := &closers{}
	defer func() {
		if err != nil {
			_ = opened.close()
		}
	}()
	lock, err := checkDataDir(c.dataDir)
	if err != nil {
		return nil, err
	}
	opened.add(lock.Close)
	process, err := thisProcess(lock)
	if err != nil {
		return nil, err
	}
	keys, err := trust.Open(c.dataDir)
	if err != nil {
		return nil, err
	}
	if err := checkClock(keys, time.Now()); err != nil {
		return nil, err
	}
	exporter, err := startTelemetry(ctx, keys, log, opened)
	if err != nil {
		return nil, err
	}
	denied := &fleet.DenyList{}
	bound, err := listen(ctx, c, keys, denied, log, opened)
	if err != nil {
		return nil, err
	}
	d, lease, err := openHubDatabase(ctx, c, process, log, opened)
	if err != nil {
		return nil, err
	}
	sealer, err := bootstrap(ctx, c, d, stdout)
	if err != nil {
		return nil, err
	}
	return wire(ctx, base{
		conf:     c,
		log:      log,
		closers:  opened,
		keys:     keys,
		process:  process,
		exporter: exporter,
		denied:   denied,
		ports:    bound,
		db:       d,
		lease:    lease,
		sealer:   sealer,
	})
}

func startTelemetry(ctx context.Context, keys *trust.Keys, log logger, opened *closers) (*metrics.Metrics, error) {
	stop, err := telemetry.StartTraces(ctx, telemetry.Program{
		Service: "gpuaas-hub", Version: daemon.Version(), Instance: keys.HubID(),
	}, log)
	if err != nil {
		return nil, err
	}
	opened.add(func() error {
		stop()
		return nil
	})
	m, err := metrics.Start()
	if err != nil {
		return nil, err
	}
	opened.add(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		return m.Close(ctx)
	})
	return m, nil
}

// ports are the listeners, with what their handshakes need.
type ports struct {
	api         net.Listener
	apiAddr     string
	metrics     net.Listener
	certificate *trust.Server
	nodelink    *nodelink.Server
	sessions    *link.Listener
	sessionAddr string
}

// listen opens the ports first: a port in use fails before the database is started.
func listen(ctx context.Context, c config, keys *trust.Keys, denied *fleet.DenyList, log logger, opened *closers,
) (p ports, err error) {
	api, err := listenTCP(ctx, "listen", c.listen)
	if err != nil {
		return p, err
	}
	opened.add(func() error { return ignoreClosed(api.Close()) })
	apiAddr, err := advertised(c.advertiseAPI, api.Addr())
	if err != nil {
		return p, err
	}
	var metrics net.Listener
	if c.metricsListen != "" {
		if metrics, err = listenTCP(ctx, "metrics-listen", c.metricsListen); err != nil {
			return p, err
		}
		opened.add(func() error { return ignoreClosed(metrics.Close()) })
	}
	if err := checkNames(ctx, c, keys, apiAddr, log); err != nil {
		return p, err
	}
	observeBundle(keys)
	certificate := &trust.Server{Keys: keys, Names: serverNames(c, apiAddr), TTL: c.serverLifetime, Now: time.Now}
	nodeLink := nodelink.NewServer(nodelink.Options{
		Bundle:      keys.Bundle,
		Certificate: certificate.Certificate,
		IsDenied:    denied.Has,
		Now:         time.Now,
		Log:         log,
	})
	reset, err := keys.ResetKey()
	if err != nil {
		return p, err
	}
	sessions, err := link.Listen(c.sessionListen, nodeLink.TLS(), (*link.ResetKey)(&reset))
	if err != nil {
		return p, listenTrouble("session-listen", c.sessionListen, "UDP", err)
	}
	opened.add(func() error { return ignoreClosed(sessions.Close()) })
	sessionAddr, err := advertised(c.advertiseSession, sessions.Addr())
	return ports{
		api:         api,
		apiAddr:     apiAddr,
		metrics:     metrics,
		certificate: certificate,
		nodelink:    nodeLink,
		sessions:    sessions,
		sessionAddr: sessionAddr,
	}, err
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// serverNames are the names of the hub's HTTPS certificate.
func serverNames(c config, apiAddr string) []string {
	names := slices.Concat(c.tlsNames, []string{"localhost", "127.0.0.1", "::1"})
	if own, err := os.Hostname(); err == nil {
		names = append(names, own)
	}
	for _, addr := range []string{apiAddr, c.advertiseSession, c.listen} {
		host, _, err := net.SplitHostPort(addr)
		if ip := net.ParseIP(host); err == nil && host != "" && (ip == nil || !ip.IsUnspecified()) {
			names = append(names, host)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// bootstrap makes the first admin. The token is on the disk before it counts, so that a crash in between loses nothing.
func bootstrap(ctx context.Context, c config, d *db.DB, stdout io.Writer) (*secret.Sealer, error) {
	kek, err := secret.LoadKEK(filepath.Join(c.dataDir, "kek.key"))
	if err != nil {
		return nil, err
	}
	sealer := secret.NewSealer(kek)
	token, made, err := withTokenFile(c.tokenFile(), func(token string) (bool, error) {
		return (&command.Service{DB: d, Sealer: sealer}).Bootstrap(ctx, token, time.Now())
	})
	if made {
		showToken(stdout, token, c.tokenFile())
	}
	return sealer, err
}

// wire connects the parts in one direction: nodelink carries, dispatch pushes through it, nodes handles what comes back
// and enqueues; commands and queries serve the REST API. nodelink gets its handler when it serves.
func wire(ctx context.Context, b base) (*hub, error) {
	access := &query.RegistryAccess{DB: b.db, Now: time.Now}
	registry, err := artifact.OpenRegistry(ctx, artifact.RegistryConfig{
		Dir: b.conf.registryPath(), Host: b.apiAddr, SigningKey: b.keys.Token(), TrustDomain: b.keys.TrustDomain(),
		IntentOpen: access.IntentOpen, Authenticate: access.Authenticate, MayPull: access.MayPull, Now: time.Now, Log: b.log,
		Quota: access.Quota, Roots: access.Roots, MinFreeBytes: int64(b.conf.registryMinFree), ShutOut: b.denied.Has,
	})
	if err != nil {
		return nil, err
	}
	dispatcher := dispatch.New(dispatch.Config{
		DB:            b.db,
		Keys:          b.keys,
		Link:          b.nodelink,
		LeaseDuration: b.conf.leaseDuration,
		SyncEvery:     b.conf.resync,
		Now:           time.Now,
		Log:           b.log,
	})
	reload, tail := reloadOfDenyList(b), event.NewTail(b.db)
	commands, err := newCommands(b, registry)
	if err != nil {
		return nil, err
	}
	queries := &query.Service{
		DB: b.db, Registry: registry, Generations: dispatch.NewestGenerations, ImagePull: b.nodelink.ImagePull,
		Tail: tail, Cache: query.NewInstanceCache(b.db),
	}
	server := &httpapi.Server{
		Version:      daemon.Version(),
		Ready:        b.db.Ping,
		Commands:     commands,
		Queries:      queries,
		Keys:         b.keys,
		SessionAddr:  b.sessionAddr,
		RegistryHost: registry.Host(),
		NodeStreams:  b.nodelink,
		Log:          b.log,
	}
	requestKey, err := b.keys.RequestKey()
	if err != nil {
		return nil, err
	}
	handler, err := httpapi.NewHandler(server, httpapi.Config{ //nolint:contextcheck // each request has its own
		Authenticator: httpapi.TokenAuthenticator{
			DB: b.db, Proofs: &iam.Proofs{}, Cache: iam.NewPrincipalCache(b.db),
		}, Auditor: commands,
		Registry: registry, RegistryCaller: registry.Caller, NodeKey: (&fleet.PublicKeys{DB: b.db}).Of, Log: b.log,
		Now: time.Now, RequestKey: requestKey,
	})
	return &hub{
		base:           b,
		registry:       registry,
		dispatcher:     dispatcher,
		nodes:          newNodes(b, dispatcher, registry),
		handler:        handler,
		reloadDenyList: reload,
		tail:           tail,
		deliverer:      newDeliverer(b, queries),
	}, err
}

func reloadOfDenyList(b base) *loop.Loop {
	reload := loop.New("deny list", b.conf.resync, func(ctx context.Context) error {
		return b.denied.Load(ctx, b.db)
	}, b.log)
	for _, reason := range fleet.EndReasons() {
		// A banned or removed node has its next handshake refused, too.
		b.db.OnCommit(reason, func(nodeID string) {
			b.nodelink.Disconnect(nodeID, reason)
			reload.Wake()
		})
	}
	return reload
}

func newDeliverer(b base, queries *query.Service) *delivery.Deliverer {
	return &delivery.Deliverer{
		DB:      b.db,
		Queries: queries,
		Sealer:  b.sealer,
		Client:  delivery.NewClient(b.conf.webhookAddresses(), nil),
		Now:     time.Now,
		Log:     b.log,
	}
}

func newNodes(b base, dispatcher *dispatch.Dispatcher, registry *artifact.Registry) *nodes.Service {
	return nodes.New(nodes.Config{
		DB:         b.db,
		Dispatcher: dispatcher,
		Keys:       b.keys,
		Registry:   registry,
		ReplicaID:  b.process.ID,
		Started:    time.Now(),
		Now:        time.Now,
		Log:        b.log,
	})
}

func newCommands(b base, registry *artifact.Registry) (*command.Service, error) {
	identity, err := b.conf.identity.provider()
	return &command.Service{
		Identity:       identity,
		DB:             b.db,
		Sealer:         b.sealer,
		Keys:           b.keys,
		Bundle:         b.keys.Bundle,
		Registry:       registry,
		APIURL:         "https://" + b.apiAddr,
		LeaseDuration:  b.conf.leaseDuration,
		CertificateTTL: b.conf.certificateLifetime,
		TokenTTL:       b.conf.tokenTTL(),
		MayDial:        b.conf.webhookAddresses().MayDial,
	}, err
}

// run serves until ctx ends, then lets go in order: requests, sessions, loops.
func (h *hub) run(ctx context.Context, stdout io.Writer, hangup <-chan os.Signal) error {
	group, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, h.db.Changes().Close)()
	defer context.AfterFunc(ctx, h.tail.Close)()
	group.Go(func() error {
		return httpapi.Serve(ctx, h.api, h.handler, httpapi.TLSConfig(h.certificate.Certificate, func() *x509.CertPool {
			return h.keys.Bundle().NodeCAs()
		}), h.log)
	})
	group.Go(func() error { return h.nodelink.Serve(ctx, h.sessions, h.nodes) })
	group.Go(func() error { return h.lease.Keep(ctx, h.log) })
	group.Go(func() error { return h.deliverer.Run(ctx) })
	for _, l := range h.loops() {
		group.Go(func() error { return l.Run(ctx) })
	}
	line := ready{
		Ready: true, APIURL: "https://" + h.apiAddr, SessionAddr: h.sessionAddr, CAFile: filepath.Join(h.conf.dataDir,
			trust.CAFile),
		TokenFile: h.conf.tokenFile(), RootFingerprint: h.keys.RootFingerprint(),
	}
	if h.metrics != nil {
		line.MetricsURL = fmt.Sprintf("http://%s/metrics", h.metrics.Addr())
		group.Go(func() error { return h.serveMetrics(ctx) })
	}
	group.Go(func() error {
		for {
			select {
			case <-hangup:
				h.dispatcher.EnqueueAll()
			case <-ctx.Done():
				return nil
			}
		}
	})
	if err := line.print(stdout); err != nil {
		return fmt.Errorf("print the ready line: %w", err)
	}
	h.log.InfoContext(ctx, "serving", slog.String("api_url", line.APIURL), slog.String("session_addr", line.SessionAddr),
		slog.String("version", daemon.Version()))
	err := group.Wait()
	h.log.InfoContext(context.WithoutCancel(ctx), "stopped", slog.Any("error", err))
	return err
}

func (h *hub) serveMetrics(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", h.exporter.Handler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: closeTimeout}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(h.metrics); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
