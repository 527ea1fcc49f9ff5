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
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
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
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol/link"
)

type logger = *slog.Logger

const (
	sweepEvery    = 10 * time.Second
	sequenceEvery = time.Second
	accrueEvery   = time.Minute
	postEvery     = time.Minute
	tidyEvery     = time.Hour
	collectEvery  = time.Hour
	deleteEvery   = time.Hour
	// rotateEvery leaves three passes to empty a slot of raw usage before it is written to again.
	rotateEvery = time.Hour
	// uploadsKept is how long an unfinished upload to the registry stays.
	uploadsKept  = 24 * time.Hour
	closeTimeout = 10 * time.Second
)

// hub is the wired program.
type hub struct {
	conf config
	log  logger
	// closers run in reverse order.
	closers []func() error

	keys      *trust.Keys
	db        *db.DB
	process   db.Process
	lease     *db.Lease
	sealer    *secret.Sealer
	telemetry *telemetry.Telemetry
	registry  *artifact.Registry

	api         net.Listener
	sessions    *link.Listener
	metrics     net.Listener
	apiAddr     string
	sessionAddr string
	certificate *trust.Server

	nodelink   *nodelink.Server
	dispatcher *dispatch.Dispatcher
	nodes      *nodes.Service
	commands   *command.Service
	shutOut    fleet.DenyList
	handler    http.Handler

	reloadShutOut *loop.Loop
}

func (h *hub) onClose(fn func() error) { h.closers = append(h.closers, fn) }

func (h *hub) close() error {
	var all error
	for _, fn := range slices.Backward(h.closers) {
		all = errors.Join(all, fn())
	}
	return all
}

// open checks the machine, opens everything and wires it. What it opened before a failure it closes.
func open(ctx context.Context, c config, log logger, stdout io.Writer) (h *hub, err error) {
	h = &hub{conf: c, log: log}
	// A name of its own: a failing return sets h to nil before this runs.
	opened := h
	defer func() {
		if err != nil {
			_ = opened.close()
		}
	}()
	lock, err := checkDataDir(c.dataDir)
	if err != nil {
		return nil, err
	}
	h.onClose(lock.Close)
	if h.process, err = thisProcess(lock); err != nil {
		return nil, err
	}
	if h.keys, err = trust.Open(c.dataDir); err != nil {
		return nil, err
	}
	if err := checkClock(h.keys, time.Now()); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{h.openTelemetry, h.listen, h.openDatabase} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	if err := h.bootstrap(ctx, stdout); err != nil {
		return nil, err
	}
	return h, h.wire(ctx)
}

func (h *hub) openTelemetry(ctx context.Context) (err error) {
	h.telemetry, err = telemetry.Start(ctx, telemetry.Config{
		Service: "gpuaas-hub", Version: daemon.Version(), Instance: h.keys.HubID(), OTLPEndpoint: h.conf.otlpEndpoint,
		SampleRatio: 1, Log: h.log,
	})
	if err != nil {
		return err
	}
	h.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		return h.telemetry.Close(ctx)
	})
	return nil
}

