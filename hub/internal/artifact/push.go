package artifact

import (
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// MaxIntentBytes bounds what is pushed with the credentials of one publish intent.
const MaxIntentBytes = 256 << 30

// errIntentFull refuses what exceeds MaxIntentBytes.
var errIntentFull = errors.New("more than 256 GiB were pushed with this publish intent")

// refusal is why a push is not stored. The request's context carries it to the response, because the library would
// answer 500 without a reason.
type refusal struct{ err atomic.Pointer[error] }

type refusalKey struct{}

// refuse records the reason in the request's context and returns it.
func refuse(ctx context.Context, err error) error {
	if r, ok := ctx.Value(refusalKey{}).(*refusal); ok {
		r.set(err)
	}
	return err
}

func (r *refusal) set(err error) { r.err.Store(&err) }

func (r *refusal) reason() error {
	if err := r.err.Load(); err != nil {
		return *err
	}
	return nil
}

// pushWriter answers a refused push with its reason.
type pushWriter struct {
	http.ResponseWriter
	refused  *refusal
	answered bool
}

// WriteHeader is part of http.ResponseWriter.
func (w *pushWriter) WriteHeader(status int) {
	if err := w.refused.reason(); err != nil && status >= http.StatusBadRequest && !w.answered {
		w.answered = true
		answerRefused(w.ResponseWriter, err)
		return
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write is part of http.ResponseWriter.
func (w *pushWriter) Write(p []byte) (int, error) {
	if w.answered {
		return len(p), nil
	}
	return w.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *pushWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// answerRefused answers with a status after which clients do not repeat the push, as they would after 429.
func answerRefused(w http.ResponseWriter, err error) {
	space, ok := errors.AsType[*spaceError](err)
	switch {
	case ok && space.full:
		writeError(w, http.StatusInsufficientStorage, "DENIED", err.Error()+"; tell a platform admin")
	case ok:
		writeError(w, http.StatusForbidden, "DENIED", "quota_exceeded: "+err.Error()+"; ask a platform admin to raise it")
	case errors.Is(err, errIntentFull):
		writeError(w, http.StatusForbidden, "DENIED", "quota_exceeded: "+err.Error()+"; ask for another one")
	case fault.Is(err, fault.Unauthenticated):
		writeError(w, http.StatusForbidden, "DENIED", fault.As(err).Public)
	default:
		writeError(w, http.StatusServiceUnavailable, "UNAVAILABLE", "try again in a moment")
	}
}

// refuseUnread answers a refused push whose body is not read.
func refuseUnread(w http.ResponseWriter, req *http.Request, err error) {
	closeUnread(w, req)
	answerRefused(w, err)
}

// push serves a request that may store something. A declared length above a limit is refused before the body is read.
func (r *Registry) push(w http.ResponseWriter, req *http.Request, c claims, repository string) {
	owner, _ := OrgSlugOf(repository)
	ctx := req.Context()
	if err := r.intentOpen(req, c, repository); err != nil {
		refuseUnread(w, req, err)
		return
	}
	if r.conf.Quota != nil && owner != "" {
		limit, err := r.conf.Quota(ctx, owner)
		if err != nil {
			r.log.ErrorContext(ctx, "read the quota of a push", "error", err)
			refuseUnread(w, req, err)
			return
		}
		r.store.space.setLimit(repository, limit)
	}
	declared := max(req.ContentLength, 0)
	err := r.store.space.fits(repository, declared)
	if err == nil {
		err = r.intents.fits(c.Subject, declared)
	}
	if err != nil {
		refuseUnread(w, req, err)
		r.dropUpload(ctx, req.URL.Path, repository)
		return
	}
	refused := &refusal{}
	req = req.WithContext(context.WithValue(ctx, refusalKey{}, refused))
	req.Body = &countedBody{ReadCloser: req.Body, refused: refused, count: func(n int64) error {
		return r.intents.add(c.Subject, n, r.conf.Now())
	}}
	r.app.ServeHTTP(&pushWriter{ResponseWriter: w, refused: refused}, req)
	if refused.reason() != nil {
		r.dropUpload(ctx, req.URL.Path, repository)
	}
}

// intentOpen refuses a request that begins an upload or stores a manifest after the token's publish intent has ended: a
// token outlives its intent by minutes. An upload that began before continues.
func (r *Registry) intentOpen(req *http.Request, c claims, repository string) error {
	intentID, isIntent := strings.CutPrefix(c.Subject, subjectIntent)
	isManifest := strings.HasPrefix(req.URL.Path, "/v2/"+repository+"/manifests/")
	if !isIntent || (req.Method != http.MethodPost && !isManifest) {
		return nil
	}
	err := r.conf.IntentOpen(req.Context(), intentID)
	if err != nil && !fault.Is(err, fault.Unauthenticated) {
		r.log.ErrorContext(req.Context(), "read the publish intent of a push", "error", err)
	}
	return err
}

// dropUpload removes the stored part of a refused upload.
func (r *Registry) dropUpload(ctx context.Context, urlPath, repository string) {
	id, ok := strings.CutPrefix(urlPath, "/v2/"+repository+"/blobs/uploads/")
	if !ok || uuid.Validate(id) != nil {
		return
	}
	err := r.store.Delete(context.WithoutCancel(ctx), path.Join(repositoriesRoot, repository, "_uploads", id))
	if err != nil && !isAbsent(err) {
		r.log.ErrorContext(ctx, "remove a refused upload", "error", err)
	}
}

// pushTo returns the repository that the request stores something in; empty where it stores nothing, or may not. A
// repository's own name may hold /blobs/ or /manifests/: an app may be called so.
func pushTo(req *http.Request, c claims) string {
	if req.Method != http.MethodPost && req.Method != http.MethodPut && req.Method != http.MethodPatch {
		return ""
	}
	for _, g := range c.Grants {
		rest, ok := strings.CutPrefix(req.URL.Path, "/v2/"+g.Repository)
		if ok && (strings.HasPrefix(rest, "/blobs/") || strings.HasPrefix(rest, "/manifests/")) &&
			slices.Contains(g.Actions, actionPush) {
			return g.Repository
		}
	}
	return ""
}

// countedBody counts the bytes that are read of a body.
type countedBody struct {
	io.ReadCloser
	refused *refusal
	count   func(n int64) error
}

// Read is part of io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if over := b.count(int64(n)); over != nil {
		b.refused.set(over)
		return 0, over
	}
	return n, err
}

// intentBytes counts the bytes pushed with each intent, in memory only: an intent lives for an hour.
type intentBytes struct {
	mu sync.Mutex
	of map[string]pushed
}

type pushed struct {
	bytes int64
	last  time.Time
}

func (i *intentBytes) fits(subject string, n int64) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.of[subject].bytes+n > MaxIntentBytes {
		return errIntentFull
	}
	return nil
}

func (i *intentBytes) add(subject string, n int64, now time.Time) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.of == nil {
		i.of = map[string]pushed{}
	}
	p := pushed{bytes: i.of[subject].bytes + n, last: now}
	i.of[subject] = p
	if p.bytes > MaxIntentBytes {
		return errIntentFull
	}
	return nil
}

// forget drops the intents without a push since the cutoff.
func (i *intentBytes) forget(cutoff time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for subject, p := range i.of {
		if p.last.Before(cutoff) {
			delete(i.of, subject)
		}
	}
}
