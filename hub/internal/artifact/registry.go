package artifact

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/distribution/distribution/v3"
	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/auth"
	"github.com/distribution/distribution/v3/registry/handlers"
	"github.com/distribution/distribution/v3/registry/storage"
	"github.com/distribution/distribution/v3/registry/storage/driver"
	"github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
	storagemiddleware "github.com/distribution/distribution/v3/registry/storage/driver/middleware"
	"github.com/opencontainers/go-digest"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// MaxUploadBytes bounds the body of one request to the registry, and so a layer; a longer one is aborted.
	MaxUploadBytes = 64 << 30
	// maxTokenBytes bounds a registry token; a longer one is not read.
	maxTokenBytes = 16 << 10
	// maxStorageThreads bounds concurrent file operations; more wait.
	maxStorageThreads = 64
	// accessName is the name of the access control in the distribution library.
	accessName = "gpuaas"
)

// RegistryConfig wires a Registry.
type RegistryConfig struct {
	// Dir holds the blobs; it is made when it is missing.
	Dir string
	// Host is host:port under which clients reach the registry.
	Host string
	// SigningKey signs credentials and tokens.
	SigningKey ed25519.PrivateKey
	// TrustDomain is that of the nodes' certificates. The HTTPS server must verify client certificates that are given
	// (tls.VerifyClientCertIfGiven) against the node authority.
	TrustDomain string
	// IntentOpen reports as a fault that a publish intent has ended (CheckIntentOpen in a read transaction).
	IntentOpen func(ctx context.Context, intentID string) error
	// ShutOut reports whether a node is banned or removed, at each request with a node's credential or token, which is
	// then refused. It may be nil.
	ShutOut func(nodeID string) bool
	// Authenticate returns the owner of a person's or service account's access token; the subject is for the log.
	Authenticate func(ctx context.Context, accessToken string) (subject string, err error)
	// MayPull reports as a fault that the token's owner may not read the repository.
	MayPull func(ctx context.Context, accessToken, repository string) error
	// Quota is how many bytes the org may store; nil means no limit.
	Quota func(ctx context.Context, orgSlug string) (int64, error)
	// MinFreeBytes stays free on the file system of Dir: a push that needs it is refused.
	MinFreeBytes int64
	// Roots are what Collect keeps.
	Roots func(ctx context.Context) (Roots, error)
	Now   func() time.Time
	Log   *slog.Logger
}

var (
	errNoToken    = errors.New("the request carries no registry token")
	errNotTheNode = errors.New("the connection does not show the node's certificate, or the node is banned or removed")
)

// Registry is the OCI registry at /v2/: push with the credentials of a publish intent, pull with a node's credential or
// with the permission to read artifacts. It does not decide whether an image is trusted; Register does.
type Registry struct {
	conf    RegistryConfig
	log     *slog.Logger
	tokens  issuerOfTokens
	intents intentBytes
	app     *handlers.App
	// Requests and content access the files through store; driver and raw access them without counting or recording uses.
	store   *store
	content distribution.Namespace
	driver  driver.StorageDriver
	raw     distribution.Namespace
}

//nolint:gochecknoglobals // the library keeps its own global list of access controls and refuses a second entry
var registerAccess = sync.OnceValue(func() error {
	errStore := storagemiddleware.Register(storeName,
		func(_ context.Context, _ driver.StorageDriver, options map[string]any) (driver.StorageDriver, error) {
			return options["registry"].(*Registry).store, nil //nolint:forcetypeassert // OpenRegistry sets it
		})
	return errors.Join(errStore, auth.Register(accessName, func(options map[string]any) (auth.AccessController, error) {
		return options["registry"].(*Registry), nil //nolint:forcetypeassert // OpenRegistry sets it
	}))
})

