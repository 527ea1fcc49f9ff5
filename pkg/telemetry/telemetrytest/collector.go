// Package telemetrytest receives traces as a collector does (OTLP over HTTP, protobuf), for tests.
package telemetrytest

import (
	"compress/gzip"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Span is a span that came in.
type Span struct {
	// Service is the service.name of its sender.
	Service string
	*trace.Span
}

// Trace is the id of the span's trace, in hex.
func (s Span) Trace() string { return hex.EncodeToString(s.TraceId) }

// ID is the span's own id.
func (s Span) ID() string { return hex.EncodeToString(s.SpanId) }

// Parent is the id of the span that it is part of; empty for the root of a trace.
func (s Span) Parent() string { return hex.EncodeToString(s.ParentSpanId) }

// Attribute returns a text attribute; empty where the span has none of this name.
func (s Span) Attribute(key string) string {
	for _, a := range s.Attributes {
		if a.GetKey() == key {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

// Collector keeps the spans that are sent to it.
type Collector struct {
	*httptest.Server

	mu    sync.Mutex
	spans []Span
}

// NewCollector starts a collector that ends with the test.
func NewCollector(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(c.receive))
	t.Cleanup(c.Close)
	return c
}

func (c *Collector) receive(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = unzipped
	}
	raw, err := io.ReadAll(body)
	request := &collector.ExportTraceServiceRequest{}
	if err == nil {
		err = proto.Unmarshal(raw, request)
	}
	if err != nil || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/x-protobuf" {
		http.Error(w, "want an OTLP export of traces", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range request.GetResourceSpans() {
		service := ""
		for _, a := range resource.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, Span{service, s})
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// Spans returns what has come in.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans)
}

// Text is everything that has come in, to search it for what must not be there.
func (c *Collector) Text(t testing.TB) string {
	t.Helper()
	var all []byte
	for _, s := range c.Spans() {
		raw, err := protojson.Marshal(s.Span)
		require.NoError(t, err)
		all = append(all, raw...)
	}
	return string(all)
}
