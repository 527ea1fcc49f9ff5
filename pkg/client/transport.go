package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/propagation"
)

const (
	idempotencyKeyHeader = "X-Idempotency-Key"
	requestIDHeader      = "X-Request-ID"
	// maxAttempts bounds one call, the first attempt included; then the last answer or error is the caller's.
	maxAttempts = 6
	// Waiting between attempts: what Retry-After says, at most maxWait; otherwise random below backoffBase<<n, at most
	// maxBackoff.
	maxWait     = 60 * time.Second
	backoffBase = 200 * time.Millisecond
	maxBackoff  = 5 * time.Second
	// maxProblemBytes bounds what is read of an error's body.
	maxProblemBytes = 64 << 10
)

// transport sends one call: headers, retries, and problems as errors.
type transport struct {
	conf Config
	// base is the transport of http; a stream has a connection of its own.
	base *http.Transport
	http *http.Client
}

// Do fits the generated client's HttpRequestDoer.
func (t *transport) Do(r *http.Request) (*http.Response, error) {
	t.prepare(r)
	for attempt := 1; ; attempt++ {
		res, err := t.once(r)
		wait, again := retry(r, res, err, attempt)
		if !again {
			if err != nil {
				return nil, unreachable(r, err)
			}
			return t.judge(res)
		}
		if res != nil {
			_, err = t.judge(res)
		}
		if t.conf.OnRetry != nil {
			t.conf.OnRetry(attempt, wait, err)
		}
		timer := time.NewTimer(wait)
		select {
		case <-r.Context().Done():
			timer.Stop()
			return nil, errors.Join(r.Context().Err(), err)
		case <-timer.C:
		}
		if err = rewind(r); err != nil {
			return nil, err
		}
	}
}

func (t *transport) prepare(r *http.Request) {
	h := r.Header
	if h.Get(requestIDHeader) == "" {
		h.Set(requestIDHeader, newID())
	}
	if r.Method == http.MethodPost && h.Get(idempotencyKeyHeader) == "" {
		// One key for all attempts: a retry after a lost answer must not act twice.
		h.Set(idempotencyKeyHeader, newID())
	}
	h.Set("User-Agent", t.conf.UserAgent)
	h.Set("Accept", "application/json, application/problem+json, */*;q=0.5")
	propagation.TraceContext{}.Inject(r.Context(), propagation.HeaderCarrier(h))
	dropAbsent(r)
}

// dropAbsent removes query parameters and headers that were not set: in the generated types absent is the zero value,
// and no parameter of the contract means anything at zero. The text "0" is a value.
func dropAbsent(r *http.Request) {
	q := r.URL.Query()
	for name, values := range q {
		zero := ""
		switch name {
		case "accelerators", "after", "cpu_millis", "from_number", "limit", "memory_mib", "tail_lines", "to_number":
			zero = "0"
		case "follow":
			zero = "false"
		case "from", "since", "to":
			zero = time.Time{}.Format(time.RFC3339)
		}
		if values[0] == "" || values[0] == zero {
			q.Del(name)
		}
	}
	r.URL.RawQuery = q.Encode()
	maps.DeleteFunc(r.Header, func(_ string, values []string) bool { return len(values) == 1 && values[0] == "" })
}

// once sends the call; a second time where the hub refuses a token that another can be minted for: it ends early where
// this machine slept or the hub's clock was set.
func (t *transport) once(r *http.Request) (*http.Response, error) {
	bearer, err := t.authorize(r)
	if err != nil {
		return nil, err
	}
	res, err := t.http.Do(r)
	account, minted := t.conf.Credential.(*ServiceAccountCredential)
	if err != nil || res.StatusCode != http.StatusUnauthorized || !minted || !canRewind(r) {
		return res, err
	}
	_ = res.Body.Close()
	account.forget(bearer)
	if err := rewind(r); err != nil {
		return nil, err
	}
	if _, err := t.authorize(r); err != nil {
		return nil, err
	}
	return t.http.Do(r)
}

func (t *transport) authorize(r *http.Request) (bearer string, err error) {
	if t.conf.Credential == nil {
		return "", nil
	}
	if bearer, err = t.conf.Credential.Bearer(r.Context()); err == nil && bearer != "" {
		r.Header.Set("Authorization", "Bearer "+bearer)
	}
	return bearer, err
}

// canRewind reports whether the body can be sent again.
func canRewind(r *http.Request) bool {
	return r.Body == nil || r.Body == http.NoBody || r.GetBody != nil
}

// rewind makes a body that was sent ready to be sent again.
func rewind(r *http.Request) (err error) {
	if r.GetBody != nil {
		r.Body, err = r.GetBody()
	}
	return err
}

// retry says whether the same call may and should be sent again, and after how long.
func retry(r *http.Request, res *http.Response, err error, attempt int) (time.Duration, bool) {
	if attempt == maxAttempts || r.Context().Err() != nil || !canRewind(r) {
		return 0, false
	}
	backoff := rand.N(min(maxBackoff, backoffBase<<attempt)) //nolint:gosec // spreads retries, keeps no secret
	if err != nil {
		var (
			problem *Problem
			fatal   *CredentialError
		)
		return backoff, !errors.As(err, &problem) && !errors.As(err, &fatal) && isRetryable(err)
	}
	switch res.StatusCode {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		if seconds, err := strconv.Atoi(res.Header.Get("Retry-After")); err == nil && seconds >= 0 {
			return min(time.Duration(seconds)*time.Second, maxWait), true
		}
		return backoff, true
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		return backoff, true
	default:
		return 0, false
	}
}

// judge turns an error status into a *Problem.
func (t *transport) judge(res *http.Response) (*http.Response, error) {
	if res.StatusCode < http.StatusBadRequest {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }()
	p := &Problem{}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxProblemBytes))
	media, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type"))
	if err != nil || media != "application/problem+json" || json.Unmarshal(text, p) != nil {
		// Not from a hub: a proxy, or something else on that port.
		*p = Problem{
			Code: "not_a_problem_document", Title: http.StatusText(res.StatusCode),
			Detail: "The answer did not come from a hub; check the URL and what lies in between.",
		}
	}
	p.Status = int32(res.StatusCode)
	if p.CorrelationID == "" {
		p.CorrelationID = res.Header.Get(requestIDHeader)
	}
	return nil, p
}

// Error is one line for people: what went wrong, where, and the id that finds it in the hub's log.
func (p *Problem) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s (%s, %d)", p.Detail, p.Code, p.Status)
	for _, e := range p.Errors {
		at := e.Pointer
		if at == "" {
			at = "body"
		}
		fmt.Fprintf(&text, "; %s %s", at, e.Reason)
		if e.Hint != "" {
			fmt.Fprintf(&text, " (%s)", e.Hint)
		}
	}
	if p.CorrelationID != "" {
		text.WriteString("; correlation id " + p.CorrelationID)
	}
	return text.String()
}

// UnreachableError says that no hub answered; the request may still have arrived.
type UnreachableError struct {
	Host  string
	Cause error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("no hub answers at %s: %v", e.Host, e.Cause)
}

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Cause }

func unreachable(r *http.Request, err error) error {
	var (
		problem *Problem
		fatal   *CredentialError
	)
	if errors.As(err, &problem) || errors.As(err, &fatal) || r.Context().Err() != nil {
		return err
	}
	return &UnreachableError{Host: r.URL.Host, Cause: err}
}

func newID() string {
	id, err := uuid.NewV7()
	if err != nil {
		panic(err) // only a kernel without randomness gets here
	}
	return id.String()
}
