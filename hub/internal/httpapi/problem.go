package httpapi

import (
	"cmp"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// problemType is the prefix of a problem's type; the code follows.
const problemType = "urn:gpuaas:problem:"

// writeFault is the one translation of a fault into HTTP. The cause is never in it.
func writeFault(c *gin.Context, f *fault.Error, correlationID string) {
	p := Problem{
		Status: int32(statusOf(f.Kind)), Code: string(f.Code), Detail: f.Public, CorrelationID: correlationID,
	}
	for _, field := range f.Fields {
		p.Errors = append(p.Errors, ProblemField{Pointer: field.Pointer, Reason: field.Reason, Hint: field.Hint})
	}
	h := c.Writer.Header()
	switch f.Kind {
	case fault.Unauthenticated:
		h.Set("WWW-Authenticate", `Bearer realm="gpuaas"`)
	case fault.RateLimited, fault.Unavailable:
		h.Set("Retry-After", retryAfter(f)) // both always say when to come back (contract)
	default:
	}
	writeProblem(c, p)
}

// writeProblem answers with a problem document (RFC 9457), whose type and title follow from its code and status.
func writeProblem(c *gin.Context, p Problem) {
	p.Type, p.Title = problemType+p.Code, http.StatusText(int(p.Status))
	h := c.Writer.Header()
	h.Del("Content-Length")
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	closeUnread(c.Writer, c.Request)
	c.Writer.WriteHeader(int(p.Status))
	// The header is out; a caller that hung up is nobody's error.
	_ = json.NewEncoder(c.Writer).Encode(p)
}

// retryAfter is the header's value; one second is the least that it can say.
func retryAfter(f *fault.Error) string {
	return strconv.FormatInt(max(1, int64(math.Ceil(f.RetryDelay.Seconds()))), 10)
}

// unreadTime is how long a refused request may still send its body.
const unreadTime = time.Second

// closeUnread closes an HTTP/1 connection after the answer when the body of the request was not read: net/http would
// wait for the body before it answers, and again before it closes. HTTP/2 ends only the stream.
func closeUnread(w http.ResponseWriter, r *http.Request) {
	if _, read := r.Body.(readAlready); !read && r.ProtoMajor == 1 && r.ContentLength != 0 {
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(unreadTime))
	}
}

// statusOf returns the status of a kind; a kind without one of its own is an internal error.
func statusOf(k fault.Kind) int {
	return cmp.Or(map[fault.Kind]int{
		fault.Malformed:          http.StatusBadRequest,
		fault.Unauthenticated:    http.StatusUnauthorized,
		fault.Forbidden:          http.StatusForbidden,
		fault.NotFound:           http.StatusNotFound,
		fault.Conflict:           http.StatusConflict,
		fault.PreconditionFailed: http.StatusPreconditionFailed,
		fault.TooLarge:           http.StatusRequestEntityTooLarge,
		fault.Unprocessable:      http.StatusUnprocessableEntity,
		fault.RateLimited:        http.StatusTooManyRequests,
		fault.Unavailable:        http.StatusServiceUnavailable,
		fault.Internal:           http.StatusInternalServerError,
	}[k], http.StatusInternalServerError)
}
