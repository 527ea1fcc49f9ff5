package httpapi

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/gin-gonic/gin/binding"
	lru "github.com/hashicorp/golang-lru/v2"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Config is what the handler needs besides the operations.
type Config struct {
	Authenticator Authenticator
	Auditor       Auditor
	// Registry serves /v2/ (image pushes and pulls, and their tokens); it does its own authentication. May be nil.
	Registry http.Handler
	// RegistryCaller names whom a request to the registry is charged to, and the org (empty where there is none), without
	// asking the database; subject is empty for a visitor. May be nil.
	RegistryCaller func(*http.Request) (subject, orgSlug string)
	// NodeKey gives a node's public key without a query for each call; nil for a node that there is not. May be nil.
	NodeKey func(ctx context.Context, nodeID string, now time.Time) (ed25519.PublicKey, error)
	// RequestKey keys the digests of requests that idempotency keeps.
	RequestKey []byte
	Log        *slog.Logger
	Now        func() time.Time
	// RequestsPerSecond and Burst bound each caller; zero means the defaults.
	RequestsPerSecond float64
	Burst             int
	// RegistryBytesPerSecond and RegistryBurstBytes bound what each caller moves through the registry; zero means the
	// defaults.
	RegistryBytesPerSecond float64
	RegistryBurstBytes     int
}

type api struct {
	conf Config
	// operations of the contract by method and gin's path, as in "POST /api/v1/orgs".
	operations map[string]*operation
	budgets    *budgets
	slots      slots
	// known has the callers of the credentials used last, by their digests, so that a flood is refused before the database
	// is asked: a known credential by its caller's budgets, an unknown one by its address's. It never decides who calls.
	known *lru.Cache[[sha256.Size]byte, callerID]
	// unrecorded counts the failures without an audit row since the last row.
	unrecorded atomic.Int64
	leftOut    metric.Int64Counter
	// versions may be nil: then only answers that have a version have an ETag.
	versions versions
	tracer   trace.Tracer
	duration metric.Float64Histogram
}

// NewHandler serves the operations of the contract below /api/v1, and the registry below /v2/.
func NewHandler(s StrictServerInterface, conf Config) (http.Handler, error) {
	if conf.Authenticator == nil || conf.Auditor == nil || conf.Log == nil || conf.Now == nil {
		return nil, errors.New("httpapi: Authenticator, Auditor, Log and Now are required")
	}
	if conf.RequestsPerSecond == 0 {
		conf.RequestsPerSecond, conf.Burst = defaultRequestsPerSecond, defaultBurst
	}
	if conf.RegistryBytesPerSecond == 0 {
		conf.RegistryBytesPerSecond, conf.RegistryBurstBytes = defaultRegistryBytesPerSecond, defaultRegistryBurstBytes
	}
	operations, err := loadContract(hubapi.OpenAPI)
	if err != nil {
		return nil, err
	}
	known, err := lru.New[[sha256.Size]byte, callerID](maxKnownCredentials)
	if err != nil {
		return nil, err
	}
	a := &api{
		conf:       conf,
		operations: operations,
		budgets:    newBudgets(conf),
		known:      known,
		tracer:     otel.Tracer("gpuaas/httpapi"),
	}
	// An instrument that cannot be made counts nothing; its error would be a misspelt name.
	meter := otel.Meter("gpuaas/httpapi")
	a.duration, _ = meter.Float64Histogram("http.server.request.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from the request's header to the end of the answer."))
	a.leftOut, _ = meter.Int64Counter("gpuaas.audit.unrecorded", metric.WithDescription("Denied or failed requests "+
		"without an audit row of their own, because a budget of rows was used up."))
	a.versions, _ = s.(versions)
	engine := a.engine(s)
	if conf.Registry == nil {
		return engine, nil
	}
	registry := a.registryHandler("/v2/", conf.Registry)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v2" || strings.HasPrefix(r.URL.Path, "/v2/") {
			registry.ServeHTTP(w, r)
			return
		}
		engine.ServeHTTP(w, r)
	}), nil
}

func (a *api) engine(s StrictServerInterface) *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	// The contract is checked before; gin's own struct validator would only add texts that quote values.
	binding.Validator = nil
	e := gin.New()
	e.ContextWithFallback = true
	e.HandleMethodNotAllowed = true
	e.RedirectTrailingSlash = false
	e.RedirectFixedPath = false
	// X-Forwarded-For is not trusted: anyone can write it.
	e.ForwardedByClientIP = false
	e.Use(a.observe, securityHeaders)
	e.NoRoute(a.charged(func(c *gin.Context) {
		a.fail(c, fault.New(fault.NotFound, codeRouteNotFound, "There is no such path; openapi.yaml lists them all.",
			nil).Permanent())
	}))
	e.NoMethod(a.charged(a.methodNotAllowed))

	strict := NewStrictHandlerWithOptions(s, []StrictMiddlewareFunc{a.conditional}, StrictGinServerOptions{
		RequestErrorHandlerFunc: func(c *gin.Context, err error) {
			a.fail(c, fault.New(fault.Malformed, codeInvalidRequest, "The body is not what the contract asks for.",
				err).WithField("",
				"has a value of the wrong type").Permanent())
		},
		HandlerErrorFunc: a.fail,
		ResponseErrorHandlerFunc: func(c *gin.Context, err error) {
			a.conf.Log.InfoContext(c.Request.Context(), "answer not delivered", slog.Any("error", err))
		},
	})
	options := GinServerOptions{ErrorHandler: func(c *gin.Context, err error, _ int) {
		a.fail(c, fault.New(fault.Malformed, codeInvalidRequest, "A parameter is not what the contract asks for.",
			err).Permanent())
	}}
	RegisterHandlersWithOptions(e.Group(basePath, a.admit), strict, options)

	// Probes ask at the root. Health and readiness have no budget: they are cheap, and an orchestrator kills a hub whose
	// probes fail.
	wrapper := ServerInterfaceWrapper{Handler: strict, ErrorHandler: options.ErrorHandler}
	e.GET("/healthz", wrapper.GetHealth)
	e.GET("/readyz", wrapper.GetReadiness)
	e.GET("/openapi.yaml", a.charged(wrapper.GetOpenAPI))
	return e
}

// charged charges a request that needs no credential to its address, and calls next.
func (a *api) charged(next gin.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		state := callOf(c.Request.Context())
		if err := a.budgets.spend(a.budgets.ofVisitor(state.remoteIP), state.at); err != nil {
			a.fail(c, err)
			return
		}
		next(c)
	}
}

func (a *api) methodNotAllowed(c *gin.Context) {
	state := callOf(c.Request.Context())
	state.failure = codeMethodNotAllowed
	c.Abort()
	writeProblem(c, Problem{
		Status: http.StatusMethodNotAllowed, Code: string(codeMethodNotAllowed), CorrelationID: state.correlationID,
		Detail: "This path does not take this method; the Allow header lists those it takes.",
	})
}

// securityHeaders tell browsers to treat answers as data and nothing else.
func securityHeaders(c *gin.Context) {
	h := c.Writer.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Strict-Transport-Security", "max-age=31536000")
	// Answers are for one caller at one moment, and some hold a secret once.
	h.Set("Cache-Control", "no-store")
	c.Next()
}
