package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// bundleCheckEvery is how often the hub checks when its trust bundle ends.
const bundleCheckEvery = 12 * time.Hour

// checkNames refuses names for which the hub's authority may not vouch: clients would refuse the hub under them. Nodes
// do not check names, so that a name which no flag gave is only a warning.
func checkNames(ctx context.Context, c config, keys *trust.Keys, apiAddr string, log logger) error {
	given := c.tlsNames
	if host, _, err := net.SplitHostPort(c.advertiseAPI); err == nil && host != "" {
		given = append([]string{host}, given...)
	}
	const remedy = "give it to `gpuaas-hub init --tls-name`, or replace the authority with `gpuaas-hub trust revoke " +
		"--key-id … --tls-name …`"
	for _, name := range given {
		if !keys.Permits(name) {
			return fault.New(fault.Malformed, codeTLSNameNotPermitted, fmt.Sprintf("The hub's authority may not vouch for "+
				"%s: %s.", name, remedy), nil)
		}
	}
	if host, _, err := net.SplitHostPort(apiAddr); err == nil && !keys.Permits(host) {
		log.WarnContext(ctx, "the hub's authority may not vouch for this address: "+remedy, slog.String("address", host))
	}
	return nil
}

// observeBundle exports when the trust bundle ends.
func observeBundle(keys *trust.Keys) {
	// An instrument that cannot be made observes nothing; its error would be a misspelt name.
	_, _ = otel.Meter("gpuaas/trust").Int64ObservableGauge("gpuaas.trust.bundle.expires",
		metric.WithDescription("Unix time at which the newest trust bundle ends; absent where it has no end."),
		metric.WithUnit("s"),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			if end, ok := keys.Bundle().ExpiresAt(); ok {
				o.Observe(end.Unix())
			}
			return nil
		}))
}

// checkBundle says in the log, weeks ahead, that the trust bundle ends.
func (h *hub) checkBundle(ctx context.Context, now time.Time) error {
	end, soon, ok := h.keys.BundleEnd(now)
	switch {
	case !ok:
		h.log.InfoContext(ctx, "the trust bundle has no end: sign the next one with `gpuaas-hub trust renew`")
	case now.After(end):
		h.log.ErrorContext(ctx, "the trust bundle has ended; nothing stops, but nodes report it: sign the next one with "+
			"`gpuaas-hub trust renew`", slog.Time("expires_at", end))
	case soon:
		h.log.WarnContext(ctx, "the trust bundle ends soon: sign the next one with `gpuaas-hub trust renew`",
			slog.Time("expires_at", end))
	}
	return nil
}