// OpenRegistry opens the registry of a directory. It ends with ctx.
func OpenRegistry(ctx context.Context, conf RegistryConfig) (r *Registry, err error) {
	if conf.Log == nil {
		conf.Log = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(conf.Dir)
	if err != nil {
		return nil, fmt.Errorf("registry directory: %w", err)
	}
	err = os.MkdirAll(dir, 0o700)
	if err == nil {
		err = unix.Access(dir, unix.R_OK|unix.W_OK|unix.X_OK) // or every push would fail
	}
	if err != nil {
		return nil, fault.New(fault.Unavailable, codeRegistryUnavailable, "The registry's directory "+dir+" cannot be made "+
			"or written: it must belong to the hub's user, and below ProtectSystem=strict of the hub's unit be in "+
			"ReadWritePaths= too.", err)
	}
	if err := registerAccess(); err != nil {
		return nil, fmt.Errorf("register the access control: %w", err)
	}
	quiet(conf.Log)
	r = &Registry{conf: conf, log: conf.Log, tokens: issuerOfTokens{key: conf.SigningKey, now: conf.Now}}
	r.driver = filesystem.New(filesystem.DriverParameters{RootDirectory: dir, MaxThreads: maxStorageThreads})
	r.store = newStore(r.driver, &space{
		dir: dir, minFree: conf.MinFreeBytes, owners: map[string]*ownerSpace{}, uploads: map[string]*upload{},
	}, &uses{now: conf.Now, since: conf.Now(), last: map[digest.Digest]use{}})
	if r.content, err = storage.NewRegistry(ctx, r.store); err != nil {
		return nil, fmt.Errorf("open the registry's content: %w", err)
	}
	if r.raw, err = storage.NewRegistry(ctx, r.driver, storage.EnableDelete); err != nil {
		return nil, fmt.Errorf("open the registry's content: %w", err)
	}
	if err := r.measure(ctx); err != nil {
		return nil, err
	}
	secret, err := hkdf.Key(sha256.New, conf.SigningKey.Seed(), nil, "gpuaas registry upload state", sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("derive the registry's secret: %w", err)
	}
	// The library panics where others return an error.
	defer func() {
		if p := recover(); p != nil {
			r, err = nil, fmt.Errorf("open the registry: %v", p)
		}
	}()
	c := &configuration.Configuration{
		Storage: configuration.Storage{
			"filesystem": configuration.Parameters{"rootdirectory": dir, "maxthreads": maxStorageThreads},
			"redirect":   configuration.Parameters{"disable": true},
			// PurgeUploads does it, with a context.
			"maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}},
		},
		Auth: configuration.Auth{accessName: configuration.Parameters{"registry": r}},
		Middleware: map[string][]configuration.Middleware{
			"storage": {{Name: storeName, Options: configuration.Parameters{"registry": r}}},
		},
	}
	c.HTTP.Secret = hex.EncodeToString(secret)
	c.HTTP.RelativeURLs = true
	r.app = handlers.NewApp(ctx, c)
	return r, nil
}

// quiet sends the errors of the registry library to the hub's log. The library logs through the global logger of
// logrus, which is why this file imports logrus.
func quiet(log *slog.Logger) {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.ErrorLevel)
	logrus.StandardLogger().ReplaceHooks(logrus.LevelHooks{logrus.ErrorLevel: []logrus.Hook{logHook{log}}})
}

// logHook logs the library's errors that the request did not cause, such as a full disk, without fields that quote the
// request.
type logHook struct{ log *slog.Logger }

// Levels is part of logrus.Hook.
func (logHook) Levels() []logrus.Level { return []logrus.Level{logrus.ErrorLevel} }

// Fire is part of logrus.Hook. The library logs every 401 and 404 as an error; here they are debug messages.
func (h logHook) Fire(e *logrus.Entry) error {
	if code, failed := e.Data["err.code"]; failed && fmt.Sprint(code) == "unknown" {
		h.log.Error("registry failed", "detail", fmt.Sprint(e.Data["err.detail"]))
		return nil
	}
	h.log.Debug("registry", "message", e.Message)
	return nil
}

// Host is host:port under which clients reach the registry.
func (r *Registry) Host() string { return r.conf.Host }

// ServeHTTP serves /v2/ and the token endpoint.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.URL.Path == TokenPath {
		r.serveToken(w, req)
		return
	}
	if isForm(req.Header.Get("Content-Type")) {
		closeUnread(w, req)
		writeError(w, http.StatusUnsupportedMediaType, "UNSUPPORTED", "send blobs as application/octet-stream")
		return
	}
	// The distribution library calls FormValue before it authorizes. FormValue reads a form body without any limit when
	// the body is a MaxBytesReader; it reads nothing when Form is set.
	req.Form, req.PostForm = req.URL.Query(), url.Values{}
	c, err := r.accessToken(req)
	if err != nil {
		// The answer is a challenge: it needs no body.
		closeUnread(w, req)
		req.Body = http.NoBody
	}
	req.Body = http.MaxBytesReader(w, req.Body, MaxUploadBytes)
	if repository := pushTo(req, c); repository != "" {
		r.push(w, req, c, repository)
		return
	}
	r.app.ServeHTTP(w, req)
}

// UsedBytes is what the org's repositories store, each blob once, and unfinished uploads.
func (r *Registry) UsedBytes(orgSlug string) int64 { return r.store.space.used(orgSlug) }

