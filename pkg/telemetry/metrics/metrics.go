// Package metrics sets up a daemon's metrics for Prometheus. What is counted belongs to the packages that do so.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

const (
	// maxSeries bounds the label sets of one instrument; more are counted together as overflow.
	maxSeries = 1000
	// maxScrapes bounds scrapes at the same time.
	maxScrapes = 4
)

// Metrics is a running set-up.
type Metrics struct {
	registry *prometheus.Registry
	meter    *sdkmetric.MeterProvider
}

// Start makes the provider and installs it as OpenTelemetry's global one, which is where the packages find it.
func Start() (*Metrics, error) {
	m := &Metrics{registry: prometheus.NewRegistry()}
	if err := errors.Join(
		m.registry.Register(collectors.NewGoCollector()),
		m.registry.Register(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})),
	); err != nil {
		return nil, fmt.Errorf("runtime metrics: %w", err)
	}
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(m.registry), otelprometheus.WithoutScopeInfo())
	if err != nil {
		return nil, fmt.Errorf("prometheus exporter: %w", err)
	}
	m.meter = sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter), sdkmetric.WithCardinalityLimit(maxSeries))
	otel.SetMeterProvider(m.meter)
	return m, nil
}

// Handler answers a Prometheus scrape.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, EnableOpenMetrics: true})
}

// Close stops counting.
func (m *Metrics) Close(ctx context.Context) error { return m.meter.Shutdown(ctx) }
