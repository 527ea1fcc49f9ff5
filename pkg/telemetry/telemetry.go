// Package telemetry sets up a daemon's observability: structured logs without secrets, traces, and metrics for
// Prometheus. It owns the set-up and the list of secret names; what is logged or counted belongs to the packages that
// do so.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

const (
	// maxSeries bounds the label sets of one instrument; more are counted together as overflow.
	maxSeries = 1000
	// maxQueuedSpans bounds the memory for spans while the collector does not answer; further spans are dropped.
	maxQueuedSpans = 4096
	exportTimeout  = 10 * time.Second
	// maxScrapes bounds scrapes at the same time.
	maxScrapes = 4
)

// Config names the program and where it sends telemetry.
type Config struct {
	// Service is gpuaas-hub or gpuaas-agent; Instance is the hub's or the node's id.
	Service, Version, Instance string
	// OTLPEndpoint is the URL of an OTLP/HTTP collector for traces, like http://127.0.0.1:4318. Empty sends none; trace
	// ids are made and passed on all the same.
	OTLPEndpoint string
	// SampleRatio is the share of traces that are sent, 0 … 1; what a caller decided for its own part does not count.
	SampleRatio float64
	Log         *slog.Logger
}

// Telemetry is a running set-up.
type Telemetry struct {
	registry *prometheus.Registry
	tracer   *sdktrace.TracerProvider
	meter    *sdkmetric.MeterProvider
}

// Start makes the providers and installs them as OpenTelemetry's own globals, which is where the rooms find them.
func Start(ctx context.Context, conf Config) (*Telemetry, error) {
	who := resource.NewSchemaless(
		attribute.String("service.name", conf.Service),
		attribute.String("service.version", conf.Version),
		attribute.String("service.instance.id", conf.Instance),
	)
	t := &Telemetry{registry: prometheus.NewRegistry()}
	if err := errors.Join(
		t.registry.Register(collectors.NewGoCollector()),
		t.registry.Register(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})),
	); err != nil {
		return nil, fmt.Errorf("runtime metrics: %w", err)
	}
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(t.registry), otelprometheus.WithoutScopeInfo())
	if err != nil {
		return nil, fmt.Errorf("prometheus exporter: %w", err)
	}
	t.meter = sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter), sdkmetric.WithResource(who),
		sdkmetric.WithCardinalityLimit(maxSeries))

	options := []sdktrace.TracerProviderOption{sdktrace.WithResource(who)}
	if conf.OTLPEndpoint == "" {
		options = append(options, sdktrace.WithSampler(sdktrace.NeverSample()))
	} else {
		endpoint, err := url.JoinPath(conf.OTLPEndpoint, "v1", "traces")
		if err != nil {
			return nil, fmt.Errorf("collector URL: %w", err)
		}
		spans, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(endpoint),
			otlptracehttp.WithTimeout(exportTimeout))
		if err != nil {
			return nil, fmt.Errorf("trace exporter: %w", err)
		}
		options = append(options,
			sdktrace.WithSampler(sampler(conf.SampleRatio)),
			sdktrace.WithBatcher(spans, sdktrace.WithMaxQueueSize(maxQueuedSpans), sdktrace.WithExportTimeout(exportTimeout)))
	}
	t.tracer = sdktrace.NewTracerProvider(options...)

	log := conf.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("telemetry", slog.Any("error", err)) }))
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetTracerProvider(t.tracer)
	otel.SetMeterProvider(t.meter)
	return t, nil
}

// sampler decides alike for what begins here and for what a caller began: anybody may send a traceparent header.
func sampler(ratio float64) sdktrace.Sampler {
	own := sdktrace.TraceIDRatioBased(ratio)
	return sdktrace.ParentBased(own, sdktrace.WithRemoteParentSampled(own), sdktrace.WithRemoteParentNotSampled(own))
}

// Handler answers a Prometheus scrape.
func (t *Telemetry) Handler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, EnableOpenMetrics: true})
}

// Registry takes collectors that are not OpenTelemetry's.
func (t *Telemetry) Registry() prometheus.Registerer { return t.registry }

// Close sends what is left and stops.
func (t *Telemetry) Close(ctx context.Context) error {
	return errors.Join(t.tracer.Shutdown(ctx), t.meter.Shutdown(ctx))
}
