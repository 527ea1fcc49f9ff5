package httpapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

const (
	maxHeaderBytes = 32 << 10
	// maxStreams bounds the requests under way on one HTTP/2 connection; a caller may have as many at once.
	maxStreams = maxCallerRequests
	// drainTime is how long running requests may go on after the order to stop; then their connections are cut.
	drainTime = 10 * time.Second
)

// serveLimits are the limits that hold before a request is read, and for connections that say nothing.
type serveLimits struct {
	// read is for a request with its body, write for its answer. Uploads, downloads and logs have transferTimeout instead.
	readHeader, read, write, idle time.Duration
	conns                         connLimits
}

func defaultServeLimits() serveLimits {
	return serveLimits{
		readHeader: 10 * time.Second,
		read:       40 * time.Second,
		write:      60 * time.Second,
		idle:       2 * time.Minute,
		conns:      connLimits{address: 256, prefix: 1024, total: 8192},
	}
}

// TLSConfig is the hub's side of HTTPS. Clients may show a certificate: a node's pull credential counts only on a
// connection that does. Both functions are asked for every connection, so that a renewed certificate or a new bundle
// needs no restart.
func TLSConfig(certificate func() (*tls.Certificate, error), nodeCAs func() *x509.CertPool) *tls.Config {
	base := &tls.Config{
		MinVersion: tls.VersionTLS12,
		ClientAuth: tls.VerifyClientCertIfGiven,
		NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return certificate()
		},
	}
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		conf := base.Clone()
		conf.GetConfigForClient = nil
		conf.ClientCAs = nodeCAs()
		if conf.ClientCAs == nil {
			// Without this the system's own roots would count as node authorities.
			conf.ClientCAs = x509.NewCertPool()
		}
		return conf, nil
	}
	return base
}

// Serve answers on the listener until ctx ends, then lets running requests finish.
func Serve(ctx context.Context, listener net.Listener, handler http.Handler, conf *tls.Config, log *slog.Logger) error {
	return serve(ctx, listener, handler, conf, log, defaultServeLimits())
}

func serve(ctx context.Context, listener net.Listener, handler http.Handler, conf *tls.Config, log *slog.Logger,
	limits serveLimits,
) error {
	server := &http.Server{
		Handler:           handler,
		TLSConfig:         conf,
		ReadHeaderTimeout: limits.readHeader,
		ReadTimeout:       limits.read,
		WriteTimeout:      limits.write,
		IdleTimeout:       limits.idle,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		MaxHeaderBytes:    maxHeaderBytes,
		ConnContext:       withConn,
		// Handshakes that scanners break off are no errors of the hub.
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	done := make(chan error, 1)
	go func() { done <- server.ServeTLS(newCappedListener(listener, limits.conns, log), "", "") }()
	select {
	case err := <-done:
		return fmt.Errorf("serve HTTPS: %w", err)
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if err := server.Shutdown(drain); err != nil {
		// Followed logs never end by themselves; cutting them is the plan, not a failure.
		_ = server.Close()
	}
	if err := <-done; err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTPS: %w", err)
	}
	return nil
}
