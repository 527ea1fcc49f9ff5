package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// maxSend bounds /send.
const maxSend = 1 << 40

// send writes as many zero bytes as it is asked for.
func (a *app) send(w http.ResponseWriter, r *http.Request) {
	left, err := strconv.ParseInt(r.FormValue("bytes"), 10, 64)
	if err != nil || left < 0 || left > maxSend {
		http.Error(w, "bytes: a number", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Length", strconv.FormatInt(left, 10))
	for piece := make([]byte, 64<<10); left > 0; {
		n, err := w.Write(piece[:min(left, int64(len(piece)))])
		if err != nil {
			return
		}
		left -= int64(n)
	}
}

// digest answers with the SHA-256 of what it gets.
func (a *app) digest(w http.ResponseWriter, r *http.Request) {
	hash := sha256.New()
	if _, err := io.Copy(hash, r.Body); err != nil {
		http.Error(w, "the body did not arrive", http.StatusBadRequest)
		return
	}
	_, _ = fmt.Fprintln(w, hex.EncodeToString(hash.Sum(nil)))
}