// unreadTime is how long a refused request may still send its body.
const unreadTime = time.Second

// closeUnread ends an HTTP/1 connection whose request has a body that is not read: net/http would wait for it.
func closeUnread(w http.ResponseWriter, req *http.Request) {
	if req.ProtoMajor == 1 && req.ContentLength != 0 {
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(unreadTime))
	}
}

// isForm reports a content type whose body net/http would parse as a form; no registry client sends one.
func isForm(contentType string) bool {
	kind := strings.ToLower(contentType)
	return strings.Contains(kind, "application/x-www-form-urlencoded") || strings.Contains(kind, "multipart/")
}

// Caller returns the owner of the request's registry token and the org whose repositories it is for, by the token's
// signature alone. Both are empty without a token; the org is empty for the platform's repositories.
func (r *Registry) Caller(req *http.Request) (subject, orgSlug string) {
	c, err := r.accessToken(req)
	if err != nil {
		return "", ""
	}
	for _, g := range c.Grants {
		if slug, _ := OrgSlugOf(g.Repository); slug != "" {
			return c.Subject, slug
		}
	}
	return c.Subject, ""
}

// accessToken reads the request's token and checks that it counts on this connection.
func (r *Registry) accessToken(req *http.Request) (claims, error) {
	scheme, token, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxTokenBytes {
		return claims{}, errNoToken
	}
	c, err := r.tokens.read(audienceAccess, token)
	if err != nil {
		return claims{}, err
	}
	if c.NodeID != "" && !r.showsNode(req.TLS, c.NodeID) {
		return claims{}, errNotTheNode
	}
	return c, nil
}

// Authorized is part of auth.AccessController: it decides whether a request may access repositories.
func (r *Registry) Authorized(req *http.Request, access ...auth.Access) (*auth.Grant, error) {
	challenge := challenge{realm: realmOf(req), access: access}
	c, err := r.accessToken(req)
	if errors.Is(err, errNoToken) {
		return nil, challenge
	}
	if err != nil {
		challenge.code = "invalid_token"
		return nil, challenge
	}
	g := &auth.Grant{User: auth.UserInfo{Name: c.Subject}}
	for _, a := range access {
		if a.Type != "repository" || !slices.ContainsFunc(c.Grants, func(held grant) bool {
			return held.Repository == a.Name && slices.Contains(held.Actions, a.Action)
		}) {
			challenge.code = "insufficient_scope"
			return nil, challenge
		}
		g.Resources = append(g.Resources, a.Resource)
	}
	return g, nil
}

// realmOf is the URL of the token endpoint on the host that the client called.
func realmOf(req *http.Request) string {
	scheme := "https"
	if req.TLS == nil {
		scheme = "http"
	}
	return scheme + "://" + req.Host + TokenPath
}

// challenge is a 401 that names the token endpoint and the scope.
type challenge struct {
	realm  string
	access []auth.Access
	code   string
}

// Error is part of auth.Challenge.
func (challenge) Error() string { return "the registry wants a token" }

// SetHeaders is part of auth.Challenge (RFC 6750, distribution token specification).
func (c challenge) SetHeaders(_ *http.Request, w http.ResponseWriter) {
	header := fmt.Sprintf("Bearer realm=%q,service=%q", c.realm, audienceAccess)
	actions := map[string][]string{}
	var names []string
	for _, a := range c.access {
		if a.Type != "repository" {
			continue
		}
		if actions[a.Name] == nil {
			names = append(names, a.Name)
		}
		actions[a.Name] = append(actions[a.Name], a.Action)
	}
	var scopes []string
	for _, name := range names {
		scopes = append(scopes, "repository:"+name+":"+strings.Join(actions[name], ","))
	}
	if len(scopes) > 0 {
		header += fmt.Sprintf(",scope=%q", strings.Join(scopes, " "))
	}
	if c.code != "" {
		header += fmt.Sprintf(",error=%q", c.code)
	}
	w.Header().Set("WWW-Authenticate", header)
}

// PurgeUploads removes unfinished uploads that began before olderThan, and returns how many files it removed.
func (r *Registry) PurgeUploads(ctx context.Context, olderThan time.Time) (int, error) {
	if _, err := r.driver.Stat(ctx, repositoriesRoot); isAbsent(err) {
		return 0, nil // nothing was pushed yet
	}
	deleted, errs := storage.PurgeUploads(ctx, r.store, olderThan, true)
	return len(deleted), errors.Join(errs...)
}