// listen takes the ports first: a port in use fails before the database is started.
func (h *hub) listen(ctx context.Context) (err error) {
	if h.api, err = listenTCP(ctx, "listen", h.conf.listen); err != nil {
		return err
	}
	h.onClose(func() error { return ignoreClosed(h.api.Close()) })
	if h.apiAddr, err = advertised(h.conf.advertiseAPI, h.api.Addr()); err != nil {
		return err
	}
	if h.conf.metricsListen != "" {
		if h.metrics, err = listenTCP(ctx, "metrics-listen", h.conf.metricsListen); err != nil {
			return err
		}
		h.onClose(func() error { return ignoreClosed(h.metrics.Close()) })
	}
	if err := h.checkNames(ctx); err != nil {
		return err
	}
	h.observeBundle()
	h.certificate = &trust.Server{Keys: h.keys, Names: h.names(), TTL: h.conf.serverLifetime, Now: time.Now}
	h.nodelink = nodelink.NewServer(nodelink.Options{
		Bundle:      h.keys.Bundle,
		Certificate: h.certificate.Certificate,
		IsDenied:    h.shutOut.Has,
		Now:         time.Now,
		Log:         h.log,
	})
	reset, err := h.keys.ResetKey()
	if err != nil {
		return err
	}
	if h.sessions, err = link.Listen(h.conf.sessionListen, h.nodelink.TLS(), (*link.ResetKey)(&reset)); err != nil {
		return listenTrouble("session-listen", h.conf.sessionListen, "UDP", err)
	}
	h.onClose(func() error { return ignoreClosed(h.sessions.Close()) })
	h.sessionAddr, err = advertised(h.conf.advertiseSession, h.sessions.Addr())
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// names are what clients may call the hub.
func (h *hub) names() []string {
	names := slices.Concat(h.conf.tlsNames, []string{"localhost", "127.0.0.1", "::1"})
	if own, err := os.Hostname(); err == nil {
		names = append(names, own)
	}
	for _, addr := range []string{h.apiAddr, h.conf.advertiseSession, h.conf.listen} {
		host, _, err := net.SplitHostPort(addr)
		if ip := net.ParseIP(host); err == nil && host != "" && (ip == nil || !ip.IsUnspecified()) {
			names = append(names, host)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// openDatabase keeps other hub processes out before it migrates the schema.
func (h *hub) openDatabase(ctx context.Context) (err error) {
	if h.db, err = connectDatabase(ctx, h.conf, h.log, h.onClose); err != nil {
		return err
	}
	if h.lease, err = db.TakeLease(ctx, h.db, h.process); err != nil {
		return err
	}
	h.onClose(func() error { return h.lease.End(context.WithoutCancel(ctx)) })
	return db.Migrate(ctx, h.db)
}

// openDatabase opens the operator's database, or a private one, and migrates its schema.
func openDatabase(ctx context.Context, c config, log logger, onClose func(func() error)) (*db.DB, error) {
	d, err := connectDatabase(ctx, c, log, onClose)
	if err != nil {
		return nil, err
	}
	return d, db.Migrate(ctx, d)
}

// connectDatabase opens the operator's database, or a private one, as it is.
func connectDatabase(ctx context.Context, c config, log logger, onClose func(func() error)) (*db.DB, error) {
	url, err := c.databaseURL()
	if err != nil {
		return nil, err
	}
	if url == "" {
		server, err := managed.Start(ctx, managed.Config{
			Dir: filepath.Join(c.dataDir, "postgres"), BinDir: c.postgresBinDir,
			Log: log,
		})
		if err != nil {
			return nil, err
		}
		onClose(server.Close)
		url = server.URL()
	}
	d, err := db.Open(ctx, url)
	if c.databaseURLFile != "" && fault.Is(err, fault.Unavailable) {
		err = fault.New(fault.Unavailable, db.CodeDatabaseUnavailable, "The database that "+c.databaseURLFile+
			" names does not answer: check that it runs, that this machine reaches it, and that the URL is right.", err)
	}
	if err != nil {
		return nil, err
	}
	onClose(func() error { d.Close(); return nil })
	return d, nil
}

// bootstrap makes the first admin. The token is on the disk before it counts, so that a crash in between loses nothing.
func (h *hub) bootstrap(ctx context.Context, stdout io.Writer) error {
	kek, err := secret.LoadKEK(filepath.Join(h.conf.dataDir, "kek.key"))
	if err != nil {
		return err
	}
	h.sealer = secret.NewSealer(kek)
	token, made, err := withTokenFile(h.conf.tokenFile(), func(token string) (bool, error) {
		return (&command.Service{DB: h.db, Sealer: h.sealer}).Bootstrap(ctx, token, time.Now())
	})
	if made {
		showToken(stdout, token, h.conf.tokenFile())
	}
	return err
}

// wire connects the rooms.
func (h *hub) wire(ctx context.Context) (err error) {
	access := &command.RegistryAccess{DB: h.db, Now: time.Now}
	h.registry, err = artifact.OpenRegistry(ctx, artifact.RegistryConfig{
		Dir: h.conf.registryPath(), Host: h.apiAddr, SigningKey: h.keys.Token(), TrustDomain: h.keys.TrustDomain(),
		IntentOpen: access.IntentOpen, Authenticate: access.Authenticate, MayPull: access.MayPull, Now: time.Now, Log: h.log,
		Quota: access.Quota, Roots: access.Roots, MinFreeBytes: int64(h.conf.registryMinFree), ShutOut: h.shutOut.Has,
	})
	if err != nil {
		return err
	}
	h.wireNodes()
	h.commands = h.newCommands()
	h.handler, err = httpapi.NewHandler(h.server(), httpapi.Config{ //nolint:contextcheck // each request has its own
		Authenticator: httpapi.TokenAuthenticator{DB: h.db, Proofs: &iam.Proofs{}}, Auditor: &command.FailureAudit{DB: h.db},
		Registry: h.registry, RegistryCaller: h.registry.Caller, NodeKey: (&fleet.PublicKeys{DB: h.db}).Of, Log: h.log,
		Now: time.Now,
	})
	return err
}

// wireNodes connects the node side in one direction: nodelink carries, dispatch pushes through it, nodes handles what
// comes back and enqueues. nodelink gets its handler when it serves.
func (h *hub) wireNodes() {
	h.dispatcher = dispatch.New(dispatch.Config{
		DB:            h.db,
		Keys:          h.keys,
		Link:          h.nodelink,
		LeaseDuration: h.conf.leaseDuration,
		SyncEvery:     h.conf.resync,
		Now:           time.Now,
		Log:           h.log,
	})
	h.reloadShutOut = loop.New("shut-out", h.conf.resync, func(ctx context.Context) error {
		return h.shutOut.Load(ctx, h.db)
	}, h.log)
	h.nodes = nodes.New(nodes.Config{
		DB:         h.db,
		Dispatcher: h.dispatcher,
		Keys:       h.keys,
		Registry:   h.registry,
		ReplicaID:  h.process.ID,
		Started:    time.Now(),
		Disconnect: h.nodelink.Disconnect,
		Now:        time.Now,
		Log:        h.log,
	})
}

// server gives the REST face its commands and queries.
func (h *hub) server() *httpapi.Server {
	return &httpapi.Server{
		Version:      daemon.Version(),
		Ready:        h.db.Ping,
		Commands:     h.commands,
		Queries:      &query.Service{DB: h.db, Registry: h.registry, Generation: dispatch.NewestGeneration},
		Keys:         h.keys,
		SessionAddr:  h.sessionAddr,
		RegistryHost: h.registry.Host(),
		Logs:         h.nodelink,
	}
}

func (h *hub) newCommands() *command.Service {
	return &command.Service{
		DB:             h.db,
		Sealer:         h.sealer,
		Keys:           h.keys,
		Bundle:         h.keys.Bundle,
		Registry:       h.registry,
		LeaseDuration:  h.conf.leaseDuration,
		CertificateTTL: h.conf.certificateLifetime,
		EnqueueNode:    h.dispatcher.Enqueue,
		Disconnect:     h.nodelink.Disconnect,
		ShutOut:        h.dismiss,
		Log:            h.log,
	}
}

// dismiss ends the connection of a node that was banned or removed, and has its next handshake refused.
func (h *hub) dismiss(nodeID, reason string) {
	h.nodelink.Disconnect(nodeID, reason)
	h.reloadShutOut.Wake()
}

// loops are what works by itself.
func (h *hub) loops() []*loop.Loop {
	sequencer := &event.Sequencer{DB: h.db, Holder: h.keys.HubID(), Now: time.Now}
	return append(h.dispatcher.Loops(), h.reloadShutOut,
		loop.New("sweep", min(sweepEvery, h.conf.resync), h.nodes.Sweep, h.log),
		loop.New("sequencer", sequenceEvery, func(ctx context.Context) error { _, err := sequencer.Pass(ctx); return err },
			h.log),
		loop.New("accrue", accrueEvery, h.accrue, h.log),
		loop.New("post", min(postEvery, h.conf.postingInterval), h.post, h.log),
		loop.New("tidy", tidyEvery, h.tidy, h.log),
		loop.New("bundle", bundleCheckEvery, h.checkBundle, h.log),
		loop.New("collect", collectEvery, h.collect, h.log),
		loop.New("usage slots", rotateEvery, h.rotateUsage, h.log),
		loop.New("retention", deleteEvery, h.deleteOld, h.log),
	)
}

func (h *hub) accrue(ctx context.Context) error {
	return h.commands.AccrueAllocations(ctx, time.Now())
}

func (h *hub) post(ctx context.Context) error {
	return (&command.PostPending{DB: h.db, Interval: h.conf.postingInterval, Log: h.log}).Do(ctx, time.Now())
}

// collect removes what nothing refers to from the registry. A restored hub waits with it until it knows again what
// runs.
func (h *hub) collect(ctx context.Context) error {
	missed, err := db.ReadTx(ctx, h.db, func(tx db.Tx) ([]fleet.Node, error) { return fleet.Resyncing(ctx, tx) })
	if err != nil || len(missed) > 0 {
		return err
	}
	gone, err := h.registry.Collect(ctx)
	if gone != (artifact.Collected{}) {
		h.log.InfoContext(ctx, "the registry's garbage was removed", slog.Int("manifests", gone.Manifests),
			slog.Int("layers", gone.Layers),
			slog.Int("blobs", gone.Blobs), slog.Int64("bytes", gone.Bytes))
	}
	return err
}

func (h *hub) rotateUsage(ctx context.Context) error {
	return (&command.RotateUsage{DB: h.db, Log: h.log}).Do(ctx, time.Now())
}

func (h *hub) deleteOld(ctx context.Context) error {
	return (&command.DeleteOld{DB: h.db, Retention: h.conf.retention, Log: h.log}).Do(ctx, time.Now())
}

func (h *hub) tidy(ctx context.Context) error {
	now := time.Now()
	_, purgeErr := command.PurgeIdempotency(ctx, h.db, now)
	_, uploadErr := h.registry.PurgeUploads(ctx, now.Add(-uploadsKept))
	_, settleErr := (&command.SettleMembers{DB: h.db, Log: h.log}).Do(ctx, now)
	return errors.Join(purgeErr, uploadErr, settleErr)
}

// run serves until ctx ends, then lets go in order: requests, sessions, loops.
func (h *hub) run(ctx context.Context, stdout io.Writer, hangup <-chan os.Signal) error {
	group, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, h.db.Changes().Close)()
	group.Go(func() error {
		return httpapi.Serve(ctx, h.api, h.handler, httpapi.TLSConfig(h.certificate.Certificate, func() *x509.CertPool {
			return h.keys.Bundle().NodeCAs()
		}), h.log)
	})
	group.Go(func() error { return h.nodelink.Serve(ctx, h.sessions, h.nodes) })
	group.Go(func() error { return h.lease.Keep(ctx, h.log) })
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
	mux.Handle("GET /metrics", h.telemetry.Handler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: closeTimeout}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(h.metrics); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
