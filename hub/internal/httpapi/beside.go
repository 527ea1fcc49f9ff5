package httpapi

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// beside gives a handler that is not of the contract what every request gets: a request id, one line in the log, and a panic
// that ends one answer instead of the hub; and it charges the request to its budgets. Its answers and credentials are its own.
func (a *api) beside(route string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start, id := a.conf.Now(), requestID(r.Header)
		seen := &seenWriter{ResponseWriter: w}
		w.Header().Set(requestIDHeader, id)
		r.Header.Set(requestIDHeader, id)
		defer func() { //nolint:contextcheck // the request's own context is in r
			p := recover()
			if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the documented sentinel, compared as net/http does
				a.conf.Log.ErrorContext(r.Context(), "panic", slog.String("panic", fmt.Sprint(p)), slog.String("stack", string(debug.Stack())), slog.String("correlation_id", id))
			}
			if p != nil && seen.status == 0 {
				http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
				seen.status = http.StatusInternalServerError
			}
			a.conf.Log.LogAttrs(r.Context(), levelOf(seen.status), "request",
				slog.String("method", methodLabel(r.Method)), slog.String("route", route), slog.Int("status", seen.status),
				slog.Int64("duration_us", a.conf.Now().Sub(start).Microseconds()), slog.Int64("response_bytes", seen.bytes),
				slog.String("correlation_id", id))
			if p != nil {
				panic(http.ErrAbortHandler) // half an answer must not look whole
			}
		}()
		leave, known, err := a.admitBeside(r, start)
		if err != nil {
			refuseBeside(seen, r, fault.As(err))
			return
		}
		defer leave()
		if !known {
			next.ServeHTTP(seen, r) // within the server's deadlines: a challenge, or a token
			return
		}
		next.ServeHTTP(transfer(seen, r))
	})
}

// admitBeside charges a request to the node, or the owner of the registry token, that it comes from, else to its address; known
// is false then.
func (a *api) admitBeside(r *http.Request, now time.Time) (leave func(), known bool, err error) {
	ip := remoteIP(r.RemoteAddr)
	charges, taken, known := a.budgets.ofVisitor(ip), placesOfVisitor(ip), false
	if node := nodeOf(r.TLS); node != "" {
		charges, taken, known = a.budgets.ofNode(node), placesOfNode(node), true
	} else if a.conf.RegistryCaller != nil {
		if subject := a.conf.RegistryCaller(r); subject != "" {
			id := callerID{key: "registry/" + subject}
			charges, taken, known = a.budgets.ofCaller(id), placesOfCaller(id, ""), true
		}
	}
	if err := a.budgets.spend(charges, now); err != nil {
		return nil, false, err
	}
	leave, err = a.places.take(taken...)
	return leave, known, err
}

// refuseBeside answers in the error form of the distribution specification, which registry clients read.
func refuseBeside(w http.ResponseWriter, r *http.Request, f *fault.Error) {
	closeUnread(w, r)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Retry-After", retryAfter(f))
	w.WriteHeader(statusOf(f.Kind))
	// The client has gone when this fails.
	_ = json.NewEncoder(w).Encode(map[string]any{"errors": []map[string]string{{"code": "TOOMANYREQUESTS", "message": f.Public}}})
}

// seenWriter remembers what went out. Unwrap keeps flushing and deadlines working.
type seenWriter struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (w *seenWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *seenWriter) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

func (w *seenWriter) Flush() {
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap is for http.ResponseController.
func (w *seenWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
