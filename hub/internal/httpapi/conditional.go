package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/etag"
)

const (
	resourceKey       = "x-resource"
	ifMatchHeader     = "If-Match"
	ifNoneMatchHeader = "If-None-Match"
)

// versions reads the ETag of a resource whose answer does not have its version.
type versions interface {
	ETag(ctx context.Context, r etag.Resource) (string, error)
}

// resourceOf returns the kind of resource that an operation reads or changes, and whether its answer has the version.
// An operation that changes a resource and does not say which is a defect of the contract.
func resourceOf(method, path string, op *openapi3.Operation) (kind string, versioned bool, err error) {
	kind, _ = op.Extensions[resourceKey].(string)
	_, after, _ := strings.Cut(path, "{")
	acts := method == http.MethodPost && after != "" &&
		(op.Responses.Status(http.StatusOK) != nil || op.Responses.Status(http.StatusAccepted) != nil)
	changes := acts || method == http.MethodPut || method == http.MethodPatch || method == http.MethodDelete
	takes := op.Parameters.GetByInAndName(openapi3.ParameterInHeader, ifMatchHeader) != nil
	switch {
	case changes && kind == "":
		return "", false, errors.New("it changes a resource: name its kind as x-resource, and take IfMatch")
	case kind != "" && !etag.Known(kind):
		return "", false, fmt.Errorf("package etag does not read the version of the %s %q", resourceKey, kind)
	case kind != "" && takes != (method != http.MethodGet):
		return "", false, errors.New("what has an x-resource takes IfMatch, but for a GET")
	}
	if success := op.Responses.Status(http.StatusOK); kind != "" && success != nil {
		if media := success.Value.Content.Get("application/json"); media != nil {
			versioned = media.Schema.Value.Properties["resource_version"] != nil
		}
	}
	return kind, versioned, nil
}

// conditional gives the answers about a resource its ETag, has commands meet If-Match, and answers If-None-Match.
func (a *api) conditional(next StrictHandlerFunc, _ string) StrictHandlerFunc {
	return func(c *gin.Context, request any) (any, error) {
		op := callOf(c.Request.Context()).op
		if op == nil || op.resource == "" {
			return next(c, request)
		}
		r := etag.Resource{Kind: op.resource, Param: c.Param}
		if !op.mutates() {
			return a.readResource(c, request, r, next)
		}
		p := &command.Precondition{Resource: r, IfMatch: c.GetHeader(ifMatchHeader)}
		c.Request = c.Request.WithContext(command.WithPrecondition(c.Request.Context(), p))
		answer, err := next(c, request)
		if p.ETag != "" {
			c.Header("ETag", p.ETag)
		}
		return answer, err
	}
}

func (a *api) readResource(c *gin.Context, request any, r etag.Resource, next StrictHandlerFunc) (any, error) {
	tag, op := "", callOf(c.Request.Context()).op
	if !op.versioned && a.versions != nil {
		// Before the resource is read: an ETag that is too old makes a caller read again, one that is too new would lose a
		// change.
		var err error
		if tag, err = a.versions.ETag(c.Request.Context(), r); err != nil {
			return nil, err
		}
	}
	answer, err := next(c, request)
	if err != nil {
		return nil, err
	}
	if op.versioned {
		tag = etag.From(strconv.FormatInt(reflect.ValueOf(answer).FieldByName("ResourceVersion").Int(), 10))
	}
	if tag == "" {
		return answer, nil
	}
	c.Header("ETag", tag)
	if has := c.GetHeader(ifNoneMatchHeader); has != "" && op.takes(ifNoneMatchHeader) && etag.NoneMatch(has, tag) {
		c.Status(http.StatusNotModified)
		c.Writer.WriteHeaderNow()
		return nil, nil //nolint:nilnil // the answer is out
	}
	return answer, nil
}

// ETag implements versions.
func (s *Server) ETag(ctx context.Context, r etag.Resource) (string, error) {
	return s.Queries.ETag(ctx, r)
}
