package httpapi

import (
	"encoding/json"
	"io"
	"net/http"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// registryHandler adds a request id, a line in the log, recovery from panics and budgets to the registry, which is not
// part of the contract and authenticates its callers itself.
func (a *api) registryHandler(route string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start, id := a.conf.Now(), requestID(r.Header)
		counted := &countingWriter{ResponseWriter: w}
		w.Header().Set(requestIDHeader, id)
		r.Header.Set(requestIDHeader, id)
		r = r.WithContext(telemetry.WithFields(r.Context(), telemetry.Fields{CorrelationID: id}))
		defer func() { //nolint:contextcheck // the request's own context is in r
			p := recover()
			if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the documented sentinel, compared as net/http does
				a.logPanic(r.Context(), p)
			}
			if p != nil && counted.status == 0 {
				http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
				counted.status = http.StatusInternalServerError
			}
			a.logRequest(r, route, counted.status, counted.bytes, a.conf.Now().Sub(start))
			if p != nil {
				panic(http.ErrAbortHandler) // the client must see that the answer is incomplete
			}
		}()
		caller := a.registryCallerOf(r)
		leave, err := a.admitRegistry(r, caller, start)
		if err != nil {
			refuseRegistry(counted, r, fault.As(err))
			return
		}
		defer leave()
		if !caller.known {
			next.ServeHTTP(counted, r) // within the server's deadlines: a challenge, or a token
			return
		}
		proveConn(r)
		counted.moved = func(n int) { a.budgets.moved(caller.bytes, n, a.conf.Now()) }
		if r.Body != nil && r.Body != http.NoBody {
			r.Body = movedBody{r.Body, counted.moved}
		}
		next.ServeHTTP(transfer(counted, r))
	})
}

// registryCaller is what a request to the registry is charged to.
type registryCaller struct {
	known           bool
	requests, bytes []charge
	slots           []slot
}

// registryCallerOf finds the node, or the owner of the registry token, that a request comes from; without one it is
// charged to its address.
func (a *api) registryCallerOf(r *http.Request) registryCaller {
	if node := nodeOf(r.TLS); node != "" {
		return registryCaller{
			known:    true,
			requests: a.budgets.ofNode(node),
			bytes:    a.budgets.bytesOfNode(node),
			slots:    slotsOfNode(node),
		}
	}
	if a.conf.RegistryCaller != nil {
		if subject, orgSlug := a.conf.RegistryCaller(r); subject != "" {
			id := callerID{key: "registry/" + subject}
			if orgSlug != "" {
				id.org = "registry/" + orgSlug
			}
			return registryCaller{
				known:    true,
				requests: a.budgets.ofCaller(id),
				bytes:    a.budgets.bytesOfCaller(id),
				slots:    slotsOfCaller(id, "", false),
			}
		}
	}
	ip := remoteIP(r.RemoteAddr)
	return registryCaller{requests: a.budgets.ofVisitor(ip), slots: slotsOfVisitor(ip)}
}

// admitRegistry charges a request. What its length says must be left of the bytes; of an unknown length, one.
func (a *api) admitRegistry(r *http.Request, caller registryCaller, now time.Time) (leave func(), err error) {
	if err := a.budgets.check(caller.bytes, int(max(r.ContentLength, 1)), now); err != nil {
		return nil, err
	}
	if err := a.budgets.spend(caller.requests, now); err != nil {
		return nil, err
	}
	return a.slots.acquire(caller.slots...)
}

// movedBody counts what is read of a body.
type movedBody struct {
	io.ReadCloser
	moved func(n int)
}

// Read implements io.Reader.
func (b movedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.moved(n)
	return n, err
}

// refuseRegistry answers in the error form of the distribution specification, which registry clients read.
func refuseRegistry(w http.ResponseWriter, r *http.Request, f *fault.Error) {
	closeUnread(w, r)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Retry-After", retryAfter(f))
	w.WriteHeader(statusOf(f.Kind))
	// The client has gone when this fails.
	_ = json.NewEncoder(w).Encode(map[string]any{"errors": []map[string]string{{
		"code":    "TOOMANYREQUESTS",
		"message": f.Public,
	}}})
}

// countingWriter records the status and the bytes of the answer. Unwrap keeps flushing and deadlines working.
type countingWriter struct {
	http.ResponseWriter
	status int
	bytes  int64
	// moved receives the number of bytes that each write sent; may be nil.
	moved func(n int)
}

func (w *countingWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *countingWriter) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	if w.moved != nil {
		w.moved(n)
	}
	return n, err
}

func (w *countingWriter) Flush() {
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap is for http.ResponseController.
func (w *countingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
