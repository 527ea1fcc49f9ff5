package httpapi

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// streamBytes is the piece that is sent on at once.
	streamBytes = 32 << 10
	// logStreamTime is how long a followed log goes on; the caller may follow it again.
	logStreamTime = time.Hour
	// logCheckEvery is how often it is checked whether the caller may still read it.
	logCheckEvery = time.Minute
	// logCheckTimeout bounds one such check.
	logCheckTimeout = 10 * time.Second
)

// logStream forwards log text as it arrives, and closes its source.
type logStream struct {
	source io.ReadCloser
	// may returns a fault once the caller has lost access; where it is nil, nothing is checked.
	may func() error
	// checkEvery and pieceTime are logCheckEvery and transferTimeout where they are zero.
	checkEvery, pieceTime time.Duration
}

// VisitGetAppInstanceLogsResponse makes it an answer of getAppInstanceLogs.
func (l logStream) VisitGetAppInstanceLogsResponse(w http.ResponseWriter) error {
	stop := l.endInTime()
	defer stop()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	out := newTransferWriter(w, cmp.Or(l.pieceTime, transferTimeout))
	out.Flush() // the header goes out before the first line is written; a writer that cannot flush sends it later
	piece := make([]byte, streamBytes)
	for {
		n, err := l.source.Read(piece)
		if n > 0 {
			if _, err := out.Write(piece[:n]); err != nil {
				return err
			}
			out.Flush()
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// endInTime closes the source after logStreamTime, or when the caller may not read it any more. stop closes it in any
// case.
func (l logStream) endInTime() (stop func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		defer func() { _ = l.source.Close() }()
		again := time.NewTicker(cmp.Or(l.checkEvery, logCheckEvery))
		defer again.Stop()
		limit := time.NewTimer(logStreamTime)
		defer limit.Stop()
		for {
			select {
			case <-done:
				return
			case <-limit.C:
				return
			case <-again.C:
			}
			if l.may != nil && ended(l.may()) {
				return
			}
		}
	})
	return func() {
		close(done)
		running.Wait()
	}
}

// ended reports whether the caller has lost access. A database that does not answer ends no stream.
func ended(err error) bool {
	return fault.Is(err, fault.Unauthenticated) || fault.Is(err, fault.Forbidden) || fault.Is(err, fault.NotFound)
}
