package delivery

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const (
	// sendTimeout bounds one try, from the name's resolution to the answer's header.
	sendTimeout = 10 * time.Second
	// maxAnswerBytes of an answer are read, so that its connection can be used again; a longer one ends it.
	maxAnswerBytes = 16 << 10
	// idleConnection is how long an unused connection stays.
	idleConnection = 90 * time.Second
)

var errNotPublic = errors.New("the address is not public")

// NewClient returns a client that reaches only permitted addresses, checked when they are dialled: what a name meant
// earlier does not count. It follows no redirect and uses no proxy. Without roots it trusts those of the machine.
func NewClient(a Addresses, roots *x509.CertPool) *http.Client {
	dialer := &net.Dialer{
		Timeout: sendTimeout,
		Control: func(_, address string, _ syscall.RawConn) error {
			to, err := netip.ParseAddrPort(address)
			if err != nil || !a.MayDial(to.Addr()) {
				return errNotPublic
			}
			return nil
		},
	}
	return &http.Client{
		Timeout:       sendTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext:            dialer.DialContext,
			TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    sendTimeout,
			IdleConnTimeout:        idleConnection,
			MaxIdleConnsPerHost:    2,
			MaxResponseHeaderBytes: maxAnswerBytes,
		},
	}
}

// outcome is how a try went; the zero value is a delivery.
type outcome struct {
	// failure is a fixed text or the status: what an address answers is shown to nobody.
	failure string
	// gone says that the URL wants no more.
	gone bool
}

// ends is why a try, which may be the last one of its event, ends its webhook; empty where that goes on.
func (o outcome) ends(w webhook.Webhook, last bool, now time.Time) webhook.Reason {
	switch {
	case o.gone:
		return webhook.Gone
	case o.failure != "" && last && w.FailingSince != nil && now.Sub(*w.FailingSince) >= disableAfter:
		return webhook.Failing
	default:
		return ""
	}
}

// send tries to deliver an event, within the trace of the request that led to it.
func (d *Deliverer) send(ctx context.Context, w webhook.Webhook, e event.Numbered) (out outcome) {
	if e.Traceparent != "" {
		var span trace.Span
		ctx, span = otel.Tracer("gpuaas/delivery").Start(telemetry.Continue(ctx, e.Traceparent), "deliver event",
			trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
				attribute.String("gpuaas.event_id", e.ID),
				attribute.String("gpuaas.webhook_id", w.ID),
			))
		defer func() {
			if out.failure != "" {
				span.SetStatus(codes.Error, out.failure)
			}
			span.End()
		}()
	}
	signature, err := d.sign(w, e)
	if err != nil {
		return outcome{failure: "the secret cannot be opened"}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.URL, bytes.NewReader(e.JSON))
	if err != nil {
		return outcome{failure: "the URL cannot be used"}
	}
	r.Header.Set("Content-Type", "application/cloudevents+json")
	r.Header.Set("User-Agent", "gpuaas-webhook/1")
	for name, value := range signature {
		r.Header.Set(name, value)
	}
	if e.Traceparent != "" {
		r.Header.Set("traceparent", telemetry.Traceparent(ctx))
	}
	answer, err := d.Client.Do(r)
	if err != nil {
		return outcome{failure: reasonOf(err)}
	}
	defer func() { _ = answer.Body.Close() }()
	_, _ = io.CopyN(io.Discard, answer.Body, maxAnswerBytes)
	if answer.StatusCode/100 == 2 {
		return outcome{}
	}
	return outcome{failure: fmt.Sprintf("status %d", answer.StatusCode), gone: answer.StatusCode == http.StatusGone}
}

// reasonOf tells the owner what to repair, and nothing of the network that the hub is in.
func reasonOf(err error) string {
	var (
		network net.Error
		name    *net.DNSError
		cert    *tls.CertificateVerificationError
	)
	switch {
	case errors.Is(err, errNotPublic):
		return errNotPublic.Error()
	case errors.As(err, &cert):
		return "the certificate is not valid"
	case errors.As(err, &network) && network.Timeout():
		return "no answer in time"
	case errors.As(err, &name):
		return "the name cannot be resolved"
	default:
		return "no connection"
	}
}

// sign makes the headers of Standard Webhooks (https://www.standardwebhooks.com), with a signature for each secret.
func (d *Deliverer) sign(w webhook.Webhook, e event.Numbered) (map[string]string, error) {
	now := d.Now()
	stamp := strconv.FormatInt(now.Unix(), 10)
	var signatures []string
	for _, s := range w.Signing(now) {
		secret, err := d.Sealer.Open(s, webhook.SecretAAD(w.ID))
		if err != nil {
			return nil, err
		}
		key, err := webhook.Key(string(secret))
		if err != nil {
			return nil, err
		}
		mac := hmac.New(sha256.New, key)
		fmt.Fprintf(mac, "%s.%s.%s", e.ID, stamp, e.JSON)
		signatures = append(signatures, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	}
	return map[string]string{
		"webhook-id": e.ID, "webhook-timestamp": stamp, "webhook-signature": strings.Join(signatures, " "),
	}, nil
}
