package httpapi

import (
	"errors"
	"io"
	"net/http"
)

// logStream sends log text on as it comes, so that a followed log is seen line by line. It closes its source.
type logStream struct {
	source io.ReadCloser
}

// streamBytes is the piece that is sent on at once.
const streamBytes = 32 << 10

// VisitGetAppInstanceLogsResponse makes it an answer of getAppInstanceLogs.
func (l logStream) VisitGetAppInstanceLogsResponse(w http.ResponseWriter) error {
	defer func() { _ = l.source.Close() }()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	_ = flush.Flush() // the header goes out before the first line is written; a writer that cannot flush sends it later
	piece := make([]byte, streamBytes)
	for {
		n, err := l.source.Read(piece)
		if n > 0 {
			if _, err := w.Write(piece[:n]); err != nil {
				return err
			}
			_ = flush.Flush()
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
