package httpapi

import (
	"io"
	"net/http"
	"time"
)

// transferTimeout is how long one piece of an upload, a download or a log may take. A transfer has no end of its own.
const transferTimeout = 60 * time.Second

// transfer replaces the server's deadlines with one for each piece of the request's body and of the answer.
func transfer(w http.ResponseWriter, r *http.Request) (http.ResponseWriter, *http.Request) {
	deadlines := http.NewResponseController(w)
	_ = deadlines.SetReadDeadline(time.Time{})
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = transferBody{r.Body, deadlines}
	}
	return newTransferWriter(w, transferTimeout), r
}

// newTransferWriter is transfer for the answer alone, each piece of which may take as long.
func newTransferWriter(w http.ResponseWriter, piece time.Duration) transferWriter {
	deadlines := http.NewResponseController(w)
	_ = deadlines.SetWriteDeadline(time.Time{})
	return transferWriter{w, deadlines, piece}
}

type transferBody struct {
	io.ReadCloser
	deadlines *http.ResponseController
}

// Read implements io.Reader.
func (b transferBody) Read(p []byte) (int, error) {
	_ = b.deadlines.SetReadDeadline(time.Now().Add(transferTimeout))
	n, err := b.ReadCloser.Read(p)
	_ = b.deadlines.SetReadDeadline(time.Time{})
	return n, err
}

type transferWriter struct {
	http.ResponseWriter
	deadlines *http.ResponseController
	piece     time.Duration
}

// Write implements io.Writer.
func (w transferWriter) Write(p []byte) (int, error) {
	_ = w.deadlines.SetWriteDeadline(time.Now().Add(w.piece))
	n, err := w.ResponseWriter.Write(p)
	_ = w.deadlines.SetWriteDeadline(time.Time{})
	return n, err
}

// Flush implements http.Flusher.
func (w transferWriter) Flush() {
	_ = w.deadlines.SetWriteDeadline(time.Now().Add(w.piece))
	_ = w.deadlines.Flush()
	_ = w.deadlines.SetWriteDeadline(time.Time{})
}

// Unwrap is for http.ResponseController.
func (w transferWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// streamWriter sends small pieces, each at the latest keepAlive after the last one.
type streamWriter struct {
	transferWriter
	keepAlive time.Duration
	deadline  time.Time
}

// newStreamWriter is newTransferWriter for a stream. End it once nothing is sent any more.
func newStreamWriter(w http.ResponseWriter, piece, keepAlive time.Duration) *streamWriter {
	return &streamWriter{transferWriter: newTransferWriter(w, piece), keepAlive: keepAlive}
}

// Send writes and flushes a piece. Moving the deadline takes a tenth of the time of a small piece, so that it stays
// where it is while it is at least two pauses away.
func (w *streamWriter) Send(p []byte) error {
	if now := time.Now(); w.deadline.Sub(now) < 2*w.keepAlive {
		w.deadline = now.Add(w.piece)
		_ = w.deadlines.SetWriteDeadline(w.deadline)
	}
	_, err := w.ResponseWriter.Write(p)
	if err == nil {
		err = w.deadlines.Flush()
	}
	return err
}

// End lifts the deadline: it does not count for what the server itself writes at the end of an answer.
func (w *streamWriter) End() { _ = w.deadlines.SetWriteDeadline(time.Time{}) }
